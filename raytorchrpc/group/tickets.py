"""Tickets, by which a process may join a group by itself: a child of a member, or any process of the cluster.

A child gets one from its nearest ancestor that is a member, over a Unix socket: each end learns from the kernel which
process the other is. Any other process reads Ray's key-value store, if the group lets it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hmac
import logging
import os
import pickle
import socket
import struct
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import ray

from raytorchrpc.calls.member import LocalMember
from raytorchrpc.errors import BootstrapError, ConfigurationError, NotAMember
from raytorchrpc.group.here import Place, inherit, place
from raytorchrpc.group.restarted import Record, lasts, record_of, records
from raytorchrpc.process import fork, threads

logger = logging.getLogger(__name__)

#: For a parent to hand over a ticket (seconds).
_TICKET_S = 5.0
#: For the thread that hands tickets over to end (seconds).
_END_S = 1.0
_TIMEVAL = struct.Struct("2l")  # seconds, microseconds
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_LENGTH = struct.Struct("<I")


class Ticket(NamedTuple):
    """With this a process may ask the supervisor of a group to take it in."""

    record: Record
    place: Place
    parent: str = ""
    """The member whose child the process is; empty for any process of the cluster."""
    consent: bytes = b""
    """Shows that a member handed it out; see ``consent``."""


def consent(secret: bytes, generation: str) -> bytes:
    """What members give their children, and show when they leave: it can be made only with the group's secret."""
    return hmac.digest(secret, f"join {generation}".encode(), "sha256")


# --- a member hands out tickets --------------------------------------------------------------------------------------


class Parent:
    """Hands tickets of its groups to processes that this one has started, directly or not, on a thread of its own."""

    def __init__(self) -> None:
        self._members: dict[str, tuple[LocalMember, bytes]] = {}
        """By generation, with what shows that this member handed a ticket out."""
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def serve(self, local: LocalMember, secret: bytes) -> None:
        """Hand out tickets of this group too, until this process leaves it. If it cannot, a warning is logged."""
        self._members[local.generation] = local, consent(secret, local.generation)
        local.at_end.append(partial(self._stop, local.generation))
        if self._listener is None:
            with contextlib.ExitStack() as undo:
                try:
                    listener = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                    listener.bind(_name(os.getpid()))
                    listener.listen(64)
                    self._thread = threads.start(self._serve, listener, name="raytorchrpc-children")
                except OSError as error:
                    logger.warning("%s: its child processes cannot join the group: %s", local.me.name, error)
                    return
                undo.pop_all()
                self._listener = listener

    def _stop(self, generation: str) -> None:
        self._members.pop(generation, None)
        if self._members or (listener := self._listener) is None or self._thread is None:
            return
        self._listener = None
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        listener.close()
        self._thread.join(_END_S)  # while it accepts, it holds the name that this process needs in its next group

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if error.errno in (errno.EINVAL, errno.EBADF):  # it was closed
                    return
                threads.pause()  # this process has no descriptor left: it is asked again
                continue
            with sock:
                try:
                    sock.settimeout(_TICKET_S)
                    self._hand_over(sock)
                except Exception as error:
                    logger.debug("this process did not hand over a ticket: %s", error)

    def _hand_over(self, sock: socket.socket) -> None:
        pid, uid, _ = _other_end(sock)
        if os.getpid() not in ancestors(pid):
            return
        handed = []
        for generation, (local, shown) in self._members.copy().items():
            if uid != os.geteuid() and not local.config.across_users:
                continue
            # One that has joined by a ticket hands on what came with it: without Ray it cannot look it up.
            own = _own.get(generation)
            if (record := record_of(generation) if own is None else own.record) is not None:
                handed.append((tuple(record._replace(actors=())), place(), local.me.name, shown))
        if handed:  # a short message: it fits into the socket's buffer, so a process that does not read holds nobody up
            data = pickle.dumps(handed)
            sock.sendall(_LENGTH.pack(len(data)) + data)


@functools.cache
def parent() -> Parent:
    """That of this process."""
    return Parent()


def _name(pid: int) -> bytes:
    """In Linux's abstract socket namespace. Another process may hold it: both ends ask the kernel who is there."""
    return f"\0{fork.ABSTRACT}parent-{pid}".encode()


