"""A listener under guard: the library gets the connections that are vouched for, and sees nothing of others."""

from __future__ import annotations

import os
import resource
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress

import pytest

from raytorchrpc.lanes.torchrpc.agent import process_agent
from raytorchrpc.process import fork, guard
from raytorchrpc.process.guard import Connection, Guard, Takeover
from tests.conformance import peers
from tests.conformance.peers import Process
from tests.polling import wait_until


class Library:
    """Echoes what it gets, as TensorPipe and gloo do it: an epoll set of its own, and a thread that knows no guard."""

    def __init__(
        self, family: socket.AddressFamily = socket.AF_INET, greeting: bytes = b"", *, late: bool = False
    ) -> None:
        """``late``: send the greeting a while after a connection is registered."""
        self._greeting, self._late = greeting, late
        self.listener = socket.create_server(("::1" if family == socket.AF_INET6 else "127.0.0.1", 0), family=family)
        self.listener.setblocking(False)
        self.where = self.listener.getsockname()[:2]
        self.accepted = 0
        self.read = b""
        self._end, self._wake = os.pipe()
        self._poll = select.epoll()
        self._poll.register(self.listener.fileno(), select.EPOLLIN)
        self._poll.register(self._end, select.EPOLLIN)
        self._open: dict[int, socket.socket] = {}
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            for fd, _ in self._poll.poll():
                if fd == self._end:
                    return
                with suppress(BlockingIOError):
                    if fd == self.listener.fileno():
                        sock, _ = self.listener.accept()
                        sock.setblocking(False)
                        self.accepted += 1
                        self._open[sock.fileno()] = sock
                        if self._late:
                            self._poll.register(sock.fileno(), select.EPOLLOUT)
                            time.sleep(0.1)
                        sock.sendall(self._greeting)
                        (self._poll.modify if self._late else self._poll.register)(sock.fileno(), select.EPOLLIN)
                    else:
                        said = os.read(fd, 1 << 16)
                        self.read += said
                        if said:
                            os.write(fd, said)
                        else:
                            self._poll.unregister(fd)
                            self._open.pop(fd).close()

    def close(self) -> None:
        os.write(self._wake, b"x")
        self._thread.join()
        for sock in (*self._open.values(), self.listener):
            sock.close()
        for fd in (self._end, self._wake):
            os.close(fd)


@pytest.fixture
def library() -> Iterator[Library]:
    made = Library()
    yield made
    made.close()


class Members:
    """Vouches for connections from these ports, once it may answer."""

    def __init__(self) -> None:
        self.ports: set[int] = set()
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.asked: list[Connection] = []
        self.questions = 0

    def __call__(self, connections: Mapping[Connection, str | None]) -> Iterator[Connection]:
        self.asked.extend(connections)
        self.questions += 1
        assert self.may_answer.wait(30)
        yield from (each for each in connections if each.here[1] in self.ports)

    def connect(self, where: tuple[str, int]) -> socket.socket:
        sock = socket.socket(socket.AF_INET6 if ":" in where[0] else socket.AF_INET)
        sock.settimeout(30)
        sock.bind((where[0], 0))
        self.ports.add(sock.getsockname()[1])
        sock.connect(where)
        return sock


@pytest.fixture
def members() -> Members:
    return Members()


@pytest.fixture
def guarded(library: Library, members: Members) -> Iterator[Guard]:
    with guarding(library, members) as made:
        yield made


def guard_of(library: Library, members: Members, size: Callable[[bytes], int] = lambda _: 1) -> tuple[Guard, Takeover]:
    made = Guard()
    fd = library.listener.fileno()
    door = Takeover(fd, guard.registered().get(fd))
    made.watch(door.public, door.deliver, size)
    made.start(members)
    return made, door


@contextmanager
def guarding(library: Library, members: Members, size: Callable[[bytes], int] = lambda _: 1) -> Iterator[Guard]:
    made, door = guard_of(library, members, size)
    try:
        yield made
    finally:
        made.stop(members)
        made.close(door.public)
        door.close()


def echoed(sock: socket.socket, said: bytes = b"hello") -> bytes:
    sock.sendall(said)
    return sock.recv(100)


def is_hung_up_on(sock: socket.socket) -> bool:
    sock.settimeout(20)
    with suppress(ConnectionError):
        return sock.recv(1) == b""
    return True


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=["ipv4", "ipv6"])
def test_a_members_connection_arrives_with_all_that_it_sent(members: Members, family: socket.AddressFamily) -> None:
    try:
        library = Library(family)
    except OSError as error:
        pytest.skip(f"no such network here: {error}")
    with closing(library), guarding(library, members):
        for count in (1, 2, 3):
            with members.connect(library.where) as sock:
                assert echoed(sock) == b"hello"
                assert echoed(sock, b"again") == b"again"
            assert library.accepted == count
        assert library.read == b"helloagain" * 3


