"""One suite for every MessageLane, those of other installed distributions included: the same promises of all.

Two processes per lane, ``a`` and ``b``; a test's body (``_body`` functions) runs in ``a``.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from raytorchrpc.errors import PeerLost, RayTorchRpcError, RpcTimeout
from raytorchrpc.lanes.base import Message, Pending
from raytorchrpc.process import tcp
from tests.conformance import peers
from tests.conformance.peers import ALL_DTYPES, EMPTY, PATIENCE_S, Process, answer, ask, node, random, same, send
from tests.polling import suspend, wait_until
from tests.threads import in_threads

SOCKETS = ["socket over unix", "socket over tcp", "nng over ipc", "nng over tcp"]
PROCESSES = [kind for kind in peers.message_kinds() if kind != "loopback"]
KINDS = ["loopback", *PROCESSES, *peers.ENCRYPTED]


@dataclass
class Pair:
    """Members a and b, each with a lane to the other; the same process for the loopback lane."""

    kind: str
    a: Process
    b: Process

    def run(self, body: Callable[..., Any], *args: Any) -> Any:
        return self.a.run(body, *args)

    def kill(self) -> None:
        self.a.kill()
        self.b.kill()


def make_pair(kind: str, start: Callable[[], Process] = Process) -> Pair:
    a = start()
    if kind == "loopback":
        a.run(peers.begin, kind, "a", 0)
        return Pair(kind, a, a)
    b = start()
    a.begin(peers.begin, kind, "a", 0)
    b.begin(peers.begin, kind, "b", 1)
    address_a, address_b = a.result(), b.result()
    a.run(peers.connect, "b", address_b)
    b.run(peers.connect, "a", address_a)
    return Pair(kind, a, b)


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = make_pair(request.param)
    yield pair
    pair.kill()


@pytest.fixture
def fresh(request: pytest.FixtureRequest, spawn: Callable[[], Process]) -> Pair:
    """For tests that break something."""
    return make_pair(request.param, spawn)


def each(*kinds: str) -> Any:
    return pytest.mark.parametrize("fresh", kinds, indirect=True)


def in_a(*kinds: str) -> Callable[[Callable[[], None]], Callable[[Any], None]]:
    """Make a test of a function that runs in ``a``; with ``kinds``, on a fresh pair of each of these lanes."""

    def make(body: Callable[[], None]) -> Callable[[Any], None]:
        def on_pair(pair: Pair) -> None:
            pair.run(body)

        def on_fresh(fresh: Pair) -> None:
            fresh.run(body)

        return each(*kinds)(on_fresh) if kinds else on_pair  # type: ignore[no-any-return]

    return make


@contextmanager
def standing(process: Process) -> Iterator[None]:
    """A process of which no thread runs meanwhile, unless it is killed."""
    pid = process.process.pid
    assert pid is not None
    suspend(pid)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


# --- what arrives --------------------------------------------------------------------------------------------


@in_a()
def test_header_and_payload_arrive_as_they_were_sent() -> None:
    for payload in (b"", b"x", bytes(range(256)) * 300):
        for what in ("echo", "work"):
            reply = ask(what, payload=payload)
            assert reply.header == (what, 1.5, (2, "three"))
            assert bytes(reply.body.payload) == payload
            assert list(reply.body.tensors) == []


@in_a()
def test_every_dtype() -> None:
    for dtype in ALL_DTYPES:
        tensor = random((5, 7), dtype)
        part = random((400, 400), dtype)[1:9, ::3]  # of a storage that is much larger
        variants = [tensor, tensor.T, tensor[1::2, ::3], tensor[:0], tensor[2, 3], part]
        arrived = ask("work", *variants).body.tensors
        assert all(same(*both) for both in zip(arrived, variants, strict=True)), dtype
    together = [random((3, 1 + index), dtype) for index, dtype in enumerate(ALL_DTYPES)]
    assert all(same(*both) for both in zip(ask("work", *together).body.tensors, together, strict=True))


SHAPES: dict[str, Callable[[], list[torch.Tensor]]] = {
    "scalar": lambda: [torch.tensor(2.5)],
    "several": lambda: [torch.arange(3), torch.tensor(1), torch.ones(2, 2), torch.arange(65, dtype=torch.uint8)],
    "some empty": lambda: [torch.empty(0), torch.ones(3), torch.empty(0, 4)],
    "transposed": lambda: [torch.arange(12.0).view(3, 4).T],
    "strided": lambda: [torch.arange(50)[1::7]],
    "expanded": lambda: [torch.arange(3).expand(4, 3)],
    "channels last": lambda: [torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last)],
    "views of one storage": lambda: [torch.arange(10)[2:5], torch.arange(10)[5:]],
    "more than one iovec takes": lambda: [torch.full((number % 5,), number) for number in range(1, 2500)],
    "as large as a frame read at once": lambda: [torch.arange(65536, dtype=torch.uint8)],
    "200 KB": lambda: [torch.arange(25_000)],
}


@in_a()
def test_every_shape_and_stride() -> None:
    for shape, make in SHAPES.items():
        tensors = make()
        reply = ask("work", *tensors, payload=b"beside")
        assert len(reply.body.tensors) == len(tensors), shape
        assert all(torch.equal(*both) for both in zip(reply.body.tensors, tensors, strict=True)), shape
        assert [arrived.shape for arrived in reply.body.tensors] == [tensor.shape for tensor in tensors], shape
        assert bytes(reply.body.payload) == b"beside"


@in_a()
def test_what_arrives_is_private_and_can_be_written() -> None:
    mine = torch.zeros(1000)
    reply = ask("overwrite", mine)
    assert torch.equal(reply.body.tensors[0], torch.full((1000,), 7.0))
    assert torch.equal(mine, torch.zeros(1000))
    first, second = ask("echo", torch.zeros(3), torch.zeros(3)).body.tensors
    first.fill_(1)
    assert second.tolist() == [0, 0, 0]


@in_a()
def test_each_tensor_of_a_message_is_independent_of_the_others() -> None:
    for sizes in ((3, 2, 5), (7,) * 12, (3, 20_000, 5, 7), (3, 20_000, 1_000_000, 5, 1_000_000, 2), (300_000,)):
        arrived = ask("echo", *(torch.ones(size) for size in sizes)).body.tensors
        assert [tensor.numel() for tensor in arrived] == [*sizes]
        assert peers.independent(list(arrived)), sizes


@in_a()
def test_the_default_device_of_the_caller_has_no_effect() -> None:
    large, empty = torch.arange(100_000), torch.empty(0, 3)
    with torch.device("meta"):
        for sent in (large, empty):
            message = peers.Message(("echo", 0), peers.Encoded(b"", [sent], (), 0))
            reply = answer(node().lane.call("b", message, peers.PATIENCE_S, caller_waits=True))
            (arrived,) = reply.body.tensors
            assert arrived.is_cpu and torch.equal(arrived, sent)


@in_a(*KINDS)
def test_what_is_sent_under_inference_mode_arrives_as_a_plain_tensor() -> None:
    with torch.inference_mode():
        pending = send("echo", torch.zeros(3), torch.zeros(100_000))
    small, large = answer(pending).body.tensors
    assert not small.is_inference() and not large.is_inference()


@in_a()
def test_a_lane_that_copies_at_once_lets_go_of_the_tensors() -> None:
    if not node().lane.capabilities.copies_at_once:
        return
    for _ in range(20):
        tensor = torch.zeros(50_000)
        pending = send("work", tensor)
        tensor.fill_(1)
        assert not answer(pending).body.tensors[0].any()


@in_a()
def test_a_payload_of_20_mb() -> None:
    payload = os.urandom(1 << 20) * 20
    pending = send("work", payload=payload)
    small = send("work", payload=b"behind it")
    assert bytes(answer(small).body.payload) == b"behind it"
    assert bytes(answer(pending).body.payload) == payload


@pytest.mark.slow
@in_a(*PROCESSES)
def test_a_tensor_of_more_than_2_gib() -> None:
    reply = answer(send("sink", peers.huge(2.1), payload=b"abc", timeout_s=100), 100)
    assert reply.header == ("sunk", True, 3, sum(b"abc"))


@pytest.mark.slow
@in_a(*PROCESSES)
def test_a_payload_of_more_than_2_gib() -> None:
    """What an object without tensors makes: a dict of bytes, for one."""
    size = (1 << 31) + 5
    reply = answer(send("sink", payload=bytes(size), timeout_s=100), 100)
    assert reply.header == ("sunk", True, size, 0)


def test_large_messages_both_ways_at_once(pair: Pair) -> None:
    pair.a.begin(_crossing_body, "b")
    pair.b.begin(_crossing_body, "a")
    pair.a.result()
    pair.b.result()


def _crossing_body(peer: str) -> None:
    payload = bytes(10_000_000)
    pending = [send("work", peer=peer, payload=payload) for _ in range(2)]
    assert all(len(answer(one).body.payload) == len(payload) for one in pending)


# --- many at once --------------------------------------------------------------------------------------------


@in_a()
def test_thousands_of_messages_under_way_at_once() -> None:
    tensor = torch.arange(10)
    pending = [send("echo", tensor + number, payload=b"%d" % number) for number in range(2000)]
    for number, one in reversed(list(enumerate(pending))):
        reply = answer(one)
        assert bytes(reply.body.payload) == b"%d" % number
        assert int(reply.body.tensors[0][0]) == number


@in_a()
def test_concurrent_callers_each_get_their_own_answers() -> None:
    barrier = threading.Barrier(8)

    def caller(number: int) -> None:
        barrier.wait(PATIENCE_S)
        for count in range(100):
            wanted = b"%d/%d" % (number, count)
            reply = ask("work" if count % 2 else "echo", torch.full((number + 1,), count), payload=wanted)
            assert bytes(reply.body.payload) == wanted and reply.body.tensors[0].tolist() == [count] * (number + 1)

    in_threads(caller, 8)


@in_a()
def test_a_request_that_blocks_keeps_no_other_from_being_served() -> None:
    for _ in range(20):
        first, second = send("meet"), send("meet")
        answer(first)
        answer(second)


@each(*SOCKETS)
def test_requests_of_one_caller_are_served_in_the_order_sent(fresh: Pair) -> None:
    fresh.run(_ordered_body)
    assert fresh.b.run(peers.served_payloads) == [b"%d" % number for number in range(2000)]


def _ordered_body() -> None:
    for pending in [send("keep", payload=b"%d" % number) for number in range(2000)]:
        answer(pending)


def test_a_reply_may_come_later_and_from_any_thread(pair: Pair) -> None:
    pair.b.run(_forget_arrivals)
    pair.run(_begin_held, 3)
    pair.b.run(peers.release_held, 3)
    pair.run(_released)


def _forget_arrivals() -> None:
    while node().arrived.acquire(blocking=False):
        pass


_under_way: list[Pending] = []


def _begin_held(count: int) -> None:
    _under_way[:] = [send("hold") for _ in range(count)]
    assert ask("echo", payload=b"meanwhile").body.payload == b"meanwhile"
    assert not any(one.wait(0) for one in _under_way)


def _released() -> None:
    assert [answer(one).header for one in _under_way] == [("released",)] * len(_under_way)


@in_a()
def test_callbacks_are_called_once_before_and_after_the_reply() -> None:
    for _ in range(50):
        calls: list[str] = []
        early = threading.Event()
        pending = send("work")
        pending.add_done_callback(lambda calls=calls, early=early: (calls.append("early"), early.set())[0])
        assert early.wait(PATIENCE_S)
        answer(pending)
        pending.add_done_callback(lambda calls=calls: calls.append("late"))
        assert calls == ["early", "late"]


@in_a()
def test_a_call_is_over_before_its_reply_is_taken() -> None:
    """Its caller may make the next one at once, also where so many calls may be in flight."""
    for _ in range(300):
        released = threading.Event()
        message = peers.Message(("work",), peers.EMPTY)
        pending = node().lane.call("b", message, PATIENCE_S, on_released=released.set)
        while not pending.wait(0):
            time.sleep(0)
        pending.take()
        assert released.is_set()


# --- deadlines -----------------------------------------------------------------------------------------------


@in_a()
def test_a_wait_ends_in_time_and_can_be_repeated() -> None:
    pending = send("hold")
    for timeout_s in (0.0, 0.05, 0.2):
        start = time.monotonic()
        assert not pending.wait(timeout_s)
        assert timeout_s <= time.monotonic() - start + 0.002 < timeout_s + 10
    _answer_what_is_held(pending)


def _answer_what_is_held(*pending: Pending) -> None:
    """Loopback holds its own; the other process's are simply left."""
    if node().held:
        node().held.pop()(peers.Message(("late",), peers.EMPTY))
        assert all(answer(one).header == ("late",) for one in pending)


