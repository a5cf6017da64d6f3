"""One suite for the lanes that carry tensors alone: shm and nixl here, cuda_ipc and nccl where there are GPUs; and nccl
with a carrier that needs none (see ``pipes``).

Two processes, ``a`` and ``b``; functions with an underscore run in them.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from raytorchrpc import _compat
from raytorchrpc.errors import LaneUnavailable, PeerLost
from raytorchrpc.lanes.base import PeerAddress, Shape, TensorLane
from raytorchrpc.lanes.cuda_ipc import CudaIpcLane
from raytorchrpc.lanes.nccl import NcclLane
from raytorchrpc.lanes.nixl import NixlLane
from raytorchrpc.lanes.shm import ShmLane
from tests.conformance import peers
from tests.conformance.peers import Process, export, open_things, same, tensors, wait_until

MIB = 1 << 20
needs_nixl = pytest.mark.skipif(_compat.nixl_package() is None, reason=_compat.NIXL_MISSING)
GPU_KINDS = [
    pytest.param("cuda_ipc, one GPU", marks=pytest.mark.gpu(1)),
    pytest.param("cuda_ipc, two GPUs", marks=pytest.mark.gpu(2)),
    pytest.param("nccl, two GPUs", marks=pytest.mark.gpu(2)),
    pytest.param("nixl on cuda, one GPU", marks=[pytest.mark.gpu(1), needs_nixl]),
    pytest.param("nixl on cuda, two GPUs", marks=[pytest.mark.gpu(2), needs_nixl]),
]
NIXL_KINDS = [pytest.param(kind, marks=needs_nixl) for kind in peers.NIXL_SETTINGS]
KINDS = ["shm", "nccl by pipes", *NIXL_KINDS, *GPU_KINDS]
DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
]  # fmt: skip


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
    made = [tensor.to(tensors().device) if tensor.device.type == "cpu" else tensor for tensor in make(*args)]
    return export(made)


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
    arena = lane._arena
    with arena._lock:
        arena._sweep()
    return arena.used


def _bytes_and_threads() -> tuple[set[str], set[str], int]:
    threads, descriptors = open_things()
    mapped = sum("raytorchrpc-" in line for line in Path("/proc/self/maps").read_text().splitlines())
    return threads, {text for text in descriptors if "raytorchrpc" in text}, mapped


# --- what arrives ----------------------------------------------------------------------------------------------


def _random(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).bool()
    count = dtype.itemsize
    for extent in shape:
        count *= extent
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return raw.view(dtype).view(shape)


def _each_dtype(index: int) -> list[torch.Tensor]:
    return [_random((5, 7), DTYPES[index])]


def _dtypes_together(repeat: int) -> list[torch.Tensor]:
    return [_random((3, 1 + index), dtype) for index in range(repeat) for dtype in DTYPES]


def _same_shapes() -> list[torch.Tensor]:
    return [_random((3, 5), dtype, seed) for seed in range(6) for dtype in DTYPES]


def _empty() -> list[torch.Tensor]:
    return [torch.empty(0), torch.empty(3, 0, 2, dtype=torch.int64)]


def _empty_among_others() -> list[torch.Tensor]:
    return [torch.empty(0), _random((4,)), torch.empty(0, 9), _random((2, MIB)), torch.empty(0, dtype=torch.bool)]


def _scalars() -> list[torch.Tensor]:
    return [torch.tensor(3.5), torch.tensor(True), torch.tensor(1 + 2j), torch.tensor(7, dtype=torch.int8)]


def _views() -> list[torch.Tensor]:
    base = _random((40, 50))
    return [base.t(), base[::2, 1::3], base[3], base[:, 4], base[1:2], base[0, 0], base]


def _expanded() -> list[torch.Tensor]:
    overlapping = _random((6,)).as_strided((4, 3), (1, 1))
    return [_random((3, 1)).expand(3, 1000), torch.tensor(2.0).expand(700, 700), overlapping]


def _large_view() -> list[torch.Tensor]:
    return [_random((1100, 1000)).t()]


def _around_one_mib() -> list[torch.Tensor]:
    return [_random((MIB + more,), torch.uint8, more + 1) for more in (-1, 0, 1)]


def _seventy_megabytes() -> list[torch.Tensor]:
    return [torch.arange(17_500_003, dtype=torch.float32)]


def _several_large() -> list[torch.Tensor]:
    return [_random((size,), torch.uint8, size) for size in (9 * MIB + 13, 2 * MIB, 17)]


def _many_small(count: int) -> list[torch.Tensor]:
    dtypes = (torch.int64, torch.float32, torch.bool)
    return [torch.full((1 + number % 7,), number, dtype=dtypes[number % 3]) for number in range(count)]


@pytest.mark.parametrize("index", range(len(DTYPES)), ids=str)
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
    if "cpu" in tensors().lane.capabilities.devices:
        for tensor in made:
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
    (one, two, small), _, crowded = sent
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


def test_a_late_cancel_takes_nobody_elses_slot() -> None:
    lane = ShmLane(64 * MIB, 1)
    lane.open()
    first = lane.export([torch.ones(10)], "gone", {})
    lane.disconnect("gone")
    second = lane.export([torch.ones(10)], "alive", {})
    assert second.descriptor[0] == first.descriptor[0]
    first.cancel()
    assert lane._arena.used
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
    with lane._arena._lock:
        lane._arena._sweep()
    assert lane._arena.used == 0
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

    return wait_until(clean, 5)


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
    return ShmLane(MIB, 1) if isinstance(lane, ShmLane) else CudaIpcLane((0,))


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
    for peer in ("a", "nobody"):
        with pytest.raises((LaneUnavailable, PeerLost)):
            tensors().lane.fetch(peer, *sent)
        tensors().lane.discard(peer, sent[0])
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


def _reclaim() -> int:
    lane = tensors().lane
    lane.disconnect("b")
    return _used() if isinstance(lane, ShmLane) else _on_their_way(lane)


def _on_their_way(lane: TensorLane) -> int:
    """Exports whose memory is still kept."""
    if isinstance(lane, NcclLane):
        return len(lane._kept)
    assert isinstance(lane, (CudaIpcLane, NixlLane))
    lane.tidy()
    return len(lane._out)


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
    with pytest.raises(IndexError):
        tensors().lane.fetch("a", descriptor, [])  # it does not know what to make room for


def _finish() -> None:
    tensors().exports.pop().finished()


def _all_let_go() -> bool:
    lane = tensors().lane
    return wait_until(lambda: not _on_their_way(lane), 5)
