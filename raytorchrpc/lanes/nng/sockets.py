"""nng sockets, by way of pynng: pair sockets with one peer each, and the request socket where a peer asks for one.

No call here blocks inside nng, whose library aborts the process if that ends while a Python thread is in the library.
Threads wait on descriptors that nng offers instead, and nng's own threads do no more than write to an eventfd.
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

#: Largest message given to nng, and so the most that a stranger can make it hold at a time (bytes). Larger frames cross
#: in pieces: while nng sends one, both ends copy the next into memory that is in their caches.
CHUNK = 1 << 20
#: Most that sealing adds to a piece: a tag, or the overhead of TLS records (bytes).
_SEALED_BYTES = CHUNK >> 8
#: Pieces that nng holds for a connection, in each direction.
_QUEUE = 4
#: Longest message to a request socket (bytes).
_REQUEST_BYTES = 64
#: Most connections to a request socket; beyond that, the oldest is closed.
_REQUESTERS = 64
#: nng must not reconnect: a pair socket ends with its connection.
_NEVER_MS = 2**31 - 1

_sockets: weakref.WeakSet[Any] = weakref.WeakSet()
_forked = False


def check_process() -> None:
    """Raise LaneUnavailable in a process that was forked from one that used nng."""
    if _forked:
        raise LaneUnavailable("nng", "this process was forked from one that uses nng, which does not survive a fork")


def forked() -> bool:
    """Whether this process was forked from one that used nng, whose eventfds and epoll sets it must not touch."""
    return _forked


def _after_fork() -> None:
    # The child lacks nng's threads, and closing a socket there would wait for them without end.
    global _forked
    if not _sockets:
        return
    _forked = True
    for sock in list(_sockets):
        vars(sock).pop("_socket", None)
    atexit.unregister(getattr(pynng.nng, "_pynng_atexit", None))  # type: ignore[arg-type]


def _at_exit() -> None:
    # pynng was imported first, so this runs before pynng ends the library.
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
    """An nng socket that has one connection in its life, at most. One thread may send while another receives."""

    def __init__(self, kind: Callable[..., Any] = pynng.Pair0) -> None:
        """Raises LaneUnavailable or OSError."""
        self._gone = False
        self._pipe_id: int | None = None
        self.peer_uid: int | None = None
        """User id of the other end, once connected; None if it is on another host or unknown."""
        self._closing = threading.Lock()
        self.gone_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable once the connection is lost or ``hang_up`` was called. Data that had arrived can still be received.
        """
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

    # The next two run on nng's threads.

    def _connected(self, pipe: Any) -> None:
        if self._pipe_id is not None:
            pipe.close()
        else:
            uid = ffi.new("uint64_t *")
            if not lib.nng_pipe_get_uint64(pipe.pipe, b"ipc:peer-uid", uid):
                self.peer_uid = int(uid[0])
            self._pipe_id = pipe.id

    def _disconnected(self, pipe: Any) -> None:
        if pipe.id == self._pipe_id:
            self.hang_up()

    @property
    def gone(self) -> bool:
        """Whether the connection is lost."""
        return self._gone

    def listen(self, url: str) -> str:
        """Listen for the one peer; returns the URL to dial. Raises OSError."""
        where = _listen(self._sock, url)
        self._addresses += fork.addresses_in(where)
        return where

    def dial(self, url: str, deadline: float) -> None:
        """Connect. Raises OSError or TimeoutError; the socket can only be closed then."""
        self._addresses += fork.addresses_in(url)
        done: concurrent.futures.Future[None] = concurrent.futures.Future()

        def attempt() -> None:
            try:
                self._sock.dial(url, block=True)
                done.set_result(None)
            except Exception as error:
                done.set_exception(error)

        # Only closing the socket ends an attempt early, so a peer that does not respond would keep this thread.
        try:
            threads.start(attempt, name="raytorchrpc-nng-dial")
        except threads.ThreadShortage as error:
            raise ConnectionError(str(error)) from error
        try:
            done.result(max(0.0, deadline - time.monotonic()))
        except concurrent.futures.TimeoutError:
            raise TimeoutError("it did not accept the connection in time") from None
        except pynng.NNGException as error:
            raise ConnectionError(str(error).lower()) from error

    def send(
        self, parts: Iterable[Any], until: Callable[[], float], seal: Callable[[list[Any]], list[Any]] | None = None
    ) -> None:
        """Send buffers, which hold at least one byte. They may be reused when this returns.

        ``until()``: the deadline of the next piece. ``seal``: seals each piece, see ``Protection``. Raises OSError or
        TimeoutError.
        """
        for pieces in _cut(parts):
            message = _message(pieces if seal is None else seal(pieces))
            try:
                self._send_message(message, until)
            except BaseException:
                lib.nng_msg_free(message)
                raise

    def _send_message(self, message: Any, until: Callable[[], float]) -> None:
        while True:
            if self._gone:
                raise ConnectionResetError("connection closed (the process ended or left the group)")
            error = lib.nng_sendmsg(self._sock.socket, message, lib.NNG_FLAG_NONBLOCK)
            if not error:
                return  # nng owns the message now
            if error != lib.NNG_EAGAIN:
                raise OSError(_text(error))
            if not self._wait(self._send_fd, until()):
                raise TimeoutError("it did not take the data in time")

    def receive(self) -> Any:
        """Return the next message, or None if none has arrived. Raises OSError once the socket is closed.

        The message is a buffer over nng's own memory, which lives until the buffer is dropped.
        """
        place = ffi.new("nng_msg **")
        error = lib.nng_recvmsg(self._sock.socket, place, lib.NNG_FLAG_NONBLOCK)
        if error == lib.NNG_EAGAIN:
            return None
        if error:
            raise OSError(_text(error))
        return _contents(place[0])

    def await_data(self, deadline: float) -> bool:
        """Block until a message has arrived or the connection is lost. False if the deadline passed first."""
        return self._wait(self.recv_fd, deadline)

    def _wait(self, fd: int, deadline: float) -> bool:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        poll.register(self.gone_fd, select.POLLIN)
        return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))

    def hang_up(self) -> None:
        """Wake all threads that wait on this socket. It carries nothing more."""
        if _forked:
            return
        with self._closing:
            self._gone = True
            if self.gone_fd >= 0:
                os.eventfd_write(self.gone_fd, 1)

    def close(self) -> None:
        """Free it. No thread may be waiting on it. Idempotent."""
        self._sock.close()  # outside the lock: it ends with ``_disconnected``
        with self._closing:
            self._gone = True
            fd, self.gone_fd = self.gone_fd, -1
        if fd >= 0:
            os.close(fd)

    def after_fork(self) -> list[fork.Address]:
        """See fork.ForkAware. The function ``_after_fork`` does the rest."""
        return self._addresses


