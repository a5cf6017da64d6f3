"""The slots of the shm lane: who has them, when they go back, and what happens where there are none.

Each lane is a peer of itself, ``self``; what needs two processes is in tests/conformance/test_tensor_lanes.py.
"""

from __future__ import annotations

import gc
import os
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from raytorchrpc.errors import LaneUnavailable, PeerLost
from raytorchrpc.lanes.base import Copies, Export, PeerAddress
from raytorchrpc.lanes.common.shared_memory import SharedAddress
from raytorchrpc.lanes.shm.lane import ShmLane
from raytorchrpc.lanes.shm.memory import SLOTS, Arena, PeerArena
from tests.shortage import no_descriptors

MIB = SIZE = 1 << 20


class Lane(ShmLane):
    """A lane that is a peer of itself."""

    def __init__(self, capacity: int = 64 * MIB) -> None:
        super().__init__(capacity, 2)
        self.address = self.open()
        self.connect([PeerAddress("self", self.address)])

    def send(self, *tensors: torch.Tensor, to: str = "self") -> tuple[Export, list[Any]]:
        return self.export(tensors, to, {}), [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]

    def take(self, sent: tuple[Export, list[Any]]) -> list[torch.Tensor]:
        return self.read("self", sent[0].descriptor, sent[1])

    def drop(self, sent: tuple[Export, list[Any]]) -> None:
        self.release("self", sent[0].descriptor)


Lanes = Callable[..., Lane]


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    made: list[Lane] = []

    def make(capacity: int = 64 * MIB) -> Lane:
        made.append(Lane(capacity))
        return made[-1]

    yield make
    for lane in made:
        lane.close()


@pytest.fixture
def lane(lanes: Lanes) -> Lane:
    return lanes()


def full(value: int, size: int = MIB) -> torch.Tensor:
    return torch.full((size,), value % 251, dtype=torch.uint8)


def shapes(tensor: torch.Tensor) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    return [(tensor.dtype, tuple(tensor.shape))]


# --- when a slot goes back -----------------------------------------------------------------------------------------


def test_a_slot_goes_back_when_its_last_tensor_dies(lane: Lane) -> None:
    """Large tensors have slots of their own, those below 1 MiB hold theirs together, and small ones hold none."""
    sent = lane.send(full(1), full(2, MIB + 1), *(full(number, 100_000) for number in range(3, 7)), torch.arange(9))
    (one, two, shared), _, crowded, _ = sent[0].descriptor
    kept = lane.take(sent)
    assert not crowded and lane.in_use() == one[2] + two[2] + shared[2]
    small = kept.pop()
    del kept[:2]
    assert lane.in_use() == shared[2]
    kept[:] = [kept[3][5:9].numpy()[1:]]
    assert lane.in_use() == shared[2]
    kept.clear()
    assert lane.in_use() == 0 and small.tolist() == list(range(9))
    again = lane.send(full(1))
    assert again[0].descriptor[0][0][1] == one[1], "the warm memory is used again"


HOLDERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "storage": torch.Tensor.untyped_storage,
    "parameter": torch.nn.Parameter,
    "gradient": lambda tensor: torch.ones(1, requires_grad=True) * tensor,  # a graph keeps what it needs
    "array": lambda tensor: tensor.numpy()[10:20],
    "memoryview": lambda tensor: tensor.numpy().data,
    "dlpack": torch.from_dlpack,
    "cycle": lambda tensor: (held := [tensor, None], held.__setitem__(1, held))[0],
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_whatever_still_uses_the_memory_holds_the_slot(lane: Lane, holder: str) -> None:
    expected = torch.arange(MIB, dtype=torch.float32)
    sent = lane.send(expected)
    held = HOLDERS[holder](lane.take(sent)[0])
    lane.drop(lane.send(*[torch.zeros(MIB)] * 3))  # would be written over it
    assert lane.in_use() == expected.nbytes
    if holder == "gradient":
        held.sum().backward()
    elif holder == "storage":
        assert torch.equal(torch.empty(0).set_(held, 0, (MIB,)), expected)
    else:
        found = torch.as_tensor(held[0] if holder == "cycle" else held).detach()
        assert torch.equal(found, expected[10:20] if holder == "array" else expected)
    del held
    gc.collect()
    if holder not in ("gradient", "storage"):
        del found
    assert lane.in_use() == 0


def test_what_a_forked_child_drops_its_parent_still_has(lane: Lane) -> None:
    """As a DataLoader's worker would."""
    kept, waiting = lane.take(lane.send(full(7))), lane.send(full(8))
    child = os.fork()
    if not child:
        kept.clear()
        lane.drop(waiting)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert lane.in_use() == 2 * MIB and bool((kept[0] == 7).all())
    kept.clear()
    lane.drop(waiting)
    assert lane.in_use() == 0


class _Interrupts(torch.Tensor):
    """Its memory cannot be read, or it hears of something while it is copied."""

    when: Callable[[], object]

    def data_ptr(self) -> int:
        self.when()
        return super().data_ptr()


