"""Detaches a forked child from the group of its parent.

A child has its parent's memory and descriptors, but none of its threads. Its copies of the parent's sockets would keep
peers from detecting the parent's end, and its writes to them, or to an epoll set or an eventfd, would affect the
parent. So right after a fork the child closes its copies silently, and it refuses every use of the group.
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

#: Prefix of all our names in Linux's abstract socket namespace.
ABSTRACT = "raytorchrpc-"

Address = tuple[str, int]  # host and port


class ForkAware(Protocol):
    """An object that a child inherits and must not use."""

    def after_fork(self) -> Collection[Address]:
        """Release it in the child, which has one thread. Takes no lock, because the thread that held it is missing.

        Returns its TCP addresses, listened on or connected to. Its Unix sockets are found by name.
        """


_fork_aware: weakref.WeakSet[Any] = weakref.WeakSet()
_origin: str | None = None


def register(thing: ForkAware) -> None:
    """Call ``thing.after_fork`` in forked children, as long as it lives."""
    _fork_aware.add(thing)


def forked_from(parent: str) -> None:
    """Set the description of the parent, for errors. Called by a ForkAware in the child."""
    global _origin
    _origin = _origin or parent


def forked() -> bool:
    """Whether this process was forked from a member, a client or a supervisor of a group."""
    return _origin is not None


def check_process() -> None:
    """Raise NotAMember in a forked child."""
    if _origin is not None:
        raise NotAMember(
            f"this process was forked from {_origin}, and does not belong to a group itself: make the call in the "
            f"parent and pass its result on, start this process by spawn instead and call raytorchrpc.join() in it, or "
            f"make it an actor and add that to the group"
        )


def addresses_in(text: str) -> Iterator[Address]:
    """Yield the addresses in URLs (``tcp://host:port``, ``uv://[host]:port``)."""
    for bare, bracketed, port in re.findall(r"//(?:([^/\[\]:,]+)|\[([^\]]+)\]):(\d+)", text):
        yield bare or bracketed, int(port)


def _after_fork() -> None:
    addresses: set[Address] = set()
    things = list(_fork_aware)
    for thing in things:
        try:
            addresses.update(thing.after_fork())
        except Exception:
            logger.exception("a forked child could not release %r", thing)
    if things:
        _close_sockets(addresses)


def own_sockets() -> Iterator[tuple[int, socket.socket]]:
    """Yield the sockets of this process by descriptor, each for use until the next."""
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                with borrowed(int(entry)) as sock:
                    yield int(entry), sock


@contextlib.contextmanager
def borrowed(fd: int) -> Iterator[socket.socket]:
    """A socket object for a descriptor, which it does not close. Raises OSError if that is no socket.

    It has no type: Python would make the descriptor non-blocking for all its users after ``socket.setdefaulttimeout``.
    """
    sock = socket.socket(type=socket.SOCK_NONBLOCK, fileno=fd)
    try:
        yield sock
    finally:
        sock.detach()


def _close_sockets(addresses: Collection[Address]) -> None:
    """Replace every socket of ours by /dev/null, so that closing its number later is harmless."""
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd, sock in own_sockets():
        if _is_ours(sock, addresses):
            os.dup2(nothing, fd, inheritable=False)
    os.close(nothing)


def _is_ours(sock: socket.socket, addresses: Collection[Address]) -> bool:
    for end in (sock.getsockname, sock.getpeername):
        with contextlib.suppress(OSError):
            name = end()
            if isinstance(name, bytes) and name[1:].startswith(ABSTRACT.encode()):
                return True
            if isinstance(name, tuple) and (str(name[0]).removeprefix("::ffff:"), name[1]) in addresses:
                return True
    return False


os.register_at_fork(after_in_child=_after_fork)
