"""Guards the TCP listeners of libraries that authenticate nobody: TensorPipe's and gloo's.

The guard accepts connections itself, asks whose they are, and hands those of members over; others are closed. The
library reads nothing that a stranger has sent, and does not see it come or go.

A connection is handed over by descriptor: the library polls a private listener, to which only the guard can connect. It
accepts a stand-in there, and the member's connection takes the place of the stand-in (``dup2``). What a library polls,
and with which data, is in ``/proc/self/fdinfo`` of its epoll set, see proc(5).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import os
import platform
import re
import resource
import select
import socket
import stat
import sys
import termios
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

from raytorchrpc.process import fork, tcp, threads
from raytorchrpc.process.locks import Lock

T = TypeVar("T")

logger = logging.getLogger(__name__)

#: Most connections that have said nothing yet, beyond which the oldest is closed, and most that wait to be asked about,
#: beyond which others wait in the kernel.
MOST_PENDING = 512
#: Most threads that ask whose connections are. Another one starts only while those that ask have taken so long
#: (seconds): the more connections one asks about, the fewer questions members have to answer.
_MOST_ASKING, _ASKS_FOR_S = 4, 0.2
#: A connection on which nothing has arrived is closed after this time (seconds).
_SILENT_S = 10.0
#: Longest time until a library has accepted a stand-in (seconds).
_ACCEPT_S = 10.0
#: Longest time that ``stop`` waits for the guard's thread, which never blocks (seconds).
_STOP_S = 5.0
_ONE_LOOK_S = 0.0005
LONGEST_BYTES = 1 << 16
"""Of a first message."""
_TALKS = select.EPOLLIN | select.EPOLLRDHUP
_LEFT = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR


class Connection(NamedTuple):
    """Both ends of a TCP connection, in the view of the process that made it."""

    here: fork.Address
    there: fork.Address


#: Yields those connections that members made, each as soon as that is known. May block, for a bounded time. Gets the
#: name of the member that has probably made each, or None.
Vouch = Callable[[Mapping[Connection, str | None]], Iterable[Connection]]
#: An epoll set, the events that it waits for, and the data that comes with them.
Registered = tuple[int, int, int]
#: Hands a connection over; raises OSError if it cannot.
Deliver = Callable[[socket.socket], None]
#: How many bytes the first message of a connection has, by its first eight bytes or what there is of them.
Size = Callable[[bytes], int]
#: Which member has probably made a connection, by the same bytes.
Guess = Callable[[bytes], str | None]


class _Door(NamedTuple):
    listener: socket.socket
    deliver: Deliver
    size: Size
    guess: Guess


def _most_pending() -> int:
    """MOST_PENDING, or less where that would take much of the descriptors that this process may have."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_PENDING if limit == resource.RLIM_INFINITY else min(MOST_PENDING, limit // 16)