@in_a()
def test_a_call_that_is_never_answered_disturbs_no_other() -> None:
    pending = send("hold", timeout_s=0.2)
    pending.wait(0.25)
    if pending.wait(0.3):  # a lane may say so itself
        with pytest.raises(RpcTimeout):
            pending.take()
    assert ask("echo", payload=b"x").body.payload == b"x"
    _answer_what_is_held()
    assert ask("echo", payload=b"x").body.payload == b"x"


@each(*PROCESSES)
def test_a_peer_that_stands_still_costs_a_caller_no_more_than_its_deadline(fresh: Pair) -> None:
    fresh.run(_warm_body)
    with standing(fresh.b):
        fresh.run(_standing_peer_body)


def _warm_body() -> None:
    ask("echo")


def _standing_peer_body() -> None:
    start = time.monotonic()
    with pytest.raises((PeerLost, RpcTimeout)):
        pending = send("echo", payload=bytes(50_000_000), timeout_s=0.5)
        assert not pending.wait(0.5) or pending.take()
        raise RpcTimeout("it was taken, and not answered")
    assert time.monotonic() - start < 15


@each(*SOCKETS, *peers.ENCRYPTED)
def test_an_event_loop_goes_on_while_its_peer_reads_nothing(fresh: Pair) -> None:
    """What it sends and replies meanwhile arrives later, as it was."""
    fresh.run(_begin_held, 3)
    with standing(fresh.b):
        fresh.run(_send_much_on_a_loop_body)
    with standing(fresh.a):
        fresh.b.run(_release_much_on_a_loop)
    fresh.run(_much_arrived_body)
    fresh.b.run(_much_was_kept)


