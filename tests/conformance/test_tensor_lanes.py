"""One suite for every TensorLane, those of other installed distributions included: cuda_ipc and nccl where there are
GPUs, and nccl with a carrier that needs none (see ``pipes``).

Two processes, ``a`` and ``b``; functions with an underscore run in them.
"""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from raytorchrpc._compat import nixl_package
from raytorchrpc.errors import LaneUnavailable, PeerLost
from raytorchrpc.lanes.base import PeerAddress, TensorLane
from raytorchrpc.lanes.common.shared_memory import SharedAddress
from raytorchrpc.lanes.cuda_ipc.lane import CudaIpcLane
from raytorchrpc.lanes.nccl.lane import NcclLane
from raytorchrpc.lanes.nixl.lane import NixlLane
from raytorchrpc.lanes.shm.lane import ShmLane
from raytorchrpc.lanes.shm.memory import SLOTS, Arena, PeerArena
from raytorchrpc.tensors.dtypes import Shape, as_copyable
from tests.conformance import peers
from tests.conformance.peers import ALL_DTYPES, Process, export, open_things, random, same, tensors, wait_until

MIB = 1 << 20
needs_nixl = pytest.mark.skipif(nixl_package.nixl_package() is None, reason=nixl_package.NIXL_MISSING)
GPU_KINDS = [
    pytest.param("cuda_ipc, one GPU", marks=pytest.mark.gpu(1)),
    pytest.param("cuda_ipc, two GPUs", marks=pytest.mark.gpu(2)),
    pytest.param("nccl, two GPUs", marks=pytest.mark.gpu(2)),
    pytest.param("nixl on cuda, one GPU", marks=[pytest.mark.gpu(1), needs_nixl]),
    pytest.param("nixl on cuda, two GPUs", marks=[pytest.mark.gpu(2), needs_nixl]),
]
NIXL_KINDS = [pytest.param(kind, marks=needs_nixl) for kind in peers.NIXL_SETTINGS]
_WAYS: dict[str, list[Any]] = {"cuda_ipc": [], "nixl": NIXL_KINDS, "nccl": ["nccl by pipes"]}
KINDS = [kind for row in peers.rows(out_of_band=True) for kind in _WAYS.get(row.name, [row.name])] + GPU_KINDS


@dataclass
class Pair:
    a: Process
    b: Process

    def send(self, make: Callable[..., Any], *args: Any) -> tuple[Any, list[Shape]]:
        """``a`` exports what ``make(*args)`` returns; what ``b`` needs to fetch it."""
        return self.a.run(_export, make, *args)  # type: ignore[no-any-return]

    def pass_on(self, keep: str, make: Callable[..., Any], *args: Any) -> tuple[Any, list[Shape]]:
        """``b`` fetches it too, finds it equal and, if ``keep`` names it, keeps it."""
        sent = self.send(make, *args)
        self.b.run(_fetch, sent, keep, make, *args)
        return sent

    def used(self) -> int:
        return self.a.run(_used)  # type: ignore[no-any-return]

    def kill(self) -> None:
        for process in (self.a, self.b):
            with contextlib.suppress(ValueError):  # the test has killed it
                process.kill()


def make_pair(kind: str, capacity: int = 256 * MIB) -> Pair:
    a, b = Process(), Process()
    lane = kind.split(",")[0]
    a.begin(peers.open_tensors, lane, capacity)
    b.begin(peers.open_tensors, lane, capacity, int(kind.endswith("two GPUs")), 1)
    address_a, address_b = a.result(), b.result()
    a.run(peers.meet, "b", address_b)
    b.run(peers.meet, "a", address_a)
    return Pair(a, b)


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = make_pair(request.param)
    yield pair
    pair.kill()


@pytest.fixture(scope="module")
def shm() -> Iterator[Pair]:
    """Two members whose arenas have 64 MiB."""
    pair = make_pair("shm", 64 * MIB)
    yield pair
    pair.kill()