class Guard:
    """The guarded listeners of this process. Thread-safe. One thread of its own accepts; others ask and hand over."""

    def __init__(self) -> None:
        self._vouchers: list[Vouch] = []
        """Each says which connections the members of one group made."""
        self._pid = os.getpid()
        self._lock = Lock()
        self._doors: dict[int, _Door] = {}
        """By descriptor."""
        self._silent: dict[int, tuple[socket.socket, _Door, float]] = {}
        """By descriptor, oldest first: no whole message has arrived on them since that time (``time.monotonic``)."""
        self._talking: list[tuple[socket.socket, Deliver, str | None]] = []
        self._poll, self._wake_poll = select.epoll(), select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        for poll in (self._poll, self._wake_poll):
            poll.register(self._wake, select.EPOLLIN)
        self._thread: threading.Thread | None = None
        self._asking, self._asked_at = 0, 0.0
        """Threads that ask, and when one last began to (``time.monotonic``)."""
        self._looking = Lock()
        self._looked_at, self._own = 0.0, dict[Connection, int]()
        """This process's connections, and when the look at them began."""
        self._sockets = dict[tuple[int, int], Connection | None]()
        """What that look found, by descriptor and inode."""
        fork.register(self)

    def listen(self, host: str, deliver: Deliver, size: Size) -> socket.socket:
        """Open a listener at this address, on a port that the kernel picks. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        made = socket.create_server((host, 0), family=family, backlog=MOST_PENDING)
        self.watch(made, deliver, size)
        return made

    def watch(self, listener: socket.socket, deliver: Deliver, size: Size, guess: Guess = lambda head: None) -> None:
        """Accept from a listener; each connection of a member goes to ``deliver``, on a thread of the guard's.

        Once its first message has arrived: TensorPipe does not listen any more when a connection ends before that.
        """
        listener.setblocking(False)
        with self._lock:
            self._doors[listener.fileno()] = _Door(listener, deliver, size, guess)
        self._poll.register(listener.fileno(), select.EPOLLIN)

    def start(self, vouch: Vouch) -> None:
        """Accept, from now on, what ``vouch`` says that members made, too. Raises ThreadShortage."""
        with self._lock:
            self._vouchers.append(vouch)
            if self._thread is None:
                step = threads.surviving(self._step, "raytorchrpc-guard")  # strangers cause its failures
                self._thread = threads.start(threads.serve, step, "raytorchrpc-guard", name="raytorchrpc-guard")

    def stop(self, vouch: Vouch) -> None:
        """Trust it no more. Without any other, accept nothing until ``start``; the thread ends. Idempotent."""
        with self._lock:
            if vouch in self._vouchers:
                self._vouchers.remove(vouch)
            thread = None if self._vouchers else self._thread
            self._thread = self._thread if self._vouchers else None
        if thread is not None:
            os.eventfd_write(self._wake, 1)
            thread.join(_STOP_S)

    def close(self, listener: socket.socket) -> None:
        """Listen no longer there. Idempotent."""
        with self._lock:
            if self._doors.pop(listener.fileno(), None) is not None:
                self._poll.unregister(listener.fileno())
        listener.close()

    def after_fork(self) -> list[fork.Address]:
        self._lock, self._thread = Lock(), None
        doors = [door.listener for door in self._doors.values()]
        self._doors, self._silent, self._talking = {}, {}, []
        addresses = []
        for listener in doors:
            with contextlib.suppress(OSError):
                addresses.append(address(listener.getsockname()))
        return addresses

    def _step(self) -> bool:
        oldest = next(iter(self._silent.values()), None)
        wait_s = None if oldest is None else max(0.0, oldest[2] + _SILENT_S - time.monotonic())
        if self._talking:  # those that ask may wait for a slow member: another thread asks then
            wait_s = _ASKS_FOR_S
        is_full = len(self._talking) >= _most_pending()  # once: those that ask empty it meanwhile
        for fd, events in (self._wake_poll if is_full else self._poll).poll(wait_s):
            door = self._doors.get(fd)
            if fd == self._wake:
                os.eventfd_read(self._wake)
                return False
            if door is None:
                self._read(fd, has_left=bool(events & _LEFT))
            elif not self._accept(door):
                self._drop_oldest()
        most = _most_pending()
        while (
            not is_full  # then they may have said something
            and (oldest := next(iter(self._silent.values()), None))
            and (len(self._silent) > most or oldest[2] + _SILENT_S <= time.monotonic())
        ):
            self._drop_oldest()
        self._ask()
        return True

    def _accept(self, door: _Door) -> bool:
        """Take in who waits there; False if this process lacks descriptors or memory for that."""
        for _ in range(_most_pending()):
            try:
                sock, _ = door.listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return True
            except OSError:  # it was closed just now, or there is no descriptor left
                return door.listener.fileno() < 0
            tcp.admit_all(sock)  # a filter of the listener is for those who connect
            self._silent[sock.fileno()] = sock, door, time.monotonic()
            self._poll.register(sock.fileno(), _TALKS)
        return True

    def _read(self, fd: int, *, has_left: bool) -> None:
        """Look, without reading it, whether the first message is there. ``has_left``: no more will come."""
        if (waiting := self._silent.get(fd)) is None:
            return
        sock, door, _ = waiting
        needed, head = LONGEST_BYTES + 1, b""
        with contextlib.suppress(OSError):  # the other end has reset it
            try:
                head = sock.recv(8, socket.MSG_PEEK | socket.MSG_DONTWAIT)
                needed = door.size(head)
            except BlockingIOError:  # the event was for another socket of this number
                return
            here = int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder)
            # Urgent data wakes this thread again and again: it counts as received, but not as readable.
            woken_in_vain = sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == needed
            if here < needed <= LONGEST_BYTES and not has_left and not woken_in_vain:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, needed)
                return
            if here < needed:
                needed = LONGEST_BYTES + 1
        del self._silent[fd]
        self._poll.unregister(fd)
        if needed > LONGEST_BYTES:
            sock.close()
            return
        with self._lock:
            self._talking.append((sock, door.deliver, door.guess(head)))

    def _drop_oldest(self) -> None:
        oldest = next(iter(self._silent), None)
        if oldest is None:
            threads.pause()  # nothing to give up: wait for descriptors
        else:
            self._poll.unregister(oldest)
            self._silent.pop(oldest)[0].close()

    def _ask(self) -> None:
        """Have a thread ask about those that talk: another than one that waits for the answer of a slow member."""
        with self._lock:
            asks = self._asking and time.monotonic() < self._asked_at + _ASKS_FOR_S
            if asks or self._asking == _MOST_ASKING or not self._talking:
                return
            self._asking += 1
        threads.start(self._ask_all, name="raytorchrpc-guard-asks")

    def _ask_all(self) -> None:
        while True:
            with self._lock:
                batch, self._talking = self._talking, []
                self._asked_at = time.monotonic()
                if not batch:
                    self._asking -= 1
                    return
            self._decide(batch)

    def _decide(self, batch: list[tuple[socket.socket, Deliver, str | None]]) -> None:
        pending: dict[Connection, tuple[socket.socket, Deliver]] = {}
        guesses: dict[Connection, str | None] = {}
        for sock, deliver, guess in batch:
            try:
                connection = Connection(address(sock.getpeername()), address(sock.getsockname()))
                pending[connection], guesses[connection] = (sock, deliver), guess
            except OSError:  # the other end is gone
                sock.close()
        try:
            for connection in self.vouch(guesses):
                sock, deliver = pending.pop(connection)
                try:
                    sock.getpeername()  # else it was reset: the answer is about a member's connection of the same port
                    deliver(sock)
                except Exception as error:
                    logger.warning("a connection from %s:%d was closed: %s", *connection.here, error)
                finally:
                    sock.close()
        except Exception as error:
            threads.report(error, "connections to torchrpc were closed")
        if pending:
            hosts = sorted({connection.here[0] for connection in pending})
            logger.warning("closed %d connections from %s that no member made", len(pending), ", ".join(hosts))
        for sock, _ in pending.values():
            sock.close()

    def vouch(self, connections: Mapping[Connection, str | None]) -> Iterator[Connection]:
        """Yield those that members of any group made; see Vouch."""
        unknown = dict(connections)
        for vouch in self._vouchers.copy():
            for connection in vouch(unknown.copy()) if unknown else ():
                if unknown.pop(connection, self) is not self:
                    yield connection

    def own_connections(self) -> Mapping[Connection, int]:
        """The TCP connections of this process, those that are being made included, with their descriptors.

        Callers share a look that began after they came: many members may ask at once.
        """
        came = time.monotonic()
        with self._looking:
            if self._looked_at <= came:
                began = time.monotonic()
                self._sockets = dict(_sockets(self._sockets))  # raises OSError without descriptors
                self._looked_at = began
                self._own = {each: fd for (fd, _), each in self._sockets.items() if each is not None}
            return self._own


class Takeover:
    """A library's listener under guard. Thread-safe.

    The library goes on with the numbers of its descriptors. The guard changes what they stand for::

        members, strangers --> public listener --> the guard asks whose each is --> a member's connection
                                                                                         | dup2
        the guard's maker  --> private listener, under the  -- accepted by the -->  the stand-in's number,
                               number that the library has      library             which the library polls

    - The private listener admits the one maker that the guard connects, and nobody at other times.
    - The library has read nothing under a stand-in's number before the member's connection is there.
    - A number is out of the library's epoll set while what it stands for changes, and returns to it with the events and
      the data that the library had given. So the library never sees an event of the wrong connection.
    """

    def __init__(self, fd: int, registered: Registered | None) -> None:
        """Exchange the listener under this descriptor, which the library keeps. Raises OSError if nothing polls it."""
        if registered is None:
            raise OSError(f"no epoll set holds the listener {fd}")
        self._epoll, events, data = registered
        self._fd = fd
        self._delivered: dict[int, int] = {}
        """The inode of each connection that the library got, by descriptor."""
        self.public = socket.socket(fileno=fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3))
        self._lock = Lock()
        host = self.public.getsockname()[0]
        self._host = host, 0, *self.public.getsockname()[2:]
        self._private = socket.socket(self.public.family)
        self._private.bind(self._host)
        self._admit()  # before it listens
        self._private.listen()
        _copy_flags(fd, self._private.fileno())
        _epoll_ctl(self._epoll, _DELETE, fd)
        os.dup2(self._private.fileno(), fd, inheritable=False)
        _epoll_ctl(self._epoll, _ADD, fd, events, data)

    def deliver(self, sock: socket.socket) -> None:
        """Have the library accept this connection. Blocks for a millisecond. Raises OSError if it does not accept."""
        until = time.monotonic() + _ACCEPT_S
        with self._lock, socket.socket(self.public.family) as maker:
            stand_in = self._connect(maker, until)
            events, data = _await(lambda: self._reads(stand_in), until)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            tcp.detect_silence(sock)
            _copy_flags(stand_in, sock.fileno())
            _epoll_ctl(self._epoll, _DELETE, stand_in)
            try:
                with socket.socket(fileno=os.dup(stand_in)) as replaced:
                    os.dup2(sock.fileno(), stand_in, inheritable=False)
                    self._delivered[stand_in] = os.fstat(stand_in).st_ino
                    replaced.shutdown(socket.SHUT_WR)  # a forked child may have it too
                while said := maker.recv(1 << 16):  # by a library that speaks first, as TensorPipe's ibv
                    sock.sendall(said)
            finally:
                _epoll_ctl(self._epoll, _ADD, stand_in, events, data)

    def _connect(self, maker: socket.socket, until: float) -> int:
        """Connect to the private listener; returns the descriptor under which the library has accepted that."""
        where = self._private.getsockname()  # raises OSError after ``close``
        maker.bind(self._host)
        self._admit(maker)
        try:
            before = set(_polled(self._epoll))
            maker.connect(where)
            return _await(lambda: self._accepted(maker.getsockname(), before), until)
        finally:
            self._admit()

    def _accepted(self, maker: tuple[str, int], before: Collection[tuple[int, int]]) -> int | None:
        """The descriptor that is connected to this socket. ``before``: those that the library polled before."""
        for fd, inode in _polled(self._epoll):
            if (fd, inode) not in before:
                with contextlib.suppress(OSError), fork.borrowed(fd) as sock:
                    if sock.getpeername() == maker:
                        return fd
        return None

    def _reads(self, stand_in: int) -> tuple[int, int] | None:
        """The events and data with which the library waits to read there. TensorPipe's ibv first waits to write."""
        _, events, data = registered((self._epoll,)).get(stand_in, (0, 0, 0))
        return (events, data) if events & select.EPOLLIN else None

    def _admit(self, maker: socket.socket | None = None) -> None:
        """Have the private listener admit this socket alone; None: nobody."""
        try:
            if maker is None:
                tcp.admit_only(self._private, ())
            else:
                tcp.admit_one(self._private, address(maker.getsockname()))
        except OSError as error:
            logger.warning(
                "any process of this host can connect to a listener of torchrpc or gloo here, which have no "
                "authentication: the kernel rejected the filter for it (%s); run nothing else on this host",
                error,
            )

    @property
    def is_used(self) -> bool:
        """Whether the library still has its listener."""
        with contextlib.suppress(OSError):
            return os.fstat(self._fd).st_ino == os.fstat(self._private.fileno()).st_ino
        return False

    def close(self, *, disconnect: bool = False) -> None:
        """The library is about to close its listener. Idempotent. Waits for a connection that is being delivered: later
        its descriptor may be another's. ``disconnect``: end what was delivered, for both ends.
        """
        with self._lock:
            self.public.close()
            self._private.close()
            delivered, self._delivered = self._delivered, {}
        for fd, inode in delivered.items() if disconnect else ():
            with contextlib.suppress(OSError), contextlib.ExitStack() as held:
                copy = os.dup(fd)
                held.callback(os.close, copy)
                if os.fstat(copy).st_ino == inode:  # else the library has closed it
                    held.enter_context(fork.borrowed(copy)).shutdown(socket.SHUT_RDWR)