def _much() -> torch.Tensor:
    """More than any connection holds."""
    return torch.empty(12_000_000, dtype=torch.uint8)


def _send_much_on_a_loop_body() -> None:
    async def send_all() -> None:
        much = _much()
        for number in range(3):
            _under_way.append(send("keep", much.fill_(number)))
        much.fill_(99)

    asyncio.run(send_all())


def _release_much_on_a_loop() -> None:
    for _ in range(3):
        assert node().arrived.acquire(timeout=PATIENCE_S)

    async def reply_all() -> None:
        much = _much()
        for number in range(3):
            body = EMPTY._replace(tensors=[much.fill_(number)])
            node().held.pop(0)(Message(("released",), body, take_back=lambda number=number: _taken_back.append(number)))
        much.fill_(99)

    asyncio.run(reply_all())


_taken_back: list[int] = []


def _much_arrived_body() -> None:
    for number, pending in enumerate(_under_way[:3]):
        (much,) = answer(pending).body.tensors
        assert bool((much == number).all())
    assert [answer(pending).header for pending in _under_way[3:]] == [("kept",)] * 3


def _much_was_kept() -> None:
    assert [int(message.body.tensors[0].max()) for message in node().served] == list(range(3))
    assert not _taken_back


@each(*SOCKETS, *peers.ENCRYPTED)
def test_late_replies_are_taken_back_if_their_caller_is_gone(fresh: Pair) -> None:
    fresh.run(_begin_held, 4)
    with standing(fresh.a):
        fresh.b.run(_release_much_on_a_loop)
        fresh.a.process.kill()
    fresh.b.run(_taken_back_body)