class RequestSocket:
    """An nng socket that answers short requests, from any process that can reach it."""

    def __init__(self) -> None:
        self._addresses: list[fork.Address] = []
        fork.register(self)
        self._sock = _socket(pynng.Rep0, recv_max_size=_REQUEST_BYTES)
        self._pipes: dict[int, Any] = {}  # oldest first
        self._sock.add_pre_pipe_connect_cb(self._connected)
        self._sock.add_post_pipe_remove_cb(lambda pipe: self._pipes.pop(pipe.id, None))
        self.fd: int = self._sock.recv_fd

    def _connected(self, pipe: Any) -> None:
        # Strangers that send nothing must not use up this process's descriptors.
        if len(self._pipes) >= _REQUESTERS:
            oldest = next(iter(self._pipes))
            with contextlib.suppress(pynng.NNGException):
                self._pipes.pop(oldest).close()
        self._pipes[pipe.id] = pipe

    def listen(self, url: str) -> str:
        """Listen on one more URL; returns the URL to dial. Raises OSError."""
        where = _listen(self._sock, url)
        self._addresses += fork.addresses_in(where)
        return where

    def after_fork(self) -> list[fork.Address]:
        """See fork.ForkAware."""
        return self._addresses

    def answer(self, handle: Callable[[bytes], bytes | None]) -> None:
        """Answer all requests that have arrived; ``handle`` returns None for an invalid one. Never blocks."""
        place = ffi.new("nng_msg **")
        while not lib.nng_recvmsg(self._sock.socket, place, lib.NNG_FLAG_NONBLOCK):
            pipe = lib.nng_msg_get_pipe(place[0])
            reply = handle(bytes(_contents(place[0])))
            if reply is None:
                lib.nng_pipe_close(pipe)
                continue
            message = _message([reply])
            if lib.nng_sendmsg(self._sock.socket, message, lib.NNG_FLAG_NONBLOCK):  # it does not read the reply
                lib.nng_msg_free(message)
                lib.nng_pipe_close(pipe)

    def close(self) -> None:
        """Free it."""
        self._sock.close()


def request(url: str, question: bytes, deadline: float) -> bytes:
    """Send a request to a RequestSocket, and return the answer. Blocks. Raises OSError or TimeoutError."""
    sock = PairSocket(pynng.Req0)
    try:
        sock.dial(url, deadline)
        sock.send([question], lambda: deadline)
        while (answer := sock.receive()) is None:
            if sock.gone:
                raise ConnectionResetError("it hung up")
            if not sock.await_data(deadline):
                raise TimeoutError("it did not answer in time")
        return bytes(answer)
    finally:
        sock.close()


def _listen(sock: Any, url: str) -> str:
    try:
        listener = sock.listen(url)
    except pynng.NNGException as error:
        raise OSError(f"{str(error).lower()}: {url}") from error
    return f"tcp://{listener.local_address}" if url.startswith("tcp") else url


def _cut(parts: Iterable[Any]) -> Iterator[list[Any]]:
    """Cut buffers into pieces of at most CHUNK bytes. Each piece is a list of buffers, and none is empty."""
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
    """Make an nng message, which the caller owns."""
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
