"""The nccl lane's order, its control connections and its endings, with a carrier that needs no GPU (see ``pipes``).

Where a process has to die, and for the many calls at once, there are processes ``a``, ``b`` and ``c``; functions with
an underscore run in them. The rest are lanes of one process.
"""

from __future__ import annotations

import gc
import os
import pickle
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from raytorchrpc.errors import LaneUnavailable, PeerLost
from raytorchrpc.lanes.base import Copies, Export, PeerAddress
from raytorchrpc.lanes.nccl.lane import NcclLane
from raytorchrpc.tensors.dtypes import Shape
from tests.conformance import peers
from tests.conformance.peers import Process, tensors
from tests.conformance.pipes import PipeCarrier
from tests.polling import wait_until

NAMES = "abc"


@dataclass
class Station:
    """A lane in this process."""

    name: str
    lane: NcclLane
    carrier: PipeCarrier

    def export(self, *made: torch.Tensor, to: str = "b") -> tuple[Export, list[Shape]]:
        return self.lane.export(made, to, {0: 0}), [(tensor.dtype, tuple(tensor.shape)) for tensor in made]

    def fetch(self, sent: tuple[Export, list[Shape]], origin: str = "a") -> list[torch.Tensor]:
        return self.lane.read(origin, sent[0].descriptor, sent[1])

    def discard(self, sent: tuple[Export, list[Shape]], origin: str = "a") -> None:
        self.lane.release(origin, sent[0].descriptor)

    def keeps(self, count: int) -> bool:
        """Whether it keeps that many exports, now or soon."""
        return wait_until(lambda: self.lane.outstanding == count, 20)


Stations = dict[str, Station]


@pytest.fixture
def open_stations() -> Iterator[Callable[..., Stations]]:
    opened: list[Station] = []

    def open_some(count: int = 2, **settings: Any) -> Stations:
        for rank, name in enumerate(NAMES[:count]):
            carrier = PipeCarrier(f"device {rank}")
            lane = peers.nccl_lane(rank, carrier=carrier, **{"timeout_s": 20, **settings})
            opened.append(Station(name, lane, carrier))
        addresses = [PeerAddress(station.name, station.lane.open()) for station in opened]
        for station in opened:
            station.lane.connect([address for address in addresses if address.peer != station.name])
        return {station.name: station for station in opened}

    yield open_some
    for station in opened:
        station.lane.close()


@pytest.fixture
def ab(open_stations: Callable[..., Stations]) -> Stations:
    return open_stations()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def ones(size: int = 10) -> torch.Tensor:
    return torch.ones(size)


def is_ones(fetched: list[torch.Tensor]) -> bool:
    return all(bool((tensor == 1).all()) for tensor in fetched)


# --- order -----------------------------------------------------------------------------------------------------


def test_nothing_is_posted_before_the_data_is_complete(ab: Stations, pool: ThreadPoolExecutor) -> None:
    a, b = ab.values()
    assert is_ones(b.fetch(a.export(ones())))
    a.carrier.busy = True
    later = torch.zeros(100_000)
    sent = a.export(later)
    fetching = pool.submit(b.fetch, sent)
    assert a.keeps(0)  # it has been asked for
    assert not fetching.done()
    later.fill_(1)
    a.carrier.marks[-1].event.set()
    assert is_ones(fetching.result(20))


def test_a_fetch_that_waits_keeps_nobody_else_waiting(
    open_stations: Callable[..., Stations], pool: ThreadPoolExecutor
) -> None:
    a, b, c = open_stations(3).values()
    a.carrier.busy = True
    waiting = pool.submit(b.fetch, a.export(ones()))
    assert a.keeps(0)
    late = a.carrier.marks[-1]
    a.carrier.busy = False
    assert is_ones(c.fetch(a.export(ones(), to="c")))  # from the same sender
    assert is_ones(b.fetch(c.export(ones()), "c"))  # by the same receiver
    assert is_ones(a.fetch(b.export(ones(), to="a"), "b"))  # the other way
    late.event.set()
    assert is_ones(waiting.result(20))


def test_over_tcp(open_stations: Callable[..., Stations]) -> None:
    a, b = open_stations(tcp=True).values()
    assert is_ones(b.fetch(a.export(ones(2_000_000), ones())))


# --- what is not fetched -----------------------------------------------------------------------------------------