def _taken_back_body() -> None:
    assert wait_until(lambda: sorted(_taken_back) == [0, 1, 2], PATIENCE_S), _taken_back
    with pytest.raises(PeerLost):
        node().held.pop()(Message(("released",), EMPTY))


@each("socket over unix", "socket over tcp")  # nng gives the connection up
def test_a_message_that_is_late_in_the_middle_costs_the_other_calls_nothing(fresh: Pair) -> None:
    """It arrives whole in the end, and as it was when it was sent."""
    fresh.run(_begin_held, 1)
    with standing(fresh.b):
        fresh.run(_late_in_the_middle_body)
    fresh.b.run(peers.release_held, 1)
    fresh.run(_answered_after_all_body)
    fresh.b.run(_kept_as_sent_body)


def _late_in_the_middle_body() -> None:
    tensor = torch.ones(30_000_000, dtype=torch.uint8)
    start = time.monotonic()
    late = send("keep", tensor, timeout_s=0.2)
    assert not late.wait(0.05)
    with pytest.raises(RpcTimeout, match="busy until the deadline"):
        send("echo", timeout_s=0.2)  # nothing of this one goes, behind half of the other
    assert time.monotonic() - start < 15
    tensor.fill_(7)
    _under_way.append(late)


def _answered_after_all_body() -> None:
    assert [answer(pending).header for pending in _under_way] == [("released",), ("kept",)]
    assert ask("echo", payload=b"x").body.payload == b"x"


