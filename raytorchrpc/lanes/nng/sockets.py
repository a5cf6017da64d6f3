"""nng by way of pynng: wires with one peer each, and the door where a peer asks for one.

Nothing here blocks inside nng: its library aborts the process if it ends while a thread of Python's is in there.
Everything waits on descriptors that nng offers, and nng's own threads run no more than one write to an eventfd.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pynng
from pynng import ffi, lib

from raytorchrpc.errors import LaneUnavailable
from raytorchrpc.process import fork, threads

#: Largest message that is handed to nng, so the most that a stranger can make it hold at a time (bytes). What is
#: larger crosses in pieces: both ends then copy into memory that is warm, while nng sends the piece before.
CHUNK = 1 << 20
#: What sealing adds to a piece, at most: a tag, or what TLS adds to each of its records (bytes).
_SEALED_BYTES = CHUNK >> 8
#: Pieces that nng holds for a wire, in each direction.
_QUEUE = 4
#: Longest message at the door (bytes).
_ASKED = 64
#: Connections at the door; for one more, the oldest is hung up on.
_AT_DOOR = 64
#: A wire is lost with its connection, and nng is not to make another behind our back.
_NEVER_MS = 2**31 - 1

_sockets: weakref.WeakSet[Any] = weakref.WeakSet()
_forked = False


def check_process() -> None:
    """Raise LaneUnavailable in a process that was forked from one that used nng."""
    if _forked:
        raise LaneUnavailable("nng", "this process was forked from one that uses nng, which does not survive a fork")


def forked() -> bool:
    """Whether nng is another process's: its eventfds and epoll sets are then that one's too, and not to be touched."""
    return _forked


def _after_fork() -> None:
    # nng's threads are not in the child, and closing a socket there waits for them for ever.
    global _forked
    if not _sockets:
        return
    _forked = True
    for sock in list(_sockets):
        vars(sock).pop("_socket", None)
    atexit.unregister(getattr(pynng.nng, "_pynng_atexit", None))  # type: ignore[arg-type]


def _at_exit() -> None:
    # Before pynng ends the library: it was imported first, so this runs first.
    for sock in list(_sockets):
        with contextlib.suppress(Exception):
            sock.close()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)


def _socket(kind: Callable[..., Any], **options: Any) -> Any:
    check_process()
    sock = kind(reconnect_time_min=_NEVER_MS, reconnect_time_max=_NEVER_MS, **options)
    _sockets.add(sock)
    sock.tcp_keepalive = True
    return sock


class PairSocket:
    """One socket of nng's with at most one connection, ever. Threads: one may send while another receives."""

    def __init__(self, kind: Callable[..., Any] = pynng.Pair0) -> None:
        """Raises LaneUnavailable or OSError."""
        self._gone = False
        self._met: int | None = None
        self.peer_uid: int | None = None
        """The user that the other end runs as, once connected; None: on another host, or not known."""
        self._closing = threading.Lock()
        self.gone_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable once the connection is lost or ``hang_up`` was called; what had arrived can still be received."""
        try:
            more = {"recv_buffer_size": _QUEUE, "send_buffer_size": _QUEUE} if kind is pynng.Pair0 else {}
            self._sock = _socket(kind, recv_max_size=CHUNK + _SEALED_BYTES, **more)
            self.recv_fd: int = self._sock.recv_fd
            self._send_fd: int = self._sock.send_fd
        except BaseException as error:
            os.close(self.gone_fd)
            if hasattr(self, "_sock"):
                self._sock.close()
            if isinstance(error, pynng.NNGException):  # no descriptor left, or no memory
                raise OSError(f"nng: {str(error).lower()}") from error
            raise
        self._addresses: list[fork.Address] = []
        fork.register(self)
        self._sock.add_pre_pipe_connect_cb(self._connected)
        self._sock.add_post_pipe_remove_cb(self._disconnected)

    # On a thread of nng's.

    def _connected(self, pipe: Any) -> None:
        if self._met is not None:
            pipe.close()
        else:
            uid = ffi.new("uint64_t *")
            if not lib.nng_pipe_get_uint64(pipe.pipe, b"ipc:peer-uid", uid):
                self.peer_uid = int(uid[0])
            self._met = pipe.id

    def _disconnected(self, pipe: Any) -> None:
        if pipe.id == self._met:
            self.hang_up()

    # On any other.

    @property
    def gone(self) -> bool:
        """Whether the connection is lost."""
        return self._gone

    def listen(self, url: str) -> str:
        """Wait for the one peer; returns the URL that it can dial. Raises OSError."""
        where = _listen(self._sock, url)
        self._addresses += fork.addresses_in(where)
        return where

    def dial(self, url: str, deadline: float) -> None:
        """Connect. Raises OSError, TimeoutError; the wire can only be closed then."""
        self._addresses += fork.addresses_in(url)
        done: concurrent.futures.Future[None] = concurrent.futures.Future()

        def attempt() -> None:
            try:
                self._sock.dial(url, block=True)
                done.set_result(None)
            except Exception as error:
                done.set_exception(error)

        # Only closing the socket ends an attempt early: a peer that stands still would keep this thread.
        try:
            threads.start(attempt, name="raytorchrpc-nng-dial")
        except threads.ThreadShortage as error:
            raise ConnectionError(str(error)) from error
        try:
            done.result(max(0.0, deadline - time.monotonic()))
        except concurrent.futures.TimeoutError:
            raise TimeoutError("it did not take the connection in time") from None
        except pynng.NNGException as error:
            raise ConnectionError(str(error).lower()) from error

    def send(
        self, parts: Iterable[Any], until: Callable[[], float], seal: Callable[[list[Any]], list[Any]] | None = None
    ) -> None:
        """Send buffers, of which there is at least one byte; the data is taken when this returns.

        ``until()``: when the next piece must have been taken. ``seal``: see ``Protection``; each piece is sealed.
        Raises OSError, TimeoutError.
        """
        for pieces in _cut(parts):
            message = _message(pieces if seal is None else seal(pieces))
            try:
                self._hand_over(message, until)
            except BaseException:
                lib.nng_msg_free(message)
                raise

    def _hand_over(self, message: Any, until: Callable[[], float]) -> None:
        while True:
            if self._gone:
                raise ConnectionResetError("connection closed (the process ended or left the group)")
            error = lib.nng_sendmsg(self._sock.socket, message, lib.NNG_FLAG_NONBLOCK)
            if not error:
                return  # it is nng's now
            if error != lib.NNG_EAGAIN:
                raise OSError(_text(error))
            if not self._wait(self._send_fd, until()):
                raise TimeoutError("it did not take the data in time")

    def receive(self) -> Any:
        """What arrived, as a buffer over nng's own memory, which stays until the buffer is dropped; None: nothing.

        Raises OSError once the wire is closed.
        """
        place = ffi.new("nng_msg **")
        error = lib.nng_recvmsg(self._sock.socket, place, lib.NNG_FLAG_NONBLOCK)
        if error == lib.NNG_EAGAIN:
            return None
        if error:
            raise OSError(_text(error))
        return _contents(place[0])

    def await_data(self, deadline: float) -> bool:
        """Block until there is something to receive or the connection is lost; False: not in time."""
        return self._wait(self.recv_fd, deadline)

    def _wait(self, fd: int, deadline: float) -> bool:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        poll.register(self.gone_fd, select.POLLIN)
        return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))

    def hang_up(self) -> None:
        """Wake everybody who waits on this wire; it carries nothing more."""
        if _forked:
            return
        with self._closing:
            self._gone = True
            if self.gone_fd >= 0:
                os.eventfd_write(self.gone_fd, 1)

    def close(self) -> None:
        """Free it. Nobody may be waiting on it any more. Idempotent."""
        self._sock.close()  # outside the lock: it ends with ``_disconnected``
        with self._closing:
            self._gone = True
            fd, self.gone_fd = self.gone_fd, -1
        if fd >= 0:
            os.close(fd)

    def after_fork(self) -> list[fork.Address]:
        """See forking.ForkAware; ``_after_fork`` sees to the rest."""
        return self._addresses


class Door:
    """Where anybody may ask for a wire, in a few bytes."""

    def __init__(self) -> None:
        self._addresses: list[fork.Address] = []
        fork.register(self)
        self._sock = _socket(pynng.Rep0, recv_max_size=_ASKED)
        self._pipes: dict[int, Any] = {}  # oldest first
        self._sock.add_pre_pipe_connect_cb(self._came)
        self._sock.add_post_pipe_remove_cb(lambda pipe: self._pipes.pop(pipe.id, None))
        self.fd: int = self._sock.recv_fd

    def _came(self, pipe: Any) -> None:
        # Strangers who say nothing must not use up this process's descriptors.
        if len(self._pipes) >= _AT_DOOR:
            oldest = next(iter(self._pipes))
            with contextlib.suppress(pynng.NNGException):
                self._pipes.pop(oldest).close()
        self._pipes[pipe.id] = pipe

    def listen(self, url: str) -> str:
        """Also listen here; returns the URL to dial. Raises OSError."""
        where = _listen(self._sock, url)
        self._addresses += fork.addresses_in(where)
        return where

    def after_fork(self) -> list[fork.Address]:
        """See forking.ForkAware."""
        return self._addresses

    def answer(self, how: Callable[[bytes], bytes | None]) -> None:
        """Answer all who ask now; ``how`` returns None for what is not a question. Never blocks."""
        place = ffi.new("nng_msg **")
        while not lib.nng_recvmsg(self._sock.socket, place, lib.NNG_FLAG_NONBLOCK):
            pipe = lib.nng_msg_get_pipe(place[0])
            said = how(bytes(_contents(place[0])))
            if said is None:
                lib.nng_pipe_close(pipe)
                continue
            answer = _message([said])
            if lib.nng_sendmsg(self._sock.socket, answer, lib.NNG_FLAG_NONBLOCK):  # it asks and does not listen
                lib.nng_msg_free(answer)
                lib.nng_pipe_close(pipe)

    def close(self) -> None:
        """Free it."""
        self._sock.close()


def ask(url: str, question: bytes, deadline: float) -> bytes:
    """Ask at a door. Raises OSError, TimeoutError."""
    wire = PairSocket(pynng.Req0)
    try:
        wire.dial(url, deadline)
        wire.send([question], lambda: deadline)
        while (answer := wire.receive()) is None:
            if wire.gone:
                raise ConnectionResetError("it hung up")
            if not wire.await_data(deadline):
                raise TimeoutError("it did not answer in time")
        return bytes(answer)
    finally:
        wire.close()


def _listen(sock: Any, url: str) -> str:
    try:
        listener = sock.listen(url)
    except pynng.NNGException as error:
        raise OSError(f"{str(error).lower()}: {url}") from error
    return f"tcp://{listener.local_address}" if url.startswith("tcp") else url


def _cut(parts: Iterable[Any]) -> Iterator[list[Any]]:
    """Pieces of at most CHUNK bytes, none empty, each a list of buffers."""
    pieces: list[Any] = []
    size = 0
    for part in parts:
        if len(part) <= CHUNK - size:
            pieces.append(part)
            size += len(part)
            continue
        view = memoryview(part)
        while len(view) > CHUNK - size:
            room = CHUNK - size
            yield [*pieces, view[:room]] if room else pieces
            view, pieces, size = view[room:], [], 0
        pieces, size = [view], len(view)
    if size:
        yield pieces


def _message(pieces: list[Any]) -> Any:
    """A message of nng's with this content; the caller owns it."""
    place = ffi.new("nng_msg **")
    if lib.nng_msg_alloc(place, 0) or (len(pieces) > 1 and lib.nng_msg_reserve(place[0], sum(map(len, pieces)))):
        raise MemoryError("nng has no memory for a message")
    for piece in pieces:
        if len(piece):
            buffer = piece if isinstance(piece, bytes) else ffi.from_buffer(piece)
            if lib.nng_msg_append(place[0], buffer, len(piece)):
                lib.nng_msg_free(place[0])
                raise MemoryError("nng has no memory for a message")
    return place[0]


def _contents(message: Any) -> Any:
    size = lib.nng_msg_len(message)
    if not size:  # its body may be NULL
        lib.nng_msg_free(message)
        return b""
    owner = ffi.gc(ffi.cast("char *", lib.nng_msg_body(message)), partial(_free, message))
    return ffi.buffer(owner, size)


def _free(message: Any, _: Any) -> None:
    lib.nng_msg_free(message)


def _text(error: int) -> str:
    return str(ffi.string(lib.nng_strerror(error)).decode()).lower()