def _other_end(sock: socket.socket) -> tuple[int, int, int]:
    """pid, uid and gid of the process that connected, or that listens."""
    pid, uid, gid = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid, gid


def ancestors(pid: int) -> Iterator[int]:
    """The processes above this one, the nearest first, as far as they still run."""
    while pid > 1:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                pid = int(file.read().rpartition(b")")[2].split()[1])
        except OSError:
            return
        yield pid


# --- a process gets a ticket -----------------------------------------------------------------------------------------

_own: dict[str, Ticket] = {}
"""By which this process has joined, or joins, by generation."""


def own(generation: str) -> Ticket | None:
    """The ticket by which this process has joined that group by itself; None if it has not."""
    return _own.get(generation)


def use(ticket: Ticket) -> None:
    """This process joins by that ticket."""
    _own[ticket.record.credentials.generation] = ticket
    inherit(ticket.place)


def drop(generation: str) -> None:
    """This process has left that group. Idempotent."""
    _own.pop(generation, None)


def find_ticket(group: str | None, deadline: float) -> Ticket:
    """A ticket for the group of that name; None: for the group of the nearest ancestor.

    Raises NotAMember, ConfigurationError if that ancestor is in several, and BootstrapError if an ancestor is a member
    and does not answer.
    """
    known: dict[str, str] = {}
    for pid in ancestors(os.getpid()):
        handed = {ticket.record.credentials.group: ticket for ticket in _tickets_from(pid, deadline)}
        if group in handed:
            return handed[group]
        if group is None and len(handed) > 1:
            names = ", ".join(map(repr, handed))
            raise ConfigurationError(f"process {pid}, which started this one, is in groups {names}: name one to join")
        if group is None and handed:
            return handed.popitem()[1]
        known.update(dict.fromkeys(handed, "a process that started this one is a member"))
    matching: list[Record] = []
    for record in records().values() if ray.is_initialized() else ():
        group_name = record.credentials.group
        if record.config.joinable_by != "cluster":
            known.setdefault(group_name, "GroupConfig(joinable_by='cluster') would let this process join it")
        elif lasts(record.owner):
            known.setdefault(group_name, "this process can join it by its name")
            matching += [record] if group_name == group else []
    if len(matching) == 1:
        return Ticket(matching[0], place())
    if matching:
        raise NotAMember(
            f"this process cannot join group {group!r}: {len(matching)} groups of the cluster have that name"
        )
    which = "a group" if group is None else f"group {group!r}"
    about = "; ".join(f"{name!r}: {why}" for name, why in known.items())
    without = "" if ray.is_initialized() else "; call ray.init(address=...) first to join one of the cluster's groups"
    raise NotAMember(
        f"this process cannot join {which}: no process that started it, and that still runs, is a member "
        "of a group with GroupConfig(joinable_by='children') or 'cluster'"
        f"{f' ({about})' if about else ''}{without}"
    )


def _tickets_from(pid: int, deadline: float) -> list[Ticket]:
    """Of that process, by the groups that it is a member of. Raises BootstrapError if it does not answer."""
    patience_s = max(0.001, min(_TICKET_S, deadline - time.monotonic()))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        # In place of a timeout, with which connecting fails at once while many others do.
        sock.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(int(patience_s), int(patience_s % 1 * 1e6))
        )
        try:
            sock.connect(_name(pid))
            other, uid, _ = _other_end(sock)
            if other != pid or uid not in (os.geteuid(), 0):  # a user with less rights could have this one run code
                return []
            sock.settimeout(patience_s)
            data = _read(sock, _LENGTH.unpack(_read(sock, _LENGTH.size))[0])
        except (TimeoutError, BlockingIOError) as error:
            raise BootstrapError(
                f"process {pid}, which started this one, is a member and has not answered within {patience_s:.3g} s: "
                f"it is suspended, or waits for Ray's control store"
            ) from error
        except (OSError, EOFError):
            return []
    return [Ticket(Record(*record), *rest) for record, *rest in pickle.loads(data)]


def _read(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (part := sock.recv(size - len(data))):
            raise EOFError
        data += part
    return data