def test_what_is_for_one_peer_is_not_for_another(open_stations: Callable[..., Stations]) -> None:
    a, b, c = open_stations(3).values()
    sent = a.export(ones())
    with pytest.raises(PeerLost, match="does not have"):
        c.fetch(sent)
    c.discard(sent)
    assert is_ones(b.fetch(sent))


def test_two_ends_on_one_device_are_refused(ab: Stations) -> None:
    a = ab["a"]
    twin = peers.nccl_lane(5, carrier=PipeCarrier("device 0"))
    a.lane.connect([PeerAddress("twin", twin.open())])
    with pytest.raises(LaneUnavailable, match=r"both ends are on GPU device 0 .*cuda_ipc"):
        a.export(ones(), to="twin")
    twin.close()


@pytest.mark.parametrize("at_sender", [True, False])
def test_who_cannot_join_says_so_and_may_try_again(ab: Stations, at_sender: bool) -> None:
    a, b = ab.values()
    troubled = a if at_sender else b
    troubled.carrier.refuse = True
    sent = a.export(ones())
    with pytest.raises((LaneUnavailable, PeerLost), match="refused"):
        b.fetch(sent)
    assert a.keeps(0)
    troubled.carrier.refuse = False
    assert is_ones(b.fetch(a.export(ones())))


def test_strangers_are_turned_away(ab: Stations) -> None:
    a, b = ab.values()
    stranger = peers.nccl_lane(1, carrier=PipeCarrier("stranger"), secret=b"x" * 32)
    stranger.open()
    stranger.connect([PeerAddress("a", b.lane._peers["a"])])
    with pytest.raises(LaneUnavailable, match="does not have this group's secret"):
        stranger.export([ones()], "a", {0: 0})
    stranger.close()
    assert is_ones(b.fetch(a.export(ones())))


# --- trouble -------------------------------------------------------------------------------------------------------


def test_a_fetch_ends_at_its_deadline_and_the_next_begins_anew(open_stations: Callable[..., Stations]) -> None:
    a, b = open_stations().values()
    assert is_ones(b.fetch(a.export(ones())))
    a.carrier.busy = True
    sent = a.export(ones())
    b.lane._timeout_s = 0.5
    with pytest.raises(PeerLost, match=r"'a'.* within 0\.5 s"):
        b.fetch(sent)
    b.lane._timeout_s = 20.0
    a.carrier.busy = False
    assert is_ones(b.fetch(a.export(ones())))
    assert len(b.carrier.channels) == 2


@pytest.mark.parametrize("at_sender", [True, False])
def test_a_channel_that_broke_is_made_anew(ab: Stations, at_sender: bool) -> None:
    a, b = ab.values()
    assert is_ones(b.fetch(a.export(ones())))
    (a if at_sender else b).carrier.channels[0].abort()
    with pytest.raises(PeerLost):
        b.fetch(a.export(ones()))
    waiting = a.export(ones())  # the peer lives: what is for it is kept
    assert is_ones(b.fetch(waiting))
    assert len(b.carrier.channels) == 2


@pytest.mark.parametrize("who", ["a", "b"])
def test_a_lane_that_closes_ends_the_fetches_under_way(ab: Stations, pool: ThreadPoolExecutor, who: str) -> None:
    a, b = ab.values()
    a.carrier.busy = True
    fetching = pool.submit(b.fetch, a.export(ones()))
    assert a.keeps(0)
    ab[who].lane.close()
    with pytest.raises(PeerLost, match=r"connection|left the group"):
        fetching.result(20)
    with pytest.raises(LaneUnavailable):
        ab[who].export(ones(), to="a" if who == "b" else "b")


@pytest.mark.parametrize("how", ["the peer is removed", "the connection breaks"])
def test_a_receiver_that_lives_does_not_take_what_an_abort_leaves(
    ab: Stations, pool: ThreadPoolExecutor, how: str
) -> None:
    a, b = ab.values()
    a.carrier.halfway = halfway = threading.Event()
    data = ones(1000)
    fetching = pool.submit(b.fetch, a.export(data))
    assert halfway.wait(20)
    (channel,) = a.carrier.channels

    def abort() -> None:  # as on a GPU: the receiver goes on as if all had arrived
        data.zero_()
        channel._given_up.set()

    channel.abort = abort  # type: ignore[method-assign]
    if how == "the peer is removed":
        a.lane.disconnect("b")
        channel._given_up.set()  # the device goes on
    else:
        a.lane._control._made["b"].end("broken")  # type: ignore[attr-defined]
    try:
        assert is_ones(fetching.result(20))
    except PeerLost:
        assert how == "the connection breaks", "its receiver is told of it first"
    assert wait_until(lambda: not a.lane._sending, 20)