@pytest.fixture(params=KINDS)
def fresh(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """For tests that break something, or look at what is left."""
    pair = make_pair(request.param)
    yield pair
    pair.kill()


# What the processes do.


def _export(make: Callable[..., Any], *args: Any) -> Any:
    return export([_placed(tensor) for tensor in make(*args)])


def _placed(tensor: torch.Tensor) -> torch.Tensor:
    """On the device of the lane; torch itself cannot bring every dtype there with every stride."""
    if tensor.device.type == tensors().device:
        return tensor
    return as_copyable(tensor).to(tensors().device).view(tensor.dtype)


def _fetch(sent: tuple[Any, list[Shape]], keep: str, make: Callable[..., Any], *args: Any) -> None:
    arrived = tensors().lane.fetch("a", *sent)
    for tensor, expected in zip(arrived, make(*args), strict=True):
        assert tensor.device.type == tensors().device
        assert tensor.is_contiguous()
        assert same(tensor.cpu(), expected.cpu()), expected.dtype
    if keep:
        tensors().kept[keep] = arrived


def _keep_only(keep: str, index: int) -> None:
    tensors().kept[keep] = tensors().kept[keep][index]


def _drop(keep: str) -> None:
    del tensors().kept[keep]


def _used() -> int:
    """Bytes of the arena that peers still hold."""
    lane = tensors().lane
    assert isinstance(lane, ShmLane)
    return lane.in_use()


def _bytes_and_threads() -> tuple[set[str], set[str], int]:
    threads, descriptors = open_things()
    mapped = sum("raytorchrpc-" in line for line in Path("/proc/self/maps").read_text().splitlines())
    return threads, {text for text in descriptors if "raytorchrpc" in text}, mapped


# --- what arrives ----------------------------------------------------------------------------------------------


def _each_dtype(index: int) -> list[torch.Tensor]:
    tensor = random((5, 7), ALL_DTYPES[index])
    return [tensor, tensor.T, tensor[1::2, ::3], tensor[:0], tensor[2, 3]]


def _dtypes_together(repeat: int) -> list[torch.Tensor]:
    return [random((3, 1 + index), dtype) for index in range(repeat) for dtype in ALL_DTYPES]


def _same_shapes() -> list[torch.Tensor]:
    return [random((3, 5), dtype, seed) for seed in range(6) for dtype in ALL_DTYPES]


def _empty() -> list[torch.Tensor]:
    return [torch.empty(0), torch.empty(3, 0, 2, dtype=torch.int64)]


def _empty_among_others() -> list[torch.Tensor]:
    return [torch.empty(0), random((4,)), torch.empty(0, 9), random((2, MIB)), torch.empty(0, dtype=torch.bool)]


def _scalars() -> list[torch.Tensor]:
    return [torch.tensor(3.5), torch.tensor(True), torch.tensor(1 + 2j), torch.tensor(7, dtype=torch.int8)]


def _views() -> list[torch.Tensor]:
    base = random((40, 50))
    return [base.t(), base[::2, 1::3], base[3], base[:, 4], base[1:2], base[0, 0], base]


def _expanded() -> list[torch.Tensor]:
    overlapping = random((6,)).as_strided((4, 3), (1, 1))
    return [random((3, 1)).expand(3, 1000), torch.tensor(2.0).expand(700, 700), overlapping]


def _large_view() -> list[torch.Tensor]:
    return [random((1100, 1000)).t()]


def _around_one_mib() -> list[torch.Tensor]:
    return [random((MIB + more,), torch.uint8, more + 1) for more in (-1, 0, 1)]


def _seventy_megabytes() -> list[torch.Tensor]:
    return [torch.arange(17_500_003, dtype=torch.float32)]


def _several_large() -> list[torch.Tensor]:
    return [random((size,), torch.uint8, size) for size in (9 * MIB + 13, 2 * MIB, 17)]


def _many_small(count: int) -> list[torch.Tensor]:
    dtypes = (torch.int64, torch.float32, torch.bool)
    return [torch.full((1 + number % 7,), number, dtype=dtypes[number % 3]) for number in range(count)]


@pytest.mark.parametrize("index", range(len(ALL_DTYPES)), ids=str)
def test_each_dtype(pair: Pair, index: int) -> None:
    pair.pass_on("", _each_dtype, index)


@pytest.mark.parametrize(
    "make",
    [
        _same_shapes, _empty, _empty_among_others, _scalars, _views, _expanded, _large_view, _around_one_mib,
        _seventy_megabytes, _several_large,
    ],
)  # fmt: skip
def test_each_kind_of_tensor(pair: Pair, make: Callable[[], list[torch.Tensor]]) -> None:
    pair.pass_on("", make)


@pytest.mark.parametrize("repeat", [1, 5])
def test_dtypes_of_one_message(pair: Pair, repeat: int) -> None:
    pair.pass_on("", _dtypes_together, repeat)


def test_thousands_of_small_ones(pair: Pair) -> None:
    pair.pass_on("", _many_small, 3000)


def test_several_threads_send_and_several_take(pair: Pair) -> None:
    pair.a.begin(_export_from_threads, 4, 20)
    sent = pair.a.result()
    assert len(sent) == 80
    pair.b.run(_fetch_in_threads, sent, 4)


def _export_from_threads(threads: int, count: int) -> list[Any]:
    sent: list[Any] = []

    def work(thread: int) -> None:
        for number in range(count):
            seed = thread * count + number
            sent.append((seed, export([tensor.to(tensors().device) for tensor in _seeded(seed)])))

    _in_threads(work, threads)
    return sent


def _fetch_in_threads(sent: list[Any], threads: int) -> None:
    def work(thread: int) -> None:
        for seed, told in sent[thread::threads]:
            arrived = tensors().lane.fetch("a", *told)
            assert all(same(tensor.cpu(), wanted) for tensor, wanted in zip(arrived, _seeded(seed), strict=True)), seed

    _in_threads(work, threads)


def _seeded(seed: int) -> list[torch.Tensor]:
    return [random((1 + seed * 97 % 5000,), torch.uint8, seed), random((MIB // 4,), torch.float32, seed)]


def _in_threads(work: Callable[[int], None], count: int) -> None:
    failed: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed, failed


@pytest.mark.slow
def test_a_tensor_of_more_than_2_gib() -> None:
    pair = make_pair("shm", 6 << 30)
    try:
        sent = pair.a.run(_export_huge)
        pair.b.run(_fetch_huge, sent)
        assert pair.used() == 0
    finally:
        pair.kill()


def _export_huge() -> Any:
    return export([torch.ones(3), peers.huge(2.1)])


def _fetch_huge(sent: Any) -> None:
    ones, arrived = tensors().lane.fetch("a", *sent)
    assert ones.tolist() == [1, 1, 1]
    assert peers.is_huge(arrived)
    arrived[-1] = 7
    assert arrived[-1] == 7


def test_no_tensor_at_all_needs_no_slot(shm: Pair) -> None:
    shm.pass_on("", list)
    assert shm.used() == 0


def test_what_arrives_is_private_and_writable(pair: Pair) -> None:
    pair.a.run(_keep_source, _around_one_mib)
    sent = pair.a.run(_send_source)
    first = pair.b.run(_fill_each, sent)
    assert first == [1, 2, 3]
    pair.a.run(_source_is, _around_one_mib)
    pair.pass_on("", _around_one_mib)  # and the next message is not written over
    assert pair.b.run(_values) == [1, 2, 3]
    pair.b.run(_drop, "filled")


def _keep_source(make: Callable[[], list[torch.Tensor]]) -> None:
    tensors().kept["source"] = [tensor.to(tensors().device) for tensor in make()]


def _send_source() -> Any:
    return export(tensors().kept["source"])


def _source_is(make: Callable[[], list[torch.Tensor]]) -> None:
    for tensor, expected in zip(tensors().kept["source"], make(), strict=True):
        assert same(tensor.cpu(), expected)


def _fill_each(sent: Any) -> list[int]:
    tensors().kept["filled"] = arrived = tensors().lane.fetch("a", *sent)
    for number, tensor in enumerate(arrived, 1):
        tensor.fill_(number)
    return _values()


def _values() -> list[int]:
    """The one value of each; that of a neighbour in the slot would show."""
    values = []
    for tensor in tensors().kept["filled"]:
        (value,) = tensor.unique().tolist()
        values.append(value)
    return values


def test_the_sender_may_change_its_tensors(pair: Pair) -> None:
    sent = pair.a.run(_export_then_change, _several_large)
    pair.b.run(_fetch, sent, "", _several_large)
    pair.a.run(_finish_and_change)


def _export_then_change(make: Callable[[], list[torch.Tensor]]) -> Any:
    tensors().kept["changing"] = made = [tensor.to(tensors().device) for tensor in make()]
    sent = export(made)
    for tensor in made:
        if tensor.is_cpu and "cpu" in tensors().lane.capabilities.devices:  # what stands for a GPU is read later
            tensor.zero_()
    return sent


def _finish_and_change() -> None:
    tensors().exports[-1].finished()
    for tensor in tensors().kept.pop("changing"):
        tensor.zero_()


def test_dropped_by_the_sender_it_is_kept_for_the_receiver(pair: Pair) -> None:
    sent = pair.send(_several_large)
    pair.a.run(_make_and_drop, 30)
    pair.b.run(_fetch, sent, "", _several_large)


def _make_and_drop(count: int) -> None:
    """What an allocator would do with memory that it believes free."""
    for _ in range(count):
        torch.zeros(9 * MIB + 13, dtype=torch.uint8, device=tensors().device)


# --- when a slot goes back -----------------------------------------------------------------------------------------


def test_a_slot_goes_back_when_its_last_tensor_dies(shm: Pair) -> None:
    sent, _ = shm.pass_on("all", _around_one_mib)  # two slots of their own, one small
    (one, two, small), _, crowded, _ = sent
    assert not crowded
    assert shm.used() == one[2] + two[2] + small[2]
    shm.b.run(_keep_only, "all", 1)
    assert shm.used() == one[2]
    shm.b.run(_keep_a_view, "all")
    assert shm.used() == one[2]
    shm.b.run(_drop, "all")
    assert shm.used() == 0
    again, _ = shm.send(_around_one_mib)
    assert [slot[1] for slot in again[0]] == [slot[1] for slot in sent[0]], "the warm memory is used again"
    shm.b.run(_discard, again)


@pytest.mark.parametrize("holder", ["storage", "parameter", "gradient", "array", "memoryview", "dlpack", "cycle"])
def test_whatever_still_uses_the_memory_holds_the_slot(shm: Pair, holder: str) -> None:
    sent, _ = shm.pass_on("held", _one_large)
    shm.b.run(_hold_by, "held", holder)
    assert shm.used() == sent[0][0][2]
    shm.b.run(_is_still, "held")
    shm.b.run(_let_go, "held")
    assert shm.used() == 0


def _one_large() -> list[torch.Tensor]:
    return [random((2 * MIB,), torch.uint8).view(torch.float32).nan_to_num(1.0)]


def _hold_by(keep: str, holder: str) -> None:
    kept = tensors().kept
    (tensor,) = kept.pop(keep)
    held: Any = None
    if holder == "storage":
        held = tensor.untyped_storage()
    elif holder == "parameter":
        held = torch.nn.Parameter(tensor)
    elif holder == "gradient":  # a graph keeps what it needs for going backward
        held = torch.ones(1, requires_grad=True) * tensor
        kept["expected"] = held.detach().clone()
    elif holder == "array":
        held = tensor.numpy()[10:20]
    elif holder == "memoryview":
        held = tensor.numpy().data
    elif holder == "dlpack":
        held = torch.from_dlpack(tensor)
    else:
        held = [tensor]
        held.append(held)
    kept[keep] = held


def _is_still(keep: str) -> None:
    held = tensors().kept[keep]
    if isinstance(held, torch.Tensor) and held.grad_fn is not None:
        held.sum().backward()
        assert torch.equal(held.detach(), tensors().kept.pop("expected"))
        return
    if isinstance(held, torch.UntypedStorage):
        held = torch.empty(0).set_(held, 0, (len(held) // 4,))
    held = held[0] if isinstance(held, list) else torch.as_tensor(held).detach()
    (wanted,) = _one_large()
    assert torch.equal(held, wanted[10:20] if len(held) == 10 else wanted)


def _let_go(keep: str) -> None:
    del tensors().kept[keep]
    gc.collect()


def test_what_a_forked_child_drops_its_parent_still_has(shm: Pair) -> None:
    sent, _ = shm.pass_on("forked", _one_large)
    waiting = shm.send(_scalars)
    shm.b.run(_fork_and_drop, "forked", waiting[0])
    assert shm.used() == sum(slot[2] for one in (sent, waiting[0]) for slot in one[0])
    shm.b.run(_is_the_one_large, "forked")
    shm.b.run(_drop, "forked")
    shm.b.run(_discard, waiting[0])
    assert shm.used() == 0


def _fork_and_drop(keep: str, waiting: Any) -> None:
    """As a DataLoader's worker would."""
    child = os.fork()
    if not child:
        _let_go(keep)
        _discard(waiting)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def _is_the_one_large(keep: str) -> None:
    assert torch.equal(tensors().kept[keep][0], _one_large()[0])


def _keep_a_view(keep: str) -> None:
    tensors().kept[keep] = tensors().kept[keep][5:9].numpy()[1:]


def _discard(descriptor: Any) -> None:
    tensors().lane.discard("a", descriptor)


def test_small_tensors_of_a_message_hold_their_slot_together(shm: Pair) -> None:
    sent, _ = shm.pass_on("small", _many_small, 100)
    assert len(sent[0]) == 1
    shm.b.run(_keep_only, "small", 57)
    assert shm.used() == sent[0][0][2]
    shm.b.run(_drop, "small")
    assert shm.used() == 0


def test_discard_and_cancel_give_back(shm: Pair) -> None:
    sent, _ = shm.send(_around_one_mib)
    shm.send(_scalars)
    shm.a.run(_cancel_last)
    assert shm.used() == sum(slot[2] for slot in sent[0])
    shm.b.run(_discard, sent)
    assert shm.used() == 0
    shm.a.run(_cancel_last)  # twice is harmless
    assert shm.used() == 0


def _cancel_last() -> None:
    tensors().exports[-1].cancel()


class _Unreadable(torch.Tensor):
    """Its memory cannot be read: what a mistake in a lane, or an interrupt, comes to."""

    def data_ptr(self) -> int:
        raise KeyboardInterrupt


def test_an_export_that_breaks_off_gives_back() -> None:
    lane = ShmLane(64 * MIB, 2)
    lane.connect([PeerAddress("self", lane.open())])
    with pytest.raises(KeyboardInterrupt):
        lane.export([torch.ones(5 * MIB), torch.ones(MIB).as_subclass(_Unreadable), torch.ones(3)], "self", {})
    assert lane._arena.used == 0
    lane.close()


def test_a_late_cancel_takes_nobody_elses_slot() -> None:
    lane = ShmLane(64 * MIB, 1)
    lane.connect([PeerAddress("self", lane.open()), PeerAddress("gone", _of_the_dead())])
    first = lane.export([torch.ones(10)], "gone", {})
    lane.disconnect("gone")
    second = lane.export([torch.ones(10)], "self", {})
    assert second.descriptor[0] == first.descriptor[0]
    first.cancel()
    assert lane.in_use()
    lane.close()


def _of_the_dead() -> SharedAddress:
    """Where a process that has ended had an arena."""
    with subprocess.Popen(["true"]) as ended:
        ended.wait(30)
    return SharedAddress(ended.pid, 3, f"raytorchrpc-{ended.pid:024x}", 64 * MIB)


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


def test_an_export_to_one_that_dies_meanwhile_is_refused_and_leaves_nothing() -> None:
    lane = ShmLane(64 * MIB, 1)
    lane.connect([PeerAddress("self", lane.open()), PeerAddress("dying", _of_the_dead())])

    class Hears(torch.Tensor):
        """Hears of the death while it is copied."""

        def data_ptr(self) -> int:
            lane.disconnect("dying")
            return super().data_ptr()

    with pytest.raises(LaneUnavailable, match="'dying' is gone"):
        lane.export([torch.ones(MIB).as_subclass(Hears), torch.ones(MIB)], "dying", {})
    assert lane.in_use() == 0
    lane.close()


def test_who_is_a_peer_no_longer_but_lives_keeps_what_it_has() -> None:
    """As a member that was removed, or was out of reach for a while."""
    lane, shapes = ShmLane(64 * MIB, 1), [(torch.uint8, (MIB,))]
    address = lane.open()
    lane.connect([PeerAddress("self", address)])
    kept = lane.fetch("self", lane.export([torch.full((MIB,), 7, dtype=torch.uint8)], "self", {}).descriptor, shapes)
    lane.disconnect("self")
    gc.collect()  # what the lane knew of the peer goes before its tensors do
    lane.connect([PeerAddress("self", address)])
    for _ in range(5):
        lane.discard("self", lane.export([torch.full((MIB,), 9, dtype=torch.uint8)], "self", {}).descriptor)
    assert bool((kept[0] == 7).all())
    del kept
    assert lane.in_use() == 0
    lane.close()


def test_a_full_arena_says_so_and_works_again(shm: Pair) -> None:
    for number in range(3):
        shm.pass_on(f"kept {number}", _of_size, 10 * MIB, number)
    with pytest.raises(AssertionError, match=r"LaneUnavailable.*the peers still hold 30 MiB.*clone\(\).*shm_bytes"):
        shm.send(_of_size, 60 * MIB, 3)
    with pytest.raises(AssertionError, match="LaneUnavailable"):  # the second part has no room
        shm.send(_of_size_and_more, 20 * MIB, 60 * MIB)
    assert shm.used() == 30 * MIB
    for number in range(3):
        shm.b.run(_drop, f"kept {number}")
    shm.pass_on("", _of_size, 60 * MIB, 3)
    assert shm.used() == 0


def _of_size(size: int, seed: int) -> list[torch.Tensor]:
    return [torch.full((size,), seed, dtype=torch.uint8)]


def _of_size_and_more(*sizes: int) -> list[torch.Tensor]:
    return [torch.zeros(size, dtype=torch.uint8) for size in sizes]


def test_from_a_crowded_arena_the_receiver_copies(shm: Pair) -> None:
    sent, _ = shm.pass_on("kept", _of_size, 40 * MIB, 1)
    assert sent[2]
    assert shm.used() == 0
    shm.pass_on("", _of_size, 40 * MIB, 2)
    assert shm.b.run(_kept_value) == [1]
    shm.b.run(_drop, "kept")


def _kept_value() -> list[int]:
    return [int(value) for tensor in tensors().kept["kept"] for value in tensor.unique()]


def _two_peers(capacity: int) -> ShmLane:
    """A lane that is two peers of its own: one that keeps, and another."""
    lane = ShmLane(capacity, 1)
    address = lane.open()
    lane.connect([PeerAddress("keeper", address), PeerAddress("other", address)])
    return lane


@pytest.mark.parametrize("size", [MIB, 20 * MIB])
def test_a_peer_that_keeps_everything_does_not_keep_others_out(size: int) -> None:
    lane = _two_peers(64 * MIB)
    shapes = [(torch.uint8, (size,))]
    wanted = [random((2 * MIB,), torch.uint8)]
    kept = []
    for number in range(80 * MIB // size):
        sent = lane.export([torch.full((size,), number % 251, dtype=torch.uint8)], "keeper", {})
        kept += lane.fetch("keeper", sent.descriptor, shapes)
        arrived = lane.fetch("other", lane.export(wanted, "other", {}).descriptor, _TWO)
        assert torch.equal(arrived[0], wanted[0])
        del arrived
    assert all(bool((tensor == number % 251).all()) for number, tensor in enumerate(kept))
    lane.close()


_TWO: list[Shape] = [(torch.uint8, (2 * MIB,))]


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


def test_what_was_given_back_is_not_crowding(shm: Pair) -> None:
    shm.a.run(_self_talk, 0)
    assert not shm.a.run(_burst_then_one, 80, 500_000), "80 slots are back, but it calls itself crowded"
    assert shm.used() == 0


def _self_talk(_: int) -> None:
    """A lane may be its own peer: both sides in one process."""
    lane = tensors().lane
    assert isinstance(lane, ShmLane)
    lane.connect([PeerAddress("self", lane._arena.address)])


def _burst_then_one(count: int, size: int) -> bool:
    lane = tensors().lane
    sent = [lane.export([torch.zeros(size, dtype=torch.uint8)], "self", {}) for _ in range(count)]
    for one in sent:
        lane.fetch("self", one.descriptor, [(torch.uint8, (size,))])
    last = lane.export([torch.zeros(10)], "self", {})
    lane.discard("self", last.descriptor)
    return bool(last.descriptor[2])


def test_memory_does_not_wander_after_a_burst() -> None:
    """Once many were under way at a time, the arena must not fill all its memory before it looks for what is back."""
    lane = ShmLane(1 << 30, 1)
    lane.connect([PeerAddress("self", lane.open())])
    tensor, shapes = torch.zeros(MIB, dtype=torch.uint8), [(torch.uint8, (MIB,))]
    held = [lane.fetch("self", lane.export([tensor], "self", {}).descriptor, shapes) for _ in range(100)]
    held.clear()
    farthest = 0
    for _ in range(600):
        descriptor = lane.export([tensor], "self", {}).descriptor
        farthest = max(farthest, descriptor[0][0][1])
        lane.discard("self", descriptor)
    assert farthest < 256 * MIB
    lane.close()


def test_many_threads_at_once() -> None:
    lane = ShmLane(64 * MIB, 2)
    lane.connect([PeerAddress("self", lane.open())])
    failed: list[BaseException] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        kept: list[Any] = []
        try:
            for number in range(150):
                sizes = torch.randint(0, 300_000, (3,), generator=generator).tolist()
                value = (seed * 150 + number) % 251
                made = [torch.full((size,), value, dtype=torch.uint8) for size in sizes]
                export = lane.export(made, "self", {})
                if number % 10 == 0:
                    export.cancel()
                    continue
                arrived = lane.fetch("self", export.descriptor, [(torch.uint8, (size,)) for size in sizes])
                kept.append((value, arrived))
                if len(kept) > 4:
                    expected, old = kept.pop(0)
                    assert all(bool((tensor == expected).all()) for tensor in old)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed
    assert lane.in_use() == 0
    assert lane._arena._holes == [(MIB, 64 * MIB)], "the holes have grown together again"
    lane.close()


# --- the end -------------------------------------------------------------------------------------------------------


def test_nothing_is_left_behind(fresh: Pair) -> None:
    for _ in range(3):
        fresh.pass_on("", _several_large)
        fresh.pass_on("", _many_small, 50)
    fresh.pass_on("kept", _several_large)
    assert not [name for name in os.listdir("/dev/shm") if "raytorchrpc" in name]
    for process in (fresh.b, fresh.a):
        process.run(peers.close_tensors)
        assert process.run(_nothing_is_left) is True, process.run(_bytes_and_threads)


def _nothing_is_left() -> bool:
    gc.collect()

    def clean() -> bool:
        threads, descriptors, mapped = _bytes_and_threads()
        return not descriptors and not mapped and not any(name.startswith("raytorchrpc") for name in threads)

    return wait_until(clean, 20)


def test_close_leaves_the_process_as_it_was() -> None:
    """Everything is counted: descriptors, mappings, threads."""
    process = Process()
    try:
        process.run(_open_use_close)  # what torch and Python start once
        process.run(_open_use_close)
    finally:
        process.kill()


def _open_use_close() -> None:
    before = peers.everything_open()
    lanes = [ShmLane(64 * MIB, 4) for _ in range(2)]
    addresses = [lane.open() for lane in lanes]
    for lane, address in zip(lanes, reversed(addresses), strict=True):
        lane.connect([PeerAddress("other", address)])
    made = _several_large()
    kept = []
    for sender, receiver in (lanes, lanes[::-1]):
        sent = sender.export(made, "other", {})
        kept += receiver.fetch("other", sent.descriptor, [(tensor.dtype, tuple(tensor.shape)) for tensor in made])
        sender.export(made, "other", {})  # which nobody fetches
    assert len(peers.everything_open()[2]) > len(before[2]), "the mappings do not show"
    for lane in lanes:
        lane.close()
    assert all(same(*both) for both in zip(kept, made * 2, strict=True))
    kept.clear()
    del lanes, lane, sender, receiver, sent
    gc.collect()
    wait_until(lambda: peers.everything_open() == before, 20)
    assert peers.everything_open() == before


def test_close_is_safe_to_repeat_and_ends_exports(pair: Pair) -> None:
    pair.a.run(_close_twice)


def _close_twice() -> None:
    lane = _another()
    lane.close()  # never opened
    lane.open()
    lane.close()
    lane.close()
    if not isinstance(lane, CudaIpcLane):
        with pytest.raises(LaneUnavailable):
            lane.export([torch.ones(3)], "b", {})


def _another() -> TensorLane:
    """One like this process's own."""
    lane = tensors().lane
    if isinstance(lane, NcclLane):
        return peers.nccl_lane(0, carrier=lane._carrier)
    if isinstance(lane, NixlLane):
        return NixlLane(MIB, lane._devices, 20, lane._settings)
    return CudaIpcLane((0,)) if isinstance(lane, CudaIpcLane) else peers.cpu_lane(lane.name, MIB)


def test_what_was_fetched_outlives_the_sender(fresh: Pair) -> None:
    fresh.pass_on("kept", _several_large)
    fresh.a.kill()
    fresh.b.run(_kept_is, _several_large)
    fresh.b.run(_forget, "a")
    fresh.b.run(_kept_is, _several_large)
    fresh.b.run(_drop, "kept")
    assert fresh.b.run(_maps_less_than, 2), "its memory is still mapped"


def _kept_is(make: Callable[[], list[torch.Tensor]]) -> None:
    for tensor, expected in zip(tensors().kept["kept"], make(), strict=True):
        assert same(tensor.cpu(), expected)


def _forget(peer: str) -> None:
    tensors().lane.disconnect(peer)


def _maps_less_than(limit: int) -> bool:
    gc.collect()
    return _bytes_and_threads()[2] < limit  # one is its own


def test_a_sender_that_was_killed_cannot_be_fetched_from(fresh: Pair) -> None:
    sent = fresh.send(_several_large)
    fresh.a.kill()
    fresh.b.run(_cannot_fetch, sent)


def _cannot_fetch(sent: Any) -> None:
    for peer in ("a", "nobody", "a"):
        with pytest.raises(PeerLost, match=f"'{peer}'"):
            tensors().lane.fetch(peer, *sent)
        tensors().lane.discard(peer, sent[0])
        tensors().lane.disconnect("a")  # as the group does once it knows
    tensors().lane.disconnect("nobody")


def test_a_receiver_that_was_killed_gives_back(fresh: Pair) -> None:
    fresh.pass_on("kept", _several_large)
    fresh.send(_scalars)
    fresh.b.kill()
    assert fresh.a.run(_reclaim) == 0


def test_a_full_arena_takes_back_from_the_dead() -> None:
    pair = make_pair("shm")
    try:
        pair.pass_on("kept", _of_size, 100 * MIB, 1)
        pair.b.kill()
        pair.a.run(_export, _of_size, 200 * MIB, 2)
    finally:
        pair.kill()


def test_a_sender_killed_in_the_middle_of_its_copies_leaves_nothing_here() -> None:
    """What it held goes with it, and with the last tensor that came from it."""
    pair = make_pair("shm")
    try:
        pair.pass_on("kept", _one_large)
        pid = pair.a.process.pid
        assert pid is not None
        before = peers.resident_bytes(pid)
        pair.a.begin(_export_for_ever)
        assert wait_until(lambda: peers.resident_bytes(pid) > before + 15 * MIB, 10), "it copies nothing"
        pair.a.kill()
        pair.b.run(_is_the_one_large, "kept")
        pair.b.run(_forget, "a")
        pair.b.run(_is_the_one_large, "kept")
        pair.b.run(_drop, "kept")
        assert pair.b.run(_maps_less_than, 2), "its memory is still mapped"
    finally:
        pair.kill()


def _export_for_ever() -> None:
    made = _several_large()
    while True:
        export(made)
        tensors().exports.pop().cancel()


def _reclaim() -> int:
    lane = tensors().lane
    lane.disconnect("b")
    return _used() if isinstance(lane, ShmLane) else _on_their_way(lane)


def _on_their_way(lane: TensorLane) -> int:
    """Exports whose memory is still kept."""
    if isinstance(lane, NcclLane):
        return lane.outstanding
    if not isinstance(lane, (CudaIpcLane, NixlLane)):
        return len(open_things()[1] - tensors().at_open)  # what another lane keeps them in
    lane.reap()
    return lane.outstanding


# --- GPU only -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu(1)
@pytest.mark.parametrize("kind", GPU_KINDS)
def test_gpu_work_is_in_order_and_memory_is_let_go(kind: str) -> None:
    pair = make_pair(kind)
    try:
        for number in range(20):
            sent = pair.a.run(_slow_then_export, number)
            pair.b.run(_fetch_at_once, sent, number)
            pair.a.run(_finish)
        assert pair.a.run(_all_let_go)
        unwanted, _ = pair.send(_several_large)
        pair.b.run(_discard, unwanted)
        assert pair.a.run(_all_let_go)
        failing, _ = pair.send(_several_large)
        pair.b.run(_fail_to_fetch, failing)
        assert pair.a.run(_all_let_go)
    finally:
        pair.kill()


def _slow_then_export(number: int) -> Any:
    torch.cuda._sleep(20_000_000)  # the value is written only after this
    made = torch.full((4 * MIB,), number, dtype=torch.int32, device="cuda")
    sent = export([made])
    return sent


def _fetch_at_once(sent: Any, number: int) -> None:
    (arrived,) = tensors().lane.fetch("a", *sent)
    assert bool((arrived == number).all())


def _fail_to_fetch(descriptor: Any) -> None:
    with pytest.raises((IndexError, LaneUnavailable)):
        tensors().lane.fetch("a", descriptor, [])  # it does not know what to make room for


def _finish() -> None:
    tensors().exports.pop().finished()


def _all_let_go() -> bool:
    lane = tensors().lane
    return wait_until(lambda: not _on_their_way(lane), 5)