def _kept_as_sent_body() -> None:
    (message,) = node().served
    assert bool((message.body.tensors[0] == 1).all())


@each("socket over tcp")
def test_a_connection_to_a_peer_that_reads_nothing_for_long_is_given_up(fresh: Pair) -> None:
    """Its kernel lives. By default that takes 15 s, here 2."""
    fresh.run(_give_up_soon)
    fresh.run(_warm_body)
    with standing(fresh.b):
        fresh.run(_given_up_body)


def _give_up_soon() -> None:
    tcp.SILENCE_S, tcp._PROBE_AFTER_S, tcp._PROBE_EVERY_S = 2, 1, 1


def _given_up_body() -> None:
    pending = send("echo", timeout_s=60)
    with pytest.raises(PeerLost):
        answer(send("echo", payload=bytes(50_000_000), timeout_s=60))
    assert pending.wait(30), "it is still waited for"
    with pytest.raises(PeerLost):
        pending.take()


@each(*SOCKETS)
def test_a_short_deadline_is_kept_while_another_call_connects_to_a_peer_that_stands_still(fresh: Pair) -> None:
    with standing(fresh.b):
        fresh.run(_connecting_body)


def _connecting_body() -> None:
    start = time.monotonic()
    patient, hurried = send("echo", timeout_s=PATIENCE_S), send("echo", timeout_s=0.1)
    assert time.monotonic() - start < PATIENCE_S / 2, "they have waited for the connection"
    assert not hurried.wait(0.2) and hurried.unsent and not patient.done


# --- ends ----------------------------------------------------------------------------------------------------


@in_a(*PROCESSES)
def test_a_peer_killed_in_the_middle_is_lost_at_once() -> None:
    ask("echo")
    held = [send("hold") for _ in range(3)]
    told = threading.Event()
    held[0].add_done_callback(told.set)
    start = time.monotonic()
    dying = send("die")
    for pending in (dying, *held):
        assert pending.wait(PATIENCE_S)
        with pytest.raises(PeerLost) as caught:
            pending.take()
        assert caught.value.peer == "b" and caught.value.may_have_run
    assert told.wait(PATIENCE_S)
    assert time.monotonic() - start < PATIENCE_S / 2
    for _ in range(2):
        start = time.monotonic()
        with pytest.raises(PeerLost):
            answer(send("echo"))
        assert time.monotonic() - start < PATIENCE_S / 2


@each(*PROCESSES)
def test_a_peer_killed_while_a_large_message_is_on_its_way(fresh: Pair) -> None:
    fresh.run(_warm_body)
    with standing(fresh.b):  # so that the message cannot arrive whole
        fresh.a.begin(_large_to_the_dying_body)
        fresh.b.process.kill()
    assert fresh.a.result() < PATIENCE_S


def _large_to_the_dying_body() -> float:
    start = time.monotonic()
    with pytest.raises(PeerLost) as lost:
        for _ in range(3):
            answer(send("work", payload=bytes(30_000_000)))
    assert not (node().kind.startswith("socket") and lost.value.may_have_run), "it was not sent whole"
    return time.monotonic() - start