def test_what_nobody_fetched_is_discarded_by_the_collector(ab: Stations) -> None:
    """As a message that is dropped does it: at any moment, on any thread, with any lock held."""
    a, b = ab.values()

    class Dropped:
        def __init__(self, sent: tuple[Export, list[Shape]]) -> None:
            self.sent, self.myself = sent, self

        def __del__(self) -> None:
            b.discard(self.sent)

    for _ in range(20):
        Dropped(a.export(ones()))
    with b.lane._lock:
        gc.collect()
    assert a.keeps(0)


# --- processes that die ----------------------------------------------------------------------------------------------


@pytest.fixture
def trio(spawn: Callable[[], Process]) -> dict[str, Process]:
    processes = {name: spawn() for name in NAMES}
    for rank, process in enumerate(processes.values()):
        process.begin(peers.open_tensors, "nccl by pipes", 0, 0, rank, 30)
    addresses = {name: process.result() for name, process in processes.items()}
    for name, process in processes.items():
        for peer, address in addresses.items():
            if peer != name:
                process.run(peers.meet, peer, address)
    return processes


@pytest.mark.parametrize("victim", ["sender", "receiver"])
def test_a_peer_killed_in_the_middle_of_a_transfer(trio: dict[str, Process], victim: str) -> None:
    a, b, c = trio.values()
    size = 50_000_000
    a.run(_stand_still_halfway)
    sent = a.run(_send, "b", size)
    b.begin(_fetch_or_lose, sent, size)
    a.run(_wait_for_halfway)
    if victim == "sender":
        a.process.kill()
        assert b.result() == "PeerLost"
        survivor, its_name, other = b, "b", c
    else:
        b.process.kill()
        a.run(_no_exports_and_one_way_left)
        survivor, its_name, other = a, "a", c
    for _ in range(3):  # and it goes on with another, both ways
        assert other.run(_fetch_or_lose, survivor.run(_send, "c", 1000), 1000, its_name) == "whole"
        assert survivor.run(_fetch_or_lose, other.run(_send, its_name, 1000), 1000, "c") == "whole"


def test_exports_for_a_peer_that_died_before_it_asked_are_dropped(trio: dict[str, Process]) -> None:
    a, b, c = trio.values()
    for _ in range(5):
        a.run(_send, "b", 1000)
    kept = a.run(_send, "c", 1000)
    assert a.run(_kept) == 6
    b.process.kill()
    assert a.run(_kept_becomes, 1)
    assert c.run(_fetch_or_lose, kept, 1000) == "whole"
    assert "LaneUnavailable" in a.run(_cannot_send, "b")


def test_a_transfer_that_fails_in_the_middle_writes_no_more_once_that_is_told(trio: dict[str, Process]) -> None:
    a, b, _ = trio.values()
    size = 20 << 20
    for _ in range(2):
        a.run(_stand_still_halfway)
        b.begin(_fill_or_lose, a.run(_send, "b", size))
        a.run(_give_up_halfway)
        assert b.result() == ("lost", 0x55)
        a.run(_go_on)
        assert b.run(_is_unchanged)
    assert b.run(_fill_or_lose, a.run(_send, "b", size)) == ("whole", 7)


def _give_up_halfway() -> None:
    """As the sender does at its deadline: the receiver is told, and then what is left is sent, or not."""
    lane, halfway = _lane(), _carrier().halfway
    assert halfway is not None and halfway.wait(20)
    (end,) = lane._sending.values()
    lane._end_at_receiver(end, "not in time", time.monotonic() + 20)


def _go_on() -> None:
    """Wait until it has sent what it can."""
    carrier = _carrier()
    carrier.halfway = None
    assert wait_until(lambda: all(channel.over() for channel in carrier.channels), 20)


def _fill_or_lose(sent: tuple[Any, list[Shape]]) -> tuple[str, int]:
    """What came of receiving into a buffer, and the last byte of that."""
    (_, shape), *_ = sent[1]
    target = torch.full(shape, 0x55, dtype=torch.uint8)
    try:
        _lane().read("a", *sent, Copies.whole([target]))
    except PeerLost:
        assert all(channel.over() for channel in _carrier().channels), "something is still under way"
        tensors().kept["lost"] = (target, target.clone())
        return "lost", int(target[-1])
    return "whole", int(target[-1])