def _sockets(known: Mapping[tuple[int, int], Connection | None]) -> Iterator[tuple[tuple[int, int], Connection | None]]:
    """By descriptor and inode: this process's sockets, and what each is an end of. ``known``: found before."""
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it was closed just now, or is connected to nobody
            status = os.fstat(int(entry))
            if stat.S_ISSOCK(status.st_mode):
                which = int(entry), status.st_ino
                yield which, known[which] if which in known else _connection(which[0])


def _connection(fd: int) -> Connection | None:
    """What this socket is an end of; None: it is no TCP socket. Raises OSError if it is not connected."""
    with fork.borrowed(fd) as sock:
        return Connection(address(sock.getsockname()), address(sock.getpeername())) if tcp.is_tcp(sock) else None


def made_here(connections: Collection[Connection]) -> list[Connection]:
    """Those of the connections that this process made, and that exist now: the port of one that was reset may be
    another process's, while we have its descriptor.
    """
    own, existing = process_guard().own_connections(), []
    for connection in connections:
        with contextlib.suppress(OSError, KeyError):
            if _connection(own[connection]) == connection:
                existing.append(connection)
    return existing


def address(name: tuple[str, int]) -> fork.Address:
    """Host and port of a socket's name: without the scope of IPv6, and IPv4 always in its own form."""
    return name[0].partition("%")[0].removeprefix("::ffff:"), name[1]