@each("socket over unix", "socket over tcp", "nng over tcp")
def test_a_caller_killed_in_the_middle_of_a_message_leaves_the_peer_as_it_was(fresh: Pair, process: Process) -> None:
    fresh.run(_warm_body)
    before = fresh.b.run(peers.resident_bytes)
    with standing(fresh.b):  # so that the message cannot arrive whole
        fresh.run(_begin_large_body)
        fresh.a.process.kill()
        fresh.a.process.join(10)
    fresh.b.run(peers.connect, "c", process.run(peers.begin, fresh.kind, "c", 2))
    process.run(peers.connect, "b", fresh.b.run(peers.own_address))
    process.run(_warm_body)
    settled = lambda: fresh.b.run(peers.resident_bytes) < before + 60_000_000  # noqa: E731
    assert wait_until(settled, PATIENCE_S), "the half of a message is still there"


def _begin_large_body() -> None:
    """Returns while a message of 200 MB is on its way, and can get no further."""
    threading.Thread(target=send, args=("work",), kwargs={"payload": bytes(200_000_000)}, daemon=True).start()
    if node().kind.startswith("socket"):
        lane: Any = node().lane
        connection = lane._made["b"]
        full = select.poll()
        full.register(connection.fd, select.POLLOUT)
        assert wait_until(lambda: connection._sending.locked() and not full.poll(0), PATIENCE_S)
    else:
        assert wait_until(lambda: _unsent_bytes() > 100_000, PATIENCE_S)


def _unsent_bytes() -> int:
    """In the send queues of this process's TCP connections."""
    own = {text.partition(" ")[2] for text in peers.open_things()[1]}
    lines = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return sum(int(line[4].split(":")[0], 16) for line in lines if f"socket:[{line[9]}]" in own)


@in_a(*KINDS)
def test_an_unknown_peer_and_one_that_was_disconnected() -> None:
    if node().kind == "loopback":
        node().lane.disconnect("b")
        return
    with pytest.raises(PeerLost, match="'nobody'") as unknown:
        send("echo", peer="nobody")
    assert not unknown.value.may_have_run
    ask("echo")
    pending = send("hold")
    node().lane.disconnect("b")
    if node().kind != "torchrpc":  # its calls under way end by their deadline
        assert pending.wait(PATIENCE_S / 2)
        with pytest.raises(PeerLost, match="left the group, or its process ended"):
            pending.take()
    with pytest.raises(PeerLost, match="'b'") as refused:
        send("echo")
    assert not refused.value.may_have_run
    node().lane.disconnect("b")


@in_a(*KINDS)
def test_close_leaves_nothing() -> None:
    """Everything is counted in this process: descriptors, threads."""
    if node().kind == "torchrpc":  # its agent stays for the next group, and all that belongs to it
        ask("echo", torch.ones(3))
        before = peers.everything_open()
        lane, peer = node().lane, peers.PeerAddress("b", node().peer_address)
        for _ in range(3):
            for _ in range(2):
                lane.close()
            with pytest.raises((RayTorchRpcError, KeyError)):
                answer(send("echo", timeout_s=2))
            lane.open(node().serve, node()._spawn)
            lane.connect([peer])
            ask("echo", torch.ones(3))
        assert wait_until(lambda: peers.everything_open() == before, PATIENCE_S), peers.everything_open()
        return
    address, kind = node().address, node().kind
    ask("echo")  # what is made once is made now
    before = peers.everything_open()
    second = peers.Node(kind, "c", 2)
    peers.connect("c", second.address)
    second.lane.connect([peers.PeerAddress("b", address), peers.PeerAddress("c", second.address)])
    message = peers.Message(("work",), peers.Encoded(b"", (torch.ones(3),), (), 0))
    for _ in range(3):
        answer(second.lane.call("c", message, PATIENCE_S))
        ask("work", peer="c")
    pending = second.lane.call("c", peers.Message(("hold",), peers.EMPTY), PATIENCE_S)
    start = time.monotonic()
    for _ in range(2):
        second.lane.close()
    node().lane.disconnect("c")
    assert time.monotonic() - start < PATIENCE_S / 2
    if kind != "loopback":
        assert pending.wait(PATIENCE_S / 2)
        with pytest.raises(PeerLost):
            pending.take()
        with pytest.raises(RayTorchRpcError):
            answer(second.lane.call("c", message, 2))
    assert wait_until(lambda: peers.everything_open() == before, PATIENCE_S), peers.everything_open()