def _is_unchanged() -> bool:
    target, then = tensors().kept.pop("lost")
    assert int(target[0]) == 7, "it had begun"
    return torch.equal(target, then)


def _stand_still_halfway() -> None:
    _carrier().halfway = threading.Event()


def _wait_for_halfway() -> None:
    halfway = _carrier().halfway
    assert halfway is not None and halfway.wait(20)
    _carrier().halfway = None


def _carrier() -> PipeCarrier:
    carrier = _lane()._carrier
    assert isinstance(carrier, PipeCarrier)
    return carrier


def _lane() -> NcclLane:
    lane = tensors().lane
    assert isinstance(lane, NcclLane)
    return lane


def _send(peer: str, size: int) -> tuple[Any, list[Shape]]:
    return peers.export([torch.full((size,), 7, dtype=torch.uint8)], peer)


def _cannot_send(peer: str) -> str:
    try:
        _send(peer, 10)
    except LaneUnavailable as error:
        return repr(error)
    return "sent"


def _fetch_or_lose(sent: tuple[Any, list[Shape]], size: int, origin: str = "a") -> str:
    try:
        (arrived,) = _lane().read(origin, *sent)
    except PeerLost as error:
        assert error.peer == origin
        return "PeerLost"
    assert arrived.shape == (size,) and bool((arrived == 7).all())
    return "whole"


def _kept() -> int:
    return _lane().outstanding


def _kept_becomes(count: int) -> bool:
    return wait_until(lambda: _kept() == count, 20)


def _no_exports_and_one_way_left() -> None:
    assert _kept_becomes(0)
    assert wait_until(lambda: not _lane()._sending, 20), "nobody sends to the dead any more"


# --- many at once ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_any_interleaving_comes_to_its_end(trio: dict[str, Process], seed: int) -> None:
    """Every process exports to every other, fetches and discards, on many threads and in random order."""
    run = os.urandom(6).hex()
    for name, process in trio.items():
        process.run(_open_mailbox, f"{run}-{name}")
    for name, process in trio.items():
        process.begin(_talk, run, name, seed)
    for process in trio.values():
        fetched, discarded = process.result()
        assert fetched + discarded == 2 * _EACH
        assert fetched > discarded > 0
    for process in trio.values():
        assert process.run(_kept_becomes, 0)


_EACH = 150
_mailbox: socket.socket | None = None


def _open_mailbox(name: str) -> None:
    global _mailbox
    _mailbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    _mailbox.bind("\0mail-" + name)
    _mailbox.settimeout(30)


def _talk(run: str, me: str, seed: int) -> tuple[int, int]:
    others = [name for name in NAMES if name != me]
    with ThreadPoolExecutor(8) as pool:
        writing = [pool.submit(_write, run, me, other, f"{seed} {me} {other}") for other in others]
        reading: list[Future[tuple[int, int]]] = [
            pool.submit(_read, 2 * _EACH // 4, f"{seed} {me} {number}") for number in range(4)
        ]
        for done in writing:
            done.result(60)
        counts = [done.result(60) for done in reading]
    tensors().exports.clear()
    return sum(fetched for fetched, _ in counts), sum(discarded for _, discarded in counts)


def _write(run: str, me: str, other: str, seed: str) -> None:
    """Export, and tell of it later and in another order."""
    dice = random.Random(seed)
    untold: list[bytes] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.settimeout(30)
        for number in range(_EACH):
            made = [torch.full((dice.choice((1, 100, 70_000)),), number) for _ in range(dice.choice((1, 1, 2, 7)))]
            untold.append(pickle.dumps((me, number, peers.export(made, other))))
            dice.shuffle(untold)
            while len(untold) > dice.randrange(8) or (number == _EACH - 1 and untold):
                sock.sendto(untold.pop(), f"\0mail-{run}-{other}")


def _read(count: int, seed: str) -> tuple[int, int]:
    dice = random.Random(seed)
    assert _mailbox is not None
    discarded = 0
    for _ in range(count):
        origin, number, (descriptor, shapes) = pickle.loads(_mailbox.recv(1 << 16))
        if dice.random() < 0.2:
            _lane().release(origin, descriptor)
            discarded += 1
            continue
        for tensor, (dtype, shape) in zip(_lane().read(origin, descriptor, shapes), shapes, strict=True):
            assert (tensor.dtype, tuple(tensor.shape)) == (dtype, shape)
            assert bool((tensor == number).all())
    return count - discarded, discarded