@pytest.mark.parametrize("said", [b"", b"garbage", bytes(100_000)], ids=["nothing", "garbage", "much"])
@pytest.mark.parametrize("end", ["close", "reset", "wait"])
def test_a_stranger_is_hung_up_on_and_the_library_sees_nothing_of_it(
    library: Library, members: Members, guarded: Guard, said: bytes, end: str
) -> None:
    with socket.create_connection(library.where) as stranger:
        with suppress(ConnectionError):
            stranger.sendall(said)
        if end == "reset":
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        if end == "wait" and said:
            assert is_hung_up_on(stranger)
    with members.connect(library.where) as sock:
        assert echoed(sock) == b"hello"
    assert (library.accepted, library.read) == (1, b"hello")


def test_who_says_nothing_is_hung_up_on_in_time(
    library: Library, members: Members, guarded: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "_SILENT_S", 0.2)
    with socket.create_connection(library.where) as stranger:
        assert is_hung_up_on(stranger)
    assert not members.asked, "nobody is asked about who says nothing"


@pytest.mark.parametrize("end", ["close", "shutdown", "reset"])
def test_a_connection_that_ends_within_its_first_message_never_arrives(
    library: Library, members: Members, end: str
) -> None:
    with guarding(library, members, lambda head: 5 if head[:1] == b"h" else 1 << 40):
        with members.connect(library.where) as cut_short:
            cut_short.sendall(b"hel")
            if end == "reset":
                cut_short.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            if end == "shutdown":
                cut_short.shutdown(socket.SHUT_WR)
                assert is_hung_up_on(cut_short)
        with members.connect(library.where) as huge:
            huge.sendall(b"x")
            assert is_hung_up_on(huge), "no first message is that long"
        with members.connect(library.where) as whole:
            for part in (b"he", b"llo", b" again"):
                whole.sendall(part)
            assert whole.makefile("rb").read(11) == b"hello again"
        assert (library.accepted, library.read) == (1, b"hello again")


def test_silent_connections_beyond_the_limit_push_out_the_oldest(
    library: Library, members: Members, guarded: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "MOST_PENDING", 5)
    strangers = [socket.create_connection(library.where) for _ in range(20)]
    with members.connect(library.where) as sock:
        assert echoed(sock) == b"hello"
    assert all(map(is_hung_up_on, strangers[:14]))
    for stranger in strangers:
        stranger.close()


def test_a_member_that_is_slow_to_answer_holds_no_other_up(library: Library, members: Members, guarded: Guard) -> None:
    members.may_answer.clear()
    with members.connect(library.where) as slow:
        slow.sendall(b"slow")
        while not members.asked:
            time.sleep(0.001)
        guarded._vouchers[:] = [quick := Members()]
        with quick.connect(library.where) as sock:
            assert echoed(sock) == b"hello"
        members.may_answer.set()
        assert slow.recv(10) == b"slow"


def crowd_of(members: Members, where: tuple[str, int], count: int) -> list[socket.socket]:
    """Connections that have sent "hello"; the first is asked about before the others come."""
    made = []
    for _ in range(count):
        made.append(members.connect(where))
        made[-1].sendall(b"hello")
        assert wait_until(lambda: bool(members.asked), 20)
    return made