def interrupting(when: Callable[[], object]) -> torch.Tensor:
    tensor = torch.ones(MIB).as_subclass(_Interrupts)
    tensor.when = when
    return tensor


def test_an_export_that_breaks_off_gives_back(lane: Lane) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lane.send(torch.ones(5 * MIB), interrupting(interrupt), torch.ones(3))
    assert lane._arena.used == 0


def of_the_dead() -> SharedAddress:
    """Where a process that has ended had an arena."""
    with subprocess.Popen(["true"]) as ended:
        ended.wait(30)
    return SharedAddress(ended.pid, 3, f"raytorchrpc-{ended.pid:024x}", 64 * MIB)


def test_a_late_cancel_takes_nobody_elses_slot(lane: Lane) -> None:
    lane.connect([PeerAddress("gone", of_the_dead())])
    first, _ = lane.send(torch.ones(10), to="gone")
    lane.disconnect("gone")
    second, _ = lane.send(torch.ones(10))
    assert second.descriptor[0] == first.descriptor[0]
    first.cancel()
    assert lane.in_use()


def test_a_slot_that_is_being_filled_when_its_owner_dies_is_nobody_elses_meanwhile() -> None:
    """Else the rest of that copy would land in the tensors of whoever got it next."""
    arena = Arena(64 * MIB)
    (first, second) = (arena.take(MIB, "dying"), arena.take(MIB, "dying"))
    assert first is not None and second is not None
    assert arena.filled([second])
    arena.reclaim("dying")
    assert arena.in_use() == MIB
    others = [arena.take(MIB, "alive") for _ in range(5)]
    assert first.offset not in [slot.offset for slot in others if slot is not None]
    assert not arena.filled([first]), "its message need not be sent"
    assert arena.in_use() == 5 * MIB
    arena.close()


def test_an_export_to_one_that_dies_meanwhile_is_refused_and_leaves_nothing(lane: Lane) -> None:
    lane.connect([PeerAddress("dying", of_the_dead())])
    with pytest.raises(LaneUnavailable, match="'dying' is gone"):
        lane.send(interrupting(lambda: lane.disconnect("dying")), torch.ones(MIB), to="dying")
    assert lane.in_use() == 0


def test_who_is_a_peer_no_longer_but_lives_keeps_what_it_has(lane: Lane) -> None:
    """As a member that was removed, or was out of reach for a while."""
    kept = lane.take(lane.send(full(7)))
    lane.disconnect("self")
    gc.collect()  # what the lane knew of the peer goes before its tensors do
    lane.connect([PeerAddress("self", lane.address)])
    for _ in range(5):
        lane.drop(lane.send(full(9)))
    assert bool((kept[0] == 7).all())
    del kept
    assert lane.in_use() == 0


@pytest.mark.parametrize("crowded", [False, True])
@pytest.mark.parametrize("strided", [False, True])
def test_the_slot_is_back_as_soon_as_the_receivers_buffer_is_full(lane: Lane, strided: bool, crowded: bool) -> None:
    under_way = [lane.send(full(0, 11 * MIB)) for _ in range(3 if crowded else 0)]
    before = lane.in_use()
    sent = lane.send(full(7))
    assert sent[0].descriptor[2] is crowded
    target = torch.zeros(2 * MIB, dtype=torch.uint8)[::2] if strided else full(0)
    (left,) = lane.read("self", sent[0].descriptor, sent[1], Copies.whole([target]))
    if left is not None:
        assert strided and lane.in_use() == before + MIB, "the caller copies"
        target.copy_(left)
    del left
    assert lane.in_use() == before == len(under_way) * 11 * MIB and bool((target == 7).all())


# --- a full arena --------------------------------------------------------------------------------------------------


def test_a_full_arena_says_so_and_works_again(lane: Lane) -> None:
    kept = [lane.take(lane.send(full(number, 10 * MIB))) for number in range(3)]
    for sizes, held in (([60], 30), ([20, 60], 50)):  # of the latter, the second part has no room
        with pytest.raises(LaneUnavailable, match=rf"the peers still hold {held} MiB.*clone\(\).*shm_bytes"):
            lane.send(*(full(3, size * MIB) for size in sizes))
    assert lane.in_use() == 30 * MIB
    kept.clear()
    assert torch.equal(lane.take(lane.send(full(3, 60 * MIB)))[0], full(3, 60 * MIB))
    assert lane.in_use() == 0


def test_from_a_crowded_arena_the_receiver_copies(lane: Lane) -> None:
    sent = lane.send(full(1, 40 * MIB))
    assert sent[0].descriptor[2]
    kept = lane.take(sent)
    assert lane.in_use() == 0
    lane.take(lane.send(full(2, 40 * MIB)))
    assert torch.equal(kept[0], full(1, 40 * MIB))


