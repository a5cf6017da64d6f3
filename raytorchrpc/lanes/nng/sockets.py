"""nng sockets, by way of pynng: each is a pair socket over one connection.

No call here blocks inside nng, whose library aborts the process if that ends while a Python thread is in the library.
Threads wait on descriptors that nng offers instead, and nng's own threads do no more than set an event.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import itertools
import os
import select
import socket
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pynng
from pynng import ffi, lib

from raytorchrpc.errors import LaneUnavailable
from raytorchrpc.process import threads
from raytorchrpc.process.locks import Lock

#: Largest message given to nng, and so the most that a stranger can make it hold at a time (bytes). Larger frames cross
#: in pieces: while nng sends one, both ends copy the next into memory that is in their caches.
CHUNK = 1 << 20
#: Most that sealing adds to a piece: a tag, or the overhead of TLS records (bytes).
_SEALED_BYTES = CHUNK >> 8
#: Pieces that nng holds for a connection, in each direction.
_QUEUE = 4
#: Most that ``warm_up`` takes (seconds).
_WARM_UP_S = 1.0

_sockets: weakref.WeakSet[Any] = weakref.WeakSet()
_forked = False


def check_process() -> None:
    """Raise LaneUnavailable in a process that was forked from one that used nng."""
    if _forked:
        raise LaneUnavailable("nng", "this process was forked from one that uses nng, which does not survive a fork")


def forked() -> bool:
    """Whether this process was forked from one that used nng, whose eventfds and epoll sets it must not touch."""
    return _forked


def after_fork() -> None:
    """Called in a forked child: it lacks nng's threads, and closing a socket there would wait for them without end."""
    global _forked
    _forked = True
    for sock in list(_sockets):
        vars(sock).pop("_socket", None)
    atexit.unregister(getattr(pynng.nng, "_pynng_atexit", None))  # type: ignore[arg-type]


def _at_exit() -> None:
    # pynng was imported first, so this runs before pynng ends the library.
    for sock in list(_sockets):
        with contextlib.suppress(Exception):
            sock.close()


atexit.register(_at_exit)


_is_warm = False


def warm_up() -> None:
    """Have nng's thread that ends connections call Python once, by a connection within this process. Idempotent.

    When a thread first uses a library's thread-local data, the C library allocates them, and ends the process if it
    cannot. That thread would do so when the first connection breaks, perhaps because the process is out of memory.
    """
    global _is_warm
    if not _is_warm and not _forked:
        _is_warm = True
        until = time.monotonic() + _WARM_UP_S
        one, other = socket.socketpair()
        threads.start(_open_and_close, other, until, name="raytorchrpc-nng-start")
        _open_and_close(one, until)


def _open_and_close(sock: socket.socket, deadline: float) -> None:
    with sock, contextlib.suppress(OSError):
        PairSocket(sock, deadline).close()


class PairSocket:
    """An nng socket over one connection, with which it ends. One thread may send while another receives."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        """Take over a connected socket, and wait for the other end to do so. The caller closes ``sock`` in any case.

        Raises LaneUnavailable, OSError or TimeoutError.
        """
        check_process()
        self._begun = self._gone = False
        self._closing = Lock()
        self.gone_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable once the connection is lost or ``hang_up`` was called. Data that had arrived can still be received.
        """
        self._sock: Any = None
        try:
            self._sock = pynng.Pair0(
                recv_max_size=CHUNK + _SEALED_BYTES, recv_buffer_size=_QUEUE, send_buffer_size=_QUEUE
            )
            _sockets.add(self._sock)
            self.recv_fd: int = self._sock.recv_fd
            self._send_fd: int = self._sock.send_fd
            self._begin(sock, deadline)
        except BaseException as error:
            self.close()
            if isinstance(error, pynng.NNGException):  # no descriptor left, or no memory
                number = errno.EMFILE if error.errno == lib.NNG_ENOFILES else errno.ENOMEM
                raise OSError(number, f"{os.strerror(number)} (nng)") from error
            raise

    def _begin(self, sock: socket.socket, deadline: float) -> None:
        self._sock.add_post_pipe_connect_cb(lambda _: self._wake(begun=True))
        self._sock.add_post_pipe_remove_cb(lambda _: self.hang_up())
        listener = self._sock.listen("socket://")
        with sock.dup() as watched:  # nng reports no end that hangs up before it has greeted
            if error := lib.nng_listener_set_int(listener.listener, b"socket:fd", sock.fileno()):
                raise OSError(_text(error))
            sock.detach()  # nng closes it
            poll = select.poll()
            poll.register(self.gone_fd, select.POLLIN)
            poll.register(watched, select.POLLRDHUP)
            woken = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        with self._closing:
            if self._begun and not self._gone:
                os.eventfd_read(self.gone_fd)
            if self._begun:
                return
        raise ConnectionResetError("it hung up") if woken else TimeoutError("it did not accept the connection in time")

    def _wake(self, *, begun: bool = False, gone: bool = False) -> None:
        with self._closing:
            self._begun |= begun
            self._gone |= gone
            if self.gone_fd >= 0:
                os.eventfd_write(self.gone_fd, 1)

    @property
    def gone(self) -> bool:
        return self._gone

    def send(
        self,
        parts: Iterable[Any],
        until: Callable[[], float],
        seal: Callable[[list[Any]], list[Any]] | None = None,
        pause_at: float | None = None,
    ) -> list[Any]:
        """Send buffers, which hold at least one byte. They may be reused when this returns.

        ``until()``: the deadline of the next piece. ``seal``: seals each piece, see ``Protection``. ``pause_at``: if
        nng has no room then, this returns what is left. Raises OSError or TimeoutError.
        """
        cut = _cut(parts)
        for pieces in cut:
            if pause_at is not None and not self._await_room(pause_at):
                return [*pieces, *itertools.chain.from_iterable(cut)]
            message = _message(pieces if seal is None else seal(pieces))
            try:
                self._send_message(message, until)
            except BaseException:
                lib.nng_msg_free(message)
                raise
        return []

    def _await_room(self, until: float) -> bool:
        """Whether nng takes a piece, or has lost the connection, by then."""
        poll = select.poll()
        poll.register(self._send_fd, select.POLLIN)
        poll.register(self.gone_fd, select.POLLIN)
        return bool(poll.poll(max(0.0, until - time.monotonic()) * 1000))

    def _send_message(self, message: Any, until: Callable[[], float]) -> None:
        while True:
            if self._gone:
                raise ConnectionResetError("connection closed (the process ended or left the group)")
            error = lib.nng_sendmsg(self._sock.socket, message, lib.NNG_FLAG_NONBLOCK)
            if not error:
                return  # nng owns the message now
            if error != lib.NNG_EAGAIN:
                raise OSError(_text(error))
            if not self._await_room(until()):
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

    def hang_up(self) -> None:
        """Wake all threads that wait on this socket. It carries nothing more."""
        if _forked:
            return
        self._wake(gone=True)

    def close(self) -> None:
        """Free it. No thread may be waiting on it. Idempotent."""
        if self._sock is not None:
            self._sock.close()  # outside the lock: it ends with ``hang_up``
        with self._closing:
            self._gone = True
            fd, self.gone_fd = self.gone_fd, -1
        if fd >= 0:
            os.close(fd)


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
