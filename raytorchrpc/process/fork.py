"""What a forked child inherits of a member, and lets go of.

A child has its parent's memory and descriptors, but none of its threads. Its copies of the parent's sockets would keep
the peers from seeing the parent's end, and whatever it wrote to them, or did to an epoll set or an eventfd, it would
do to the parent. So right after a fork the child gives its copies up, without a word to anybody, and every use of the
group is refused there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import weakref
from collections.abc import Collection, Iterator
from typing import Any, Protocol

from raytorchrpc.errors import NotAMember

logger = logging.getLogger(__name__)

#: What all names of ours in Linux's abstract socket namespace begin with.
ABSTRACT = "raytorchrpc-"

Address = tuple[str, int]
"""Host and port."""


class ForkAware(Protocol):
    """Something that a child inherits and must not use."""

    def after_fork(self) -> Collection[Address]:
        """In the child, alone: let go. No lock may be taken, as nobody is left to release it.

        Returns the TCP addresses that belong to it: listened on, or connected to. Unix sockets are known by their name.
        """


_fork_aware: weakref.WeakSet[Any] = weakref.WeakSet()
_origin: str | None = None


def register(thing: ForkAware) -> None:
    """From now on, as long as it lives, a forked child is to let go of it."""
    _fork_aware.add(thing)


def forked_from(what: str) -> None:
    """Of an ForkAware, in the child: what the parent is, for errors."""
    global _origin
    _origin = _origin or what


def forked() -> bool:
    """Whether this process was forked from one that belonged to a group, or looked after one."""
    return _origin is not None


def check_process() -> None:
    """Raise NotAMember in a forked child."""
    if _origin is not None:
        raise NotAMember(
            f"this process was forked from {_origin}, and belongs to no group itself: make the call in the parent and "
            f"pass on what it returns, or make this process an actor of its own and add that to the group"
        )


def addresses_in(text: str) -> Iterator[Address]:
    """Those in URLs (``tcp://host:port``, ``uv://[host]:port``), however many there are."""
    for bare, bracketed, port in re.findall(r"//(?:([^/\[\]:,]+)|\[([^\]]+)\]):(\d+)", text):
        yield bare or bracketed, int(port)


def _after_fork() -> None:
    addresses: set[Address] = set()
    things = list(_fork_aware)
    for thing in things:
        try:
            addresses.update(thing.after_fork())
        except Exception:
            logger.exception("a forked child could not let go of %r", thing)
    if things:
        _leave_sockets(addresses)


def _leave_sockets(addresses: Collection[Address]) -> None:
    """Put /dev/null in the place of every socket of ours: whoever closes its number later does no harm."""
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for entry in os.listdir("/proc/self/fd"):
        fd = int(entry)
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{entry}").startswith("socket:") and _is_ours(fd, addresses):
                os.dup2(nothing, fd, inheritable=False)
    os.close(nothing)


def _is_ours(fd: int, addresses: Collection[Address]) -> bool:
    sock = socket.socket(fileno=fd)
    try:
        for end in (sock.getsockname, sock.getpeername):
            with contextlib.suppress(OSError):
                name = end()
                if isinstance(name, bytes) and name[1:].startswith(ABSTRACT.encode()):
                    return True
                if isinstance(name, tuple) and (str(name[0]).removeprefix("::ffff:"), name[1]) in addresses:
                    return True
        return False
    finally:
        sock.detach()


os.register_at_fork(after_in_child=_after_fork)