def test_no_member_of_a_crowd_is_hung_up_on(
    library: Library, members: Members, guarded: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gloo gives up when it loses one of its connections."""
    monkeypatch.setattr(guard, "MOST_PENDING", 5)
    members.may_answer.clear()
    crowd = crowd_of(members, library.where, 40)
    assert wait_until(lambda: len(guarded._talking) >= 5 or len(members.asked) == len(crowd), 20)
    members.may_answer.set()
    assert [sock.recv(5) for sock in crowd] == [b"hello"] * len(crowd)
    for sock in crowd:
        sock.close()


def test_a_connection_that_was_reset_is_not_handed_over(guarded: Guard, library: Library, members: Members) -> None:
    """A member may have its port by the time of the answer, which is about the member's connection then."""
    members.may_answer.clear()
    stranger = members.connect(library.where)
    stranger.sendall(b"from a stranger")
    wait_until(lambda: members.asked, 30)
    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stranger.close()
    members.may_answer.set()
    with members.connect(library.where) as sock:
        assert echoed(sock) == b"hello"
    assert library.read == b"hello"


def test_a_library_that_sends_first_is_waited_for(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorPipe's ibv waits until it can send, then changes that, and ends the process if its descriptor is gone."""
    exchange = os.dup2

    def dup2(source: int, target: int, inheritable: bool = True) -> int:
        time.sleep(0.2)
        return exchange(source, target, inheritable)

    monkeypatch.setattr(os, "dup2", dup2)
    with (
        closing(Library(greeting=b"welcome", late=True)) as library,
        guarding(library, members),
        members.connect(library.where) as sock,
    ):
        sock.sendall(b"hello")
        assert sock.makefile("rb").read(12) == b"welcomehello"


def test_strangers_leave_descriptors_to_the_process(spawn: Callable[[], Process]) -> None:
    process, flooding = spawn(), spawn()
    flooding.run(connect_and_keep, *[process.run(guard_with_few_descriptors)] * 400)
    assert process.run(lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(os.listdir("/proc/self/fd"))) > 100


def guard_with_few_descriptors() -> tuple[str, int]:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    library = Library()
    guard_of(library, Members())
    return library.where


def test_urgent_data_does_not_keep_the_guard_busy(library: Library, members: Members) -> None:
    """The kernel counts it as received, but not as readable."""
    looks: list[bytes] = []
    with (
        guarding(library, members, lambda head: looks.append(head) or 8),
        socket.create_connection(library.where) as stranger,
    ):
        stranger.sendall(b"abc")
        while not looks:
            time.sleep(0.001)
        stranger.send(b"d", socket.MSG_OOB)
        stranger.sendall(b"efghijkl")
        time.sleep(0.2)
        assert len(looks) < 10


def test_a_default_timeout_changes_no_socket_of_this_process() -> None:
    socket.setdefaulttimeout(30)
    try:
        ends = socket.socketpair()
        for end in ends:
            end.setblocking(True)
        guard.process_guard().own_connections()
        assert [os.get_blocking(end.fileno()) for end in ends] == [True, True]
    finally:
        socket.setdefaulttimeout(None)
    for end in ends:
        end.close()


def test_before_anybody_is_known_all_are_strangers(library: Library, guarded: Guard) -> None:
    guarded._vouchers.clear()
    with socket.create_connection(library.where) as sock:
        sock.sendall(b"x")
        assert is_hung_up_on(sock)


def test_nobody_else_can_connect_to_the_private_listener(library: Library, members: Members, guarded: Guard) -> None:
    where = library.listener.getsockname()
    assert where[:2] != library.where, "the library listens elsewhere now"
    with members.connect(library.where) as sock:
        assert echoed(sock) == b"hello"
    with socket.socket() as stranger:
        stranger.settimeout(0.3)
        with pytest.raises(TimeoutError):
            stranger.connect(where)


def test_a_listener_that_nothing_polls_is_refused() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(OSError, match="no epoll set holds the listener"),
    ):
        Takeover(listener.fileno(), guard.registered().get(listener.fileno()))


def test_a_door_ends_the_connections_that_it_let_in_and_no_others(library: Library, members: Members) -> None:
    made, door = guard_of(library, members)
    with members.connect(library.where) as first, members.connect(library.where) as second:
        assert echoed(first) == echoed(second) == b"hello"
        name = first.getsockname()
        (fd,) = (fd for fd, sock in library._open.items() if sock.getpeername() == name)
        mine, other = socket.socketpair()
        with mine, other:
            os.dup2(mine.fileno(), fd)  # as if the library had closed it, and its number were another's
            made.stop(members)
            made.close(door.public)
            door.close(disconnect=True)
            assert is_hung_up_on(second)
            assert mine.send(b"x") == 1 and other.recv(1) == b"x"


def test_a_process_knows_its_own_connections_alone(process: Process) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process.run(connect_and_keep, listener.getsockname())
        accepted, name = listener.accept()
        theirs = Connection(name, listener.getsockname())
        with accepted, socket.create_connection(listener.getsockname()) as sock:
            mine = Connection(sock.getsockname(), sock.getpeername())
            assert guard.made_here([mine, theirs]) == [mine]
            assert process.run(guard.made_here, [mine, theirs]) == [theirs]
        assert guard.made_here([mine]) == [], "it is closed: another process may have the port"


_kept: list[socket.socket] = []


def connect_and_keep(*where: tuple[str, int]) -> None:
    _kept.extend(map(socket.create_connection, where))


def test_hosts_that_were_admitted_before_the_agent_started_stay_admitted(process: Process) -> None:
    """A member that comes back elsewhere is announced before this one first uses torchrpc."""
    address = process.run(peers.begin, "torchrpc", "a", 0)
    process.run(admit_and_start, "127.0.0.7")
    (where,) = fork.addresses_in(address.url)
    socket.create_connection(where, timeout=5, source_address=("127.0.0.7", 0)).close()
    with pytest.raises(TimeoutError):
        socket.create_connection(where, timeout=0.3)


def admit_and_start(host: str) -> None:
    process_agent().admit([host])
    process_agent().start()