def _await(look: Callable[[], T | None], until: float) -> T:
    """Look again and again: no library says when it has accepted."""
    while (seen := look()) is None:
        if time.monotonic() > until:
            raise TimeoutError("the library does not accept connections")
        threads.pause(_ONE_LOOK_S)
    return seen


def _copy_flags(source: int, target: int) -> None:
    fcntl.fcntl(target, fcntl.F_SETFL, fcntl.fcntl(source, fcntl.F_GETFL))


# --- epoll sets of libraries ------------------------------------------------------------------------------------------

_ADD, _DELETE = 1, 2
_LIBC = ctypes.CDLL(None, use_errno=True)
_ENTRY = re.compile(r"^tfd:\s*(\d+) events:\s*([0-9a-f]+) data:\s*([0-9a-f]+)", re.MULTILINE)


class _Event(ctypes.Structure):
    if platform.machine() == "x86_64":
        _pack_ = 1
    _fields_ = (("events", ctypes.c_uint32), ("data", ctypes.c_uint64))


def _epoll_ctl(epoll: int, operation: int, fd: int, events: int = 0, data: int = 0) -> None:
    if _LIBC.epoll_ctl(epoll, operation, fd, ctypes.byref(_Event(events, data))):
        raise OSError(ctypes.get_errno(), "epoll_ctl")


def registered(epolls: Iterable[int] | None = None) -> dict[int, Registered]:
    """By descriptor, the epoll set of this process that holds it, the events, and the data that comes with them."""
    entries = {}
    for epoll in _epolls() if epolls is None else epolls:
        with contextlib.suppress(OSError), open(f"/proc/self/fdinfo/{epoll}") as file:
            for fd, events, data in _ENTRY.findall(file.read()):
                entries[int(fd)] = epoll, int(events, 16), int(data, 16)
    return entries


def _polled(epoll: int) -> Iterator[tuple[int, int]]:
    """What an epoll set holds: descriptors and inodes."""
    for fd in registered((epoll,)):
        with contextlib.suppress(OSError):  # closed just now
            yield fd, os.fstat(fd).st_ino


def _epolls() -> Iterator[int]:
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{entry}") == "anon_inode:[eventpoll]":
                yield int(entry)


_guard: Guard | None = None
_guard_lock = Lock()


def process_guard() -> Guard:
    """The guard of this process. A forked child gets a new one."""
    global _guard
    with _guard_lock:
        if _guard is None or _guard._pid != os.getpid():
            _guard = Guard()
        return _guard
