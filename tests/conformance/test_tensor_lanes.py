"""One suite for every TensorLane, those of other installed distributions included: cuda_ipc and nccl where there are
GPUs, and nccl with a carrier that needs none (see ``pipes``).

Two processes, ``a`` and ``b``; functions with an underscore run in them.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from raytorchrpc.errors import LaneUnavailable, PeerLost
from raytorchrpc.lanes import registry
from raytorchrpc.lanes.base import Copies, Copy, Pieces, Target, TensorLane
from raytorchrpc.lanes.cuda_ipc.lane import CudaIpcLane
from raytorchrpc.lanes.nccl.lane import NcclLane
from raytorchrpc.lanes.nixl.lane import NixlLane
from raytorchrpc.lanes.shm.lane import ShmLane
from raytorchrpc.lanes.torchrpc import lane as torchrpc_lane
from raytorchrpc.lanes.torchrpc.lane import TorchRpcTensors
from raytorchrpc.tensors import host_device_copy
from raytorchrpc.tensors.dtypes import Shape, as_copyable
from tests.conformance import peers
from tests.conformance.peers import ALL_DTYPES, Process, export, open_things, random, same, tensors
from tests.insides import needs_nixl
from tests.polling import wait_until
from tests.threads import in_threads

MIB = 1 << 20
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
        self.a.kill()
        self.b.kill()


def make_pair(kind: str, capacity: int = 256 * MIB, timeout_s: float = 60) -> Pair:
    a, b = Process(), Process()
    lane = kind.split(",")[0]
    a.begin(peers.open_tensors, lane, capacity, 0, 0, timeout_s)
    b.begin(peers.open_tensors, lane, capacity, int(kind.endswith("two GPUs")), 1, timeout_s)
    address_a, address_b = a.result(), b.result()
    a.run(peers.meet, "b", address_b)
    b.run(peers.meet, "a", address_a)
    return Pair(a, b)


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = make_pair(request.param)
    yield pair
    pair.kill()


@pytest.fixture(params=KINDS)
def fresh(request: pytest.FixtureRequest, form: Callable[[str], Pair]) -> Pair:
    """For tests that break something, or look at what is left."""
    return form(request.param)


# What the processes do.


def _export(make: Callable[..., Any], *args: Any) -> Any:
    sent = export([_placed(tensor) for tensor in make(*args)])
    assert _is_builtin(sent[0])
    return sent


def _is_builtin(value: Any) -> bool:
    if isinstance(value, tuple):
        return type(value) is tuple and all(map(_is_builtin, value))
    return value is None or type(value) in (int, bool, str, bytes)


def _placed(tensor: torch.Tensor) -> torch.Tensor:
    """On the device of the lane; torch itself cannot bring every dtype there with every stride."""
    if tensor.device.type == tensors().device:
        return tensor
    return as_copyable(tensor).to(tensors().device).view(tensor.dtype)


def _fetch(sent: tuple[Any, list[Shape]], keep: str, make: Callable[..., Any], *args: Any) -> None:
    arrived = tensors().lane.read("a", *sent)
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


# How buffers are made to receive into, for a tensor of that dtype and shape.


def _plain(shape: Shape) -> torch.Tensor:
    dtype, extents = shape
    size = dtype.itemsize * math.prod(extents)
    return torch.full((size,), 0x55, dtype=torch.uint8, device=tensors().device).view(dtype).view(extents)


def _strided(shape: Shape) -> torch.Tensor:
    dtype, extents = shape
    wider = _plain((dtype, (*extents, 3)))
    return wider[..., 1]


def _turned(shape: Shape) -> torch.Tensor:
    dtype, extents = shape
    return _plain((dtype, tuple(reversed(extents)))).permute(tuple(reversed(range(len(extents)))))


def _on_the_cpu(shape: Shape) -> torch.Tensor:
    return _brought(_plain(shape))


def _for_some(shape: Shape) -> torch.Tensor | None:
    return None if math.prod(shape[1]) % 2 else _plain(shape)


def _brought(tensor: torch.Tensor) -> torch.Tensor:
    """On the CPU; torch itself cannot bring every dtype there with every stride."""
    return as_copyable(tensor).cpu().view(tensor.dtype)


def _fill(
    sent: tuple[Any, list[Shape]],
    prepare: Callable[[Shape], torch.Tensor | None],
    make: Callable[..., list[torch.Tensor]],
    *args: Any,
) -> list[bool]:
    """Reads into targets; returns which of them the lane itself filled."""
    descriptor, shapes = sent
    targets = [prepare(shape) for shape in shapes]
    arrived = tensors().lane.read("a", descriptor, shapes, Copies.whole(targets))
    direct = [tensor is None for tensor in arrived]
    pairs = zip(targets, arrived, strict=True)
    left = [(target, tensor) for target, tensor in pairs if target is not None and tensor is not None]
    host_device_copy.copy_into([target for target, _ in left], [tensor for _, tensor in left])
    for target, tensor, expected in zip(targets, arrived, make(*args), strict=True):
        brought = tensor if target is None else target
        assert brought is not None and same(_brought(brought), expected), (expected.dtype, expected.shape)
    return direct


def _goes_direct() -> bool:
    """The nixl lane and torch copy out of memory of their own; lanes of other distributions may too."""
    lane = tensors().lane
    return not isinstance(lane, (NixlLane, TorchRpcTensors)) and lane.name in {row.name for row in registry.LANES}


# --- what arrives ----------------------------------------------------------------------------------------------


def _each_dtype() -> list[torch.Tensor]:
    made = [random((5, 7), dtype) for dtype in ALL_DTYPES]
    return [view for tensor in made for view in (tensor, tensor.T, tensor[1::2, ::3], tensor[:0], tensor[2, 3])]


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


def _several_large() -> list[torch.Tensor]:
    return [random((size,), torch.uint8, size) for size in (9 * MIB + 13, 2 * MIB, 17)]


def _many_small(count: int) -> list[torch.Tensor]:
    dtypes = (torch.int64, torch.float32, torch.bool)
    return [torch.full((1 + number % 7,), number, dtype=dtypes[number % 3]) for number in range(count)]


_KINDS_OF_TENSOR: list[tuple[Any, ...]] = [
    *((make,) for make in (_each_dtype, _same_shapes, _empty, _empty_among_others, _scalars, _views, _expanded)),
    *((make,) for make in (_large_view, _around_one_mib, _several_large)),
    *((_dtypes_together, 1), (_dtypes_together, 5), (_many_small, 1000)),
]


@pytest.mark.parametrize("prepare", [None, _plain, _strided, _turned, _on_the_cpu, _for_some])
def test_each_kind_of_tensor(pair: Pair, prepare: Any) -> None:
    """``prepare``: makes a buffer to receive into; None: without buffers."""
    for make, *args in _KINDS_OF_TENSOR if prepare in (None, _plain) else _KINDS_OF_TENSOR[::2]:
        if prepare is None:
            pair.pass_on("", make, *args)
        else:
            pair.b.run(_fill, pair.send(make, *args), prepare, make, *args)


def test_large_ones_arrive_in_buffers_without_a_stop(pair: Pair) -> None:
    direct = pair.b.run(_fill, pair.send(_several_large), _plain, _several_large)
    assert direct == [pair.b.run(_goes_direct)] * 3


def test_the_same_buffers_again_and_again(pair: Pair) -> None:
    """What has been filled stays so, whatever the lane carries next; and what a GPU does with them is in order."""
    for seed in range(3):
        pair.b.run(_refill, pair.send(_of_seed, seed), seed)
        pair.pass_on("", _of_seed, seed + 100)
        pair.b.run(_holds, seed)


def _of_seed(seed: int) -> list[torch.Tensor]:
    return [random((size,), torch.uint8, seed) for size in (3 * MIB, 1000, 9 * MIB + 1, 77, 78, 79, MIB)]


def _refill(sent: tuple[Any, list[Shape]], seed: int) -> None:
    targets = tensors().kept.setdefault("targets", [_plain(shape) for shape in sent[1]])
    for target in targets:
        target.add_(seed)  # on a GPU perhaps still to come when the lane is asked
    peers.read(sent, Copies.whole(targets))


def _holds(seed: int) -> None:
    for target, expected in zip(tensors().kept["targets"], _of_seed(seed), strict=True):
        assert same(_brought(target), expected), seed


# --- regions of flat tensors ---------------------------------------------------------------------------------------


def _column_slice(shape: Shape) -> torch.Tensor:
    dtype, extents = shape
    if not extents:
        return _plain(shape)
    return _plain((dtype, (*extents[:-1], extents[-1] + 16)))[..., 8:-8]


#: Where a region begins, its target's dtype and shape, and its strides in the flat tensor.
_Described = tuple[int, torch.dtype, tuple[int, ...], "tuple[int, ...] | None"]
#: Bools of random bytes would be none.
_DTYPES = [dtype for dtype in ALL_DTYPES if dtype is not torch.bool]
_SIZES = (5 * MIB, 192, 0, 3 * MIB + 64, 256)
_REGIONS: list[list[_Described]] = [
    [
        (64, torch.float32, (1000, 300), (1024, 1)),  # columns of a matrix
        (2048, torch.bfloat16, (512, 20), (1024, 1)),
        (0, torch.int16, (4, 100, 64), (100_000, 256, 1)),  # and of a stack of them
        (256, torch.int32, (3, 200, 500), (400_000, 1000, 1)),
        (0, torch.uint8, (3, 4, 5, 6), (50_000, 4000, 40, 3)),
        (0, torch.float64, (300, 200), (1, 300)),  # transposed
        (128, torch.complex32, (20, 30), (64, 1)),
        (MIB, torch.uint8, (2 * MIB,), None),
        (4096, torch.float32, (MIB // 8,), None),
        (0, torch.float32, (7, 3), None),
        (0, torch.float32, (3, 4), (0, 1)),
        (8, torch.int64, (), ()),
        (0, torch.float32, (0, 3), (3, 1)),
    ],
    [
        (0, torch.uint8, (5, 4), (30, 1)),
        (8, torch.int32, (5,), (2,)),
        (64, torch.int32, (5,), None),
        (128, torch.complex32, (2, 2), None),
        (192, torch.int8, (0, 4), None),
        (0, torch.float32, (6, 8), None),  # all of it, beside regions of it
    ],
    [(0, torch.uint8, (0, 4), (30, 1)), (0, torch.float64, (0,), None)],
    [
        (64, torch.bfloat16, (512, 1024), (2048, 1)),
        (3 * MIB, torch.float16, (4, 8), None),
        # Small ones among contiguous neighbours, and some over others.
        *((256 * number, dtype, (3, 2), (4, 1)) for number, dtype in enumerate(_DTYPES)),
        *((2 * MIB + 64 * number, dtype, (3,), None) for number, dtype in enumerate(_DTYPES)),
        *((256 * number, torch.int16, (7,), None) for number in range(9)),
        (2 * MIB, torch.uint8, (8192,), None),
        (2 * MIB + (64 << 10) + 192, torch.uint8, (5,), None),
    ],
    [],
]
_ALL = slice(None)


_TARGETS = (_plain, _column_slice, _strided, _turned, _on_the_cpu)


def region(offset: int, target: torch.Tensor, strides: tuple[int, ...] | None = None, source: int = 0) -> Copies:
    """The copy of one region."""
    return Copies([Copy(source, Target.of(target), offset, strides)], [target])


@pytest.mark.parametrize("lend", [False, True])
def test_regions_of_flat_tensors_go_where_they_belong(pair: Pair, lend: bool) -> None:
    for prepare in _TARGETS[:2] if lend else _TARGETS:
        for kept in (_ALL, slice(1, 3)):  # the latter are small enough for a message of cuda_ipc
            pair.b.run(_read_regions, pair.send(_flats, lend, kept), prepare, kept)
    if pair.a.run(lambda: tensors().lane.name == "shm"):
        assert pair.used() == 0, "slots are back"


def _flats(lend: bool, kept: slice = _ALL) -> list[torch.Tensor]:
    made = [random((size,), torch.uint8, size) for size in _SIZES][kept]
    return [_lent(tensor) for tensor in made] if lend else made


def _lent(tensor: torch.Tensor) -> torch.Tensor:
    lent = tensors().lane.lend(tensor.nbytes)
    tensors().kept.setdefault("lent", []).append(lent)
    return tensor if lent is None else lent.copy_(tensor)


def _read_regions(sent: tuple[Any, list[Shape]], prepare: Callable[[Shape], torch.Tensor], kept: slice = _ALL) -> None:
    targets, described = list[torch.Tensor](), list[Copy]()
    for source, regions in enumerate(_REGIONS[kept]):
        for offset, dtype, shape, strides in regions:
            targets.append(prepare((dtype, shape)))
            described.append(Copy(source, Target.of(targets[-1]), offset, strides))
    peers.read(sent, Copies(described, targets))
    wholes = _flats(False, kept)
    for (source, _, offset, strides), target in zip(described, targets, strict=True):
        shape, count = tuple(target.shape), target.numel()
        if strides is not None and count:
            count = 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
        elements = wholes[source][offset : offset + count * target.itemsize].clone().view(target.dtype)
        expected = elements.view(shape) if strides is None else elements.as_strided(shape, strides)
        assert same(_brought(target), expected), (offset, target.dtype, shape)
        memory = target if target._base is None else target._base
        assert (memory.reshape(-1).view(torch.uint8) != 0x55).sum() <= target.nbytes, "nothing else was written"


# --- memory that is read in place ----------------------------------------------------------------------------------

_IN_PLACE = ["shm", *NIXL_KINDS, *(kind for kind in GPU_KINDS if not kind.values[0].startswith("nccl"))]


@pytest.mark.parametrize("pair", _IN_PLACE, indirect=True)
def test_pieces_of_what_is_exposed_are_read_while_its_owner_runs_no_python(pair: Pair, tmp_path: Path) -> None:
    descriptor = pair.a.run(_expose_layers)
    pair.b.run(_gather_scattered, descriptor, 1)
    os.mkfifo(held := tmp_path / "held")
    end = os.open(held, os.O_RDWR)
    pair.a.begin(_hold_the_interpreter, held)
    assert wait_until((tmp_path / "holds").exists, 20)
    pair.b.run(_gather_scattered, descriptor, 3)
    os.write(end, b".")
    pair.a.result()
    os.close(end)


#: Of exposed tensors: their rows are wider than what one read of nixl brings, or narrower.
_WIDTHS, _ROWS = (5 * MIB + 3, 1000, 16), 12


def _layers() -> list[torch.Tensor]:
    whole = [random((_ROWS, width), torch.uint8, width) for width in _WIDTHS]
    return [*whole, whole[1][2:, 100:], torch.empty(_ROWS, 0, dtype=torch.uint8)]


def _expose_layers() -> Any:
    tensors().kept["exposed"] = made = [tensor.to(tensors().device) for tensor in _layers()]
    made[3] = made[1][2:, 100:]  # in the memory of another
    descriptor = tensors().lane.expose(made)
    assert _is_builtin(descriptor)
    return descriptor


def _hold_the_interpreter(until: Path) -> None:
    end, read = os.open(until, os.O_RDWR), ctypes.PyDLL(None).read
    until.with_name("holds").touch()
    read(end, ctypes.create_string_buffer(1), 1)
    os.close(end)


def _gather_scattered(descriptor: Any, times: int) -> None:
    for seed in range(times):
        order = torch.randperm(_ROWS - 2, generator=torch.Generator().manual_seed(seed))[:7].numpy()
        into, pieces = [torch.full_like(tensor, 1) for tensor in _layers()[:4]], []
        into = [tensor.to(tensors().device) for tensor in into]
        for number, target in enumerate(into):
            width, here = target.shape[1], target.data_ptr() + order[::-1] * target.stride(0)
            offset = order * (_WIDTHS[1] if number == 3 else width)
            pieces.append(Pieces(numpy.full(len(order), number), offset, here, width))
        tensors().lane.gather("a", descriptor, pieces, into[0].device)
        for target, source in zip(into, _layers(), strict=False):
            expected = torch.full_like(source, 1)
            expected[order[::-1].copy()] = source[order]
            assert torch.equal(target.cpu(), expected)


# --- whose memory it is ----------------------------------------------------------------------------------------------


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

    in_threads(work, threads)
    return sent


def _fetch_in_threads(sent: list[Any], threads: int) -> None:
    def work(thread: int) -> None:
        for seed, told in sent[thread::threads]:
            arrived = tensors().lane.read("a", *told)
            assert all(same(tensor.cpu(), wanted) for tensor, wanted in zip(arrived, _seeded(seed), strict=True)), seed

    in_threads(work, threads)


def _seeded(seed: int) -> list[torch.Tensor]:
    return [random((1 + seed * 97 % 5000,), torch.uint8, seed), random((MIB // 4,), torch.float32, seed)]


@pytest.mark.slow
def test_a_tensor_of_more_than_2_gib(form: Callable[..., Pair]) -> None:
    pair = form("shm", 6 << 30)
    pair.b.run(_fetch_huge, pair.a.run(lambda: export([torch.ones(3), peers.huge(2.1)])))
    assert pair.used() == 0


def _fetch_huge(sent: Any) -> None:
    ones, arrived = tensors().lane.read("a", *sent)
    assert ones.tolist() == [1, 1, 1]
    assert peers.is_huge(arrived)
    arrived[-1] = 7
    assert arrived[-1] == 7


def test_what_arrives_is_private_and_writable(pair: Pair) -> None:
    pair.a.run(_keep_source)
    sent = pair.a.run(lambda: export(tensors().kept["source"]))
    first = pair.b.run(_fill_each, sent)
    assert first == [1, 2, 3]
    pair.a.run(_source_is_unchanged)
    pair.pass_on("", _around_one_mib)  # and the next message is not written over
    assert pair.b.run(_values) == [1, 2, 3]
    pair.b.run(_drop, "filled")


def test_each_tensor_of_a_message_is_independent_of_the_others(pair: Pair) -> None:
    for sizes in (_MIXED, (500,) * 40):
        sent = pair.a.run(lambda sizes: export([torch.ones(size, device=tensors().device) for size in sizes]), sizes)
        assert pair.b.run(lambda sent: peers.independent(tensors().lane.read("a", *sent)), sent)


#: More small ones than a lane sends one by one.
_MIXED = (3, 2, 300_000, 5, 20_000, 7, 20_000, 4_000_000, 1)


def _keep_source() -> None:
    tensors().kept["source"] = [tensor.to(tensors().device) for tensor in _around_one_mib()]


def _source_is_unchanged() -> None:
    for tensor, expected in zip(tensors().kept["source"], _around_one_mib(), strict=True):
        assert same(tensor.cpu(), expected)


def _fill_each(sent: Any) -> list[int]:
    tensors().kept["filled"] = arrived = tensors().lane.read("a", *sent)
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


@pytest.mark.parametrize("prepare", [None, _plain])
def test_the_sender_may_change_its_tensors(pair: Pair, prepare: Any) -> None:
    sent = pair.a.run(_export_then_change, _several_large)
    if prepare is None:
        pair.b.run(_fetch, sent, "", _several_large)
    else:
        pair.b.run(_fill, sent, prepare, _several_large)
    pair.a.run(_finish_and_change)


def _export_then_change(make: Callable[[], list[torch.Tensor]]) -> Any:
    tensors().kept["changing"] = made = [tensor.to(tensors().device) for tensor in make()]
    sent = export(made)
    for tensor in made:
        can = tensors().lane.capabilities
        if tensor.is_cpu and "cpu" in can.devices and not can.reads_later:  # what stands for a GPU is read later
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


def test_what_is_not_wanted_or_not_sent_is_let_go(fresh: Pair) -> None:
    fresh.pass_on("", _around_one_mib)
    unwanted, _ = fresh.send(_several_large)
    fresh.b.run(lambda: tensors().lane.release("a", unwanted))
    fresh.send(_several_large)
    fresh.a.run(_cancel_twice)
    assert fresh.a.run(_all_let_go)


def _cancel_twice() -> None:
    for _ in range(2):
        tensors().exports[-1].cancel()


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
    if isinstance(lane, TorchRpcTensors):
        return TorchRpcTensors(lane._lane, 20)
    return CudaIpcLane((0,)) if isinstance(lane, CudaIpcLane) else peers.cpu_lane(lane.name, MIB)


def test_what_was_fetched_outlives_the_sender(fresh: Pair) -> None:
    fresh.pass_on("kept", _several_large)
    fresh.a.kill()
    fresh.b.run(_several_large_are_kept)
    fresh.b.run(lambda: tensors().lane.disconnect("a"))
    fresh.b.run(_several_large_are_kept)
    fresh.b.run(_drop, "kept")
    assert fresh.b.run(_maps_less_than, 2), "its memory is still mapped"


def _several_large_are_kept() -> None:
    for tensor, expected in zip(tensors().kept["kept"], _several_large(), strict=True):
        assert same(tensor.cpu(), expected)


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
            tensors().lane.read(peer, *sent)
        tensors().lane.release(peer, sent[0])
        tensors().lane.disconnect("a")  # as the group does once it knows
    tensors().lane.disconnect("nobody")


def test_a_receiver_that_was_killed_gives_back(fresh: Pair) -> None:
    fresh.pass_on("kept", _several_large)
    fresh.send(_scalars)
    fresh.b.kill()
    assert fresh.a.run(lambda: tensors().lane.disconnect("b") or _on_their_way(tensors().lane)) == 0


def test_a_full_arena_takes_back_from_the_dead(form: Callable[..., Pair]) -> None:
    pair = form("shm", 16 * MIB)
    pair.pass_on("kept", _of_size, 6 * MIB)
    pair.b.kill()
    pair.a.run(_export, _of_size, 12 * MIB)


def _of_size(size: int) -> list[torch.Tensor]:
    return [torch.ones(size, dtype=torch.uint8)]


def _on_their_way(lane: TensorLane) -> int:
    """Exports whose memory is still kept."""
    if isinstance(lane, ShmLane):
        return lane.in_use()
    if isinstance(lane, NcclLane):
        return lane.outstanding
    if isinstance(lane, TorchRpcTensors):
        return sum(kept.lane is lane for kept in torchrpc_lane._kept.values())
    if not isinstance(lane, (CudaIpcLane, NixlLane)):
        return len(open_things()[1] - tensors().at_open)  # what another lane keeps them in
    lane.reap()
    return lane.outstanding


# --- GPU only -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu(1)
@pytest.mark.parametrize("kind", GPU_KINDS)
def test_gpu_work_is_in_order_and_memory_is_let_go(kind: str, form: Callable[[str], Pair]) -> None:
    pair = form(kind)
    for number in range(20):
        pair.b.run(_fetch_at_once, pair.a.run(_slow_then_export, number), number)
        pair.a.run(lambda: tensors().exports.pop().finished())
    assert pair.a.run(_all_let_go)
    unwanted, _ = pair.send(_several_large)
    pair.b.run(lambda: tensors().lane.release("a", unwanted))
    assert pair.a.run(_all_let_go)
    failing, _ = pair.send(_several_large)
    pair.b.run(_fail_to_fetch, failing)
    assert pair.a.run(_all_let_go)


def _slow_then_export(number: int) -> Any:
    torch.cuda._sleep(20_000_000)  # the value is written only after this
    return export([torch.full((4 * MIB,), number, dtype=torch.int32, device="cuda")])


def _fetch_at_once(sent: Any, number: int) -> None:
    (arrived,) = tensors().lane.read("a", *sent)
    assert bool((arrived == number).all())


def _fail_to_fetch(descriptor: Any) -> None:
    with pytest.raises((IndexError, LaneUnavailable)):
        tensors().lane.read("a", descriptor, [])  # it does not know what to make room for


def _all_let_go() -> bool:
    lane = tensors().lane
    return wait_until(lambda: not _on_their_way(lane), 20)