@pytest.mark.parametrize("size", [MIB // 8, 2 * MIB])
def test_a_peer_that_keeps_everything_does_not_keep_others_out(lanes: Lanes, size: int) -> None:
    lane, kept, other = lanes(8 * MIB), [], full(1)
    for number in range(10 * MIB // size):
        kept += lane.take(lane.send(full(number, size)))
        assert torch.equal(lane.take(lane.send(other))[0], other)
    assert all(bool((tensor == number % 251).all()) for number, tensor in enumerate(kept))


def test_a_peer_that_keeps_a_crumb_of_each_message_does_not_use_up_the_slots() -> None:
    """An arena has a number of slots, besides its bytes: with more than half of them out, receivers copy as well."""
    arena = Arena(1 << 30)
    taken = [arena.take(1, "keeper") for _ in range(SLOTS // 2)]
    assert arena.used * 4 < arena.capacity
    assert not arena.crowded()
    assert arena.take(1, "other")
    assert arena.crowded()
    receiver = PeerArena(arena.address)
    for slot in taken[:100]:
        assert slot is not None
        receiver.give_back(slot.number)
    assert not arena.crowded()
    assert arena.used == (SLOTS // 2 + 1 - 100) * 4096
    arena.close()


def test_after_a_burst_nothing_is_crowded_and_memory_does_not_wander(lanes: Lanes) -> None:
    """Once many were under way at a time, the arena must not fill all its memory before it looks for what is back."""
    lane, tensor = lanes(), full(0, MIB // 16)
    held = [lane.take(lane.send(tensor)) for _ in range(100)]
    held.clear()
    farthest = 0
    for _ in range(600):
        sent = lane.send(tensor)
        (_, offset, _), crowded = sent[0].descriptor[0][0], sent[0].descriptor[2]
        assert not crowded
        farthest = max(farthest, offset)
        lane.drop(sent)
    assert farthest < 16 * MIB


# --- arenas that cannot be mapped, or are not those that the slots were in ------------------------------------------


@pytest.mark.parametrize("how", ["read", "release"])
def test_what_could_not_be_mapped_is_given_back_later(lanes: Lanes, how: str) -> None:
    sender, receiver = lanes(), lanes()
    receiver.connect([PeerAddress("s", sender.address)])
    tensor = torch.arange(SIZE // 8)
    lost = sender.export([tensor], "r", {})
    with no_descriptors():
        if how == "release":
            receiver.release("s", lost.descriptor)
        else:
            with pytest.raises(LaneUnavailable, match="cannot map"):
                receiver.read("s", lost.descriptor, shapes(tensor))
    assert sender.in_use() == SIZE
    following = sender.export([tensor], "r", {})
    (arrived,) = receiver.read("s", following.descriptor, shapes(tensor))
    assert torch.equal(arrived, tensor)
    assert sender.in_use() == SIZE
    del arrived
    assert sender.in_use() == 0


def test_what_came_from_one_that_was_not_known_yet_is_given_back_once_it_is(lanes: Lanes) -> None:
    """The receiver stood still while the sender's process came, and has not been told."""
    sender, receiver = lanes(), lanes()
    tensor = torch.arange(SIZE // 8)
    fetched, dropped = (sender.export([tensor], "r", {}) for _ in range(2))
    with pytest.raises(PeerLost, match="'s'") as lost:
        receiver.read("s", fetched.descriptor, shapes(tensor))
    assert lost.value.may_have_run
    receiver.release("s", dropped.descriptor)
    assert sender.in_use() == 2 * SIZE
    receiver.connect([PeerAddress("s", sender.address)])
    assert sender.in_use() == 0


def test_what_an_earlier_process_sent_is_not_looked_for_in_the_next_ones_memory(lanes: Lanes) -> None:
    earlier, later, receiver = lanes(), lanes(), lanes()
    receiver.connect([PeerAddress("s", earlier.address)])
    old, new = torch.zeros(SIZE // 8), torch.ones(SIZE // 8)
    stale = [earlier.export([old], "r", {}) for _ in range(2)]
    receiver.disconnect("s")
    receiver.connect([PeerAddress("s", later.address)])
    fresh = [later.export([new], "r", {}) for _ in range(2)]
    with pytest.raises(PeerLost, match="its process ended"):
        receiver.read("s", stale[0].descriptor, shapes(old))
    receiver.release("s", stale[1].descriptor)
    assert later.in_use() == 2 * new.nbytes, "their slots have the same numbers"
    for export in fresh:
        (arrived,) = receiver.read("s", export.descriptor, shapes(new))
        assert torch.equal(arrived, new)
        del arrived
    assert later.in_use() == 0


@pytest.mark.parametrize("lent", [False, True])
def test_what_a_process_sent_before_it_ended_is_lost_with_it(lanes: Lanes, lent: bool) -> None:
    """The receiver was told of it, and had not mapped it yet."""
    sender, receiver = lanes(), lanes()
    receiver.connect([PeerAddress("s", sender.address)])
    flat = sender.lend(1024) if lent else torch.zeros(1024, dtype=torch.uint8)
    assert flat is not None
    descriptor = sender.export([flat], "r", {}).descriptor
    sender.close()
    with pytest.raises(PeerLost, match="lost member 's': its process ended, or left the group") as lost:
        receiver.read("s", descriptor, shapes(flat))
    assert lost.value.peer == "s"
    receiver.release("s", descriptor)
