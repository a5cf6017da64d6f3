"""How a strided region is divided into copies of rows, and how cuda_ipc makes them (with the CPU as its GPU)."""

from __future__ import annotations

import ctypes
import random
import struct
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from raytorchrpc.errors import LaneUnavailable
from raytorchrpc.lanes.base import Copies, Copy, Pieces, Target
from raytorchrpc.lanes.common import gpu_copies as module
from raytorchrpc.lanes.common import packing
from raytorchrpc.lanes.common.gpu_copies import (
    COPY_LISTED,
    COPY_ROWS,
    Dimension,
    RowCopies,
    Rows,
    Scatter,
    collapse,
    queue_pieces,
    rows_of,
)
from raytorchrpc.lanes.cuda_ipc import lane
from raytorchrpc.process.cuda_driver import Driver, Kernel
from raytorchrpc.tensors.dtypes import OutOfBounds, span_of, within
from tests.unit.host_kernels import HostDriver

CPU = torch.device("cpu")
MANY = 1 << 31


class Memory(Driver):
    """Copies this process's own memory, as a GPU copies its."""

    def __init__(self) -> None:
        """Needs no libcuda."""

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        ctypes.memmove(target, source, size)

    def copy_all(self, copies: Iterable[tuple[int, int, int, int, int, int]], source: int, stream: int) -> None:
        for target, offset, width, rows, source_pitch, target_pitch in copies:
            self.copy_rows(target, source + offset, width, rows, target_pitch, source_pitch, stream)

    def copy_rows(
        self, target: int, source: int, width: int, rows: int, target_pitch: int, source_pitch: int, stream: int
    ) -> None:
        for row in range(rows):
            ctypes.memmove(target + row * target_pitch, source + row * source_pitch, width)


def no_kernel() -> None:
    """As long as it is compiled, and where that fails."""


def kernel() -> Kernel:
    return Kernel(HostDriver(COPY_ROWS), 0)


def copies_to(*described: tuple[int, torch.Tensor, tuple[int, ...] | None]) -> Copies:
    """Of regions: where each begins, its target, its strides."""
    copies = [Copy(0, Target.of(target), offset, strides) for offset, target, strides in described]
    return Copies(copies, [target for _, target, _ in described])


def copy(
    copies: Copies, flat: torch.Tensor, device: torch.device = CPU, ready: Callable[[], Kernel | None] = no_kernel
) -> list[int]:
    """Make copies out of a flat tensor; which of them needed a temporary."""
    sizes = (flat.numel(),)
    scatter = copies.prepared("scatter", lambda: Scatter.of(copies, sizes, device))
    left = scatter.queue(copies, flat.data_ptr(), [(torch.uint8, sizes)], device, Memory(), ready, 0)
    for index, source in left:
        target = copies.target(index)
        assert target is not None
        target.copy_(source)
    return [index for index, _ in left]


def numbered(size: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.int64).mul_(2654435761).bitwise_right_shift_(7).to(torch.uint8)


def any_strides(chance: random.Random, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a slice of a permuted larger tensor, or any at all: elements of a source may share a place."""
    if chance.random() < 0.2:
        return tuple(chance.randrange(12) for _ in shape)
    order = chance.sample(range(len(shape)), len(shape)) if chance.random() < 0.5 else range(len(shape))
    strides, step = [0] * len(shape), 1
    for dimension in reversed(order):
        strides[dimension] = step
        step *= max(1, shape[dimension]) + chance.choice([0, 0, 0, 1, 3])
    return tuple(strides)


def any_target(chance: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(All of its memory, the target): a slice of a permuted larger tensor."""
    order = chance.sample(range(len(shape)), len(shape))
    larger = [shape[dimension] + chance.choice([0, 0, 2]) for dimension in order]
    whole = torch.zeros(larger, dtype=dtype)
    cut = whole
    for place, dimension in enumerate(order):
        spare = larger[place] - shape[dimension]
        cut = cut.narrow(place, chance.randint(0, spare), shape[dimension])
    return whole, cut.permute([order.index(dimension) for dimension in range(len(shape))])


@pytest.mark.parametrize("fast", ["rows alone", "as it decides", "a temporary"])
def test_any_region_goes_into_any_target(monkeypatch: pytest.MonkeyPatch, fast: str) -> None:
    if fast == "rows alone":
        monkeypatch.setattr(module, "_DENSE", 0)
    elif fast == "a temporary":
        monkeypatch.setattr(module, "_DENSE", 1 << 40)
    chance = random.Random(fast)
    for _ in range(1500):
        shape = tuple(chance.choice([0, 1, 1, 2, 3, 4, 5, 5]) for _ in range(chance.randrange(5)))
        dtype = chance.choice([torch.uint8, torch.int16, torch.float32, torch.int64])
        strides = any_strides(chance, shape)
        offset, spare = (chance.randrange(3) * dtype.itemsize for _ in range(2))
        flat = numbered(offset + span_of(shape, strides) * dtype.itemsize + spare)
        whole, target = any_target(chance, shape, dtype)
        wanted = whole.clone()
        if target.numel():
            source = flat[offset : flat.numel() - spare].clone().view(dtype)
            goal = wanted.as_strided(shape, target.stride(), target.storage_offset())
            goal.copy_(source.as_strided(shape, strides))
        either = strides == packing.layout(shape)[0] and chance.random() < 0.5
        copies = copies_to((offset, target, None if either else strides))
        elsewhere = chance.random() < 0.3
        device = torch.device("cpu", 0) if elsewhere else CPU
        made = copy(copies, flat, device, no_kernel)
        assert len(made) <= 1
        assert torch.equal(whole.view(-1).view(torch.uint8), wanted.view(-1).view(torch.uint8)), copies[0]


@pytest.mark.parametrize("max_pitch", [1, 40, MANY])
def test_rows_are_what_cuda_can_copy(monkeypatch: pytest.MonkeyPatch, max_pitch: int) -> None:
    monkeypatch.setattr(module, "_DENSE", 0)
    chance = random.Random(max_pitch)
    several = 0
    for _ in range(500):
        shape = tuple(chance.randint(1, 6) for _ in range(chance.randrange(5)))
        strides, target = any_strides(chance, shape), any_target(chance, shape, torch.int32)[1]
        found = rows_of(shape, 4, strides, target.stride(), max_pitch)
        assert found is not None
        assert sum(rows.width * rows.number for rows in found) == target.nbytes
        for rows in found:
            several += rows.number > 1
            assert rows.number == 1 or all(
                rows.width <= pitch <= max_pitch for pitch in (rows.source_pitch, rows.target_pitch)
            )
    assert bool(several) == (max_pitch > 4)


def test_dimensions_that_are_contiguous_on_both_sides_become_one() -> None:
    assert collapse((4, 5, 6), 2, (30, 6, 1), (30, 6, 1)) == (240, [])
    assert collapse((4, 5, 6), 2, (60, 12, 1), (30, 6, 1)) == (12, [Dimension(20, 24, 12)])
    assert collapse((4, 5, 6), 2, (60, 6, 1), (30, 6, 1)) == (60, [Dimension(4, 120, 60)])
    assert collapse((4, 1, 6), 2, (6, 999, 1), (6, 77, 1)) == (48, [])
    assert collapse((5, 4), 2, (1, 5), (1, 5)) == (40, []), "both are transposed"
    assert collapse((5, 4), 2, (4, 1), (1, 5)) == (2, [Dimension(4, 2, 10), Dimension(5, 8, 2)])
    assert collapse((), 8, (), ()) == (8, [])


def test_a_column_shard_is_one_copy() -> None:
    """Half of the columns of a matrix of 4096 x 4096, to a matrix of its own and into the other half of another."""
    shape, strides = (4096, 2048), (4096, 1)
    assert rows_of(shape, 2, strides, (2048, 1), MANY) == (Rows(0, 0, 4096, 4096, 8192, 4096),)
    assert rows_of(shape, 2, strides, (4096, 1), MANY) == (Rows(0, 0, 4096, 4096, 8192, 8192),)
    assert rows_of((2048, 4096), 2, strides, (4096, 1), MANY) == (Rows(0, 0, 1 << 24, 1, 1 << 24, 1 << 24),)


def test_a_shard_of_a_stack_of_matrices_is_one_copy_for_each() -> None:
    found = rows_of((8, 512, 1024), 2, (2048 * 2048, 2048, 1), (512 * 1024, 1024, 1), MANY)
    each = (1 << 23, 1 << 20)
    assert found == tuple(Rows(i * each[1], i * each[0], 2048, 512, 4096, 2048) for i in range(8))
    # Many columns of few rows: the outermost dimension has the rows.
    found = rows_of((8192, 2, 1024), 2, (4096, 2048, 1), (4096, 1024, 1), MANY)
    assert found == tuple(Rows(i * 2048, i * 4096, 2048, 8192, 8192, 8192) for i in range(2))


def test_a_temporary_is_used_only_where_little_lies_between() -> None:
    transposed = rows_of((2048, 2048), 2, (1, 2048), (2048, 1), MANY)
    assert transposed is None
    one_column = rows_of((1 << 20, 1), 4, (1 << 10, 1), (1, 1), MANY)
    assert one_column == (Rows(0, 0, 4, 1 << 20, 4096, 4),), "not with 4 GiB around it"
    assert rows_of((64, 64, 64), 4, (10000, 128, 1), (64 * 64, 64, 1), MANY) is None, "64 small copies"


@pytest.mark.parametrize("compiled", [no_kernel, kernel])
def test_copies_that_come_again_need_only_the_memory(compiled: Callable[[], Kernel | None]) -> None:
    """Contiguous ones, rows, many small ones, and one by way of a temporary; into new values each time."""
    flat = numbered(1 << 20)
    wide, whole = torch.zeros(20, 40, dtype=torch.int32), torch.zeros(16, 16, dtype=torch.int32).t()
    small = [torch.zeros(5, dtype=torch.int32) for _ in range(6)]
    described = [
        (1 << 19, torch.zeros(500, dtype=torch.int32), None),
        (2000, wide[:, 3:33], (40, 1)),
        *((6000 + 64 * number, tensor, None) for number, tensor in enumerate(small)),
        (8000, whole, (16, 1)),
    ]
    copies = copies_to(*described)
    for _ in range(2):
        flat = flat.roll(4)
        assert copy(copies, flat, CPU, compiled) == [8], "the others are known by their addresses"
        for offset, target, strides in described:
            source = flat[offset:].view(torch.int32)
            wanted = source.as_strided(target.shape, strides or target.stride())
            assert torch.equal(target, wanted.view_as(target))
    assert not wide[:, :3].any() and not wide[:, 33:].any()


def test_kernels_make_many_copies_of_any_alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of whole tensors and those of rows, and large ones in parts."""
    monkeypatch.setattr(module, "_LARGEST", 1 << 16)
    monkeypatch.setattr(module, "_THREADS", 64)
    copying, chance = HostDriver(COPY_ROWS), random.Random(7)
    for spare in (0, 8):
        flat, wholes = numbered(1 << 18), []
        described: list[tuple[int, torch.Tensor, tuple[int, ...] | None]] = []
        for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64) * 8:
            shape = tuple(chance.choice([1, 2, 3, 8, 64]) for _ in range(2))
            whole, target = any_target(chance, shape, dtype)
            strides = packing.layout(shape)[0] if chance.random() < 0.5 else (shape[1] + chance.choice([0, 3, 8]), 1)
            wholes.append((whole, target))
            described.append((chance.randrange(1000) * 8, target, strides))
        described.append((1024, torch.zeros(1 << 15, dtype=torch.int32), None))
        copy(copies_to(*described), flat[spare:], CPU, lambda: Kernel(copying, 0))
        for offset, target, strides in described:
            source = flat[spare + offset :]
            source = source[: source.numel() // 8 * 8].clone().view(target.dtype)
            wanted = source.as_strided(target.shape, strides or packing.layout(tuple(target.shape))[0])
            assert torch.equal(target, wanted)
        for whole, target in wholes:
            target.zero_()
            assert not whole.any(), "something beside the target was written"
    assert len(copying.launched) == 2 and all(17 < grid[0] < 127 for grid, _ in copying.launched)


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("width", [1, 6, 24, 4096, (5 << 16) + 8])
def test_pieces_of_many_tensors_arrive(monkeypatch: pytest.MonkeyPatch, width: int, is_compiled: bool) -> None:
    monkeypatch.setattr(module, "_LARGEST", 1 << 16)
    monkeypatch.setattr(module, "_THREADS", 64)
    copying, chance = HostDriver(COPY_LISTED), numpy.random.default_rng(width)
    sources = [torch.from_numpy(chance.integers(0, 256, (11, width), dtype=numpy.uint8)) for _ in range(3)]
    room = torch.zeros(40, width + 3, dtype=torch.uint8)
    number, row, place = chance.integers(0, 3, 20), chance.integers(0, 11, 20), chance.permutation(40)[:20]
    begins = numpy.array([source.data_ptr() for source in sources])
    pieces = Pieces(number, row * width, room.data_ptr() + place * (width + 3), width)
    kernel = Kernel(copying, 0) if is_compiled else None
    queue_pieces(pieces, begins, CPU, copying if is_compiled else Memory(), lambda: kernel, 0)
    for one, at, to in zip(number, row, place, strict=True):
        assert torch.equal(room[to, :width], sources[one][at])
    assert not room[:, width:].any() and int(room.any(1).sum()) <= 20
    assert len(copying.launched) == int(is_compiled)


def test_strided_regions_for_a_gpu_lie_in_their_flat_tensor() -> None:
    target = torch.zeros(3, 2, dtype=torch.int16)
    fitting = copies_to((2, target, (8, 1)))  # 2 + (2 * 8 + 1 + 1) * 2 bytes
    assert Scatter.of(fitting, [38], CPU).direct.rows
    for offset, strides in (
        (28, None),
        (-1, None),
        (1 << 40, None),
        (2, (-1, 1)),
        (4, (8, 1)),
        (2, (9, 1)),
        (2, (8, 2)),
        (-2, (8, 1)),
        (2, (1 << 62, 1)),
    ):
        with pytest.raises(OutOfBounds):
            Scatter.of(copies_to((offset, target, strides)), [38], CPU)
    for wrong in ((1,), (8, 1, 1)):
        with pytest.raises(ValueError, match="zip"):
            Scatter.of(copies_to((0, target, wrong)), [38], CPU)


def test_a_two_dimensional_copy_is_described_as_in_cuda_h() -> None:
    seen: list[Any] = []

    def copy_2d(described: Any, stream: int) -> int:
        seen.append(struct.unpack("QQi4xQQQQ" * 2 + "QQ", described))
        return codes.pop()

    def copy(target: int, source: int, size: int, stream: int) -> int:
        seen.append((target, source, size))
        return 0

    driver = object.__new__(Driver)
    driver._cuda = SimpleNamespace(cuMemcpy2DAsync_v2=copy_2d, cuMemcpyDtoDAsync_v2=copy)  # type: ignore[assignment]
    described = (0, 0, 2, 0, 2000, 0, 64, 0, 0, 2, 0, 1000, 0, 48, 32, 3)
    codes = [0]
    driver.copy_rows(1000, 2000, 32, 3, 48, 64, 7)
    assert seen == [described]
    driver.copy_rows(1000, 2000, 32, 1, 0, 0, 7)
    assert seen.pop() == (1000, 2000, 32), "a single row has no pitch"
    codes = [1]  # invalid value: not with these pitches
    driver.copy_rows(1000, 2000, 32, 3, 48, 64, 7)
    assert seen[2:] == [(1000, 2000, 32), (1048, 2064, 32), (1096, 2128, 32)]
    codes = [700]
    with pytest.raises(LaneUnavailable, match="cuMemcpy2DAsync failed with driver error 700"):
        driver.copy_rows(1000, 2000, 32, 3, 48, 64, 7)


def test_copies_for_kernels_are_alike_in_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long ones, many rows, rows that are too long, and more than one kernel takes."""
    monkeypatch.setattr(module, "_LARGEST", 64)
    copying = HostDriver(COPY_ROWS)
    flat, target = numbered(1 << 15), torch.zeros(1 << 15, dtype=torch.uint8)
    begin = target.data_ptr()
    rows = [
        Rows(begin, 0, 10_001, 1, 0, 0),
        Rows(begin + 10_240, 11_000, 24, 100, 32, 24),
        Rows(begin + 13_000, 15_000, 200, 5, 256, 300),
        *(Rows(begin + 20_000 + 8 * at, 20_000 + 8 * at, 8, 1, 0, 0) for at in range(20)),
    ]
    RowCopies(rows).queue(flat.data_ptr(), Memory(), lambda: Kernel(copying, 0), 0)
    assert torch.equal(target[:10_001], flat[:10_001])
    rows = flat[11_000:14_200].view(100, 32)[:, :24]
    assert torch.equal(target[10_240:12_640].view(100, 24), rows)
    for row in range(5):
        assert torch.equal(target[13_000 + 300 * row :][:200], flat[15_000 + 256 * row :][:200])
    assert torch.equal(target[20_000:20_160], flat[20_000:20_160])
    assert not target[13_200:13_300].any() and not target[20_160:].any()
    assert len(copying.launched) > 1
    for (number, _), arguments in copying.launched:
        described = list(struct.iter_unpack("QQIIII", arguments[: 32 * number]))
        assert number <= 127 and all(width * rows <= 64 for _, _, width, rows, _, _ in described)


def test_beside_other_work_large_copies_are_left_to_the_copy_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LARGEST", 64)
    driven: list[int] = []

    class Counted(Memory):
        def copy_all(self, copies: Iterable[tuple[int, int, int, int, int, int]], source: int, stream: int) -> None:
            copies = list(copies)
            driven.extend(rows[2] * rows[3] for rows in copies)
            super().copy_all(copies, source, stream)

    flat, target = numbered(1 << 13), torch.zeros(1 << 13, dtype=torch.uint8)
    sizes = [8, 64, 100, 30, 65] * 4
    begins = [sum(sizes[:number]) for number in range(len(sizes))]
    rows = [Rows(target.data_ptr() + begin, begin, size, 1, 0, 0) for begin, size in zip(begins, sizes, strict=True)]
    for beside, ready, wanted in (
        (False, kernel, []),
        (True, kernel, [100, 65] * 4),
        (True, no_kernel, sizes),
        (False, no_kernel, sizes),
    ):
        driven.clear()
        RowCopies(rows, beside=beside).queue(flat.data_ptr(), Counted(), ready, 0)
        assert driven == wanted
        assert torch.equal(target[: sum(sizes)], flat[: sum(sizes)])
        target.zero_()
    few = RowCopies(rows[:7])
    driven.clear()
    few.queue(flat.data_ptr(), Counted(), kernel, 0)
    assert driven == sizes[:7], "a kernel would not pay"


# --- a read by the lane ----------------------------------------------------------------------------------------------


class Allocation:
    """Memory of this process, as one that a peer has exported and this one has mapped."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory

    def at(self, offset: int, size: int) -> int:
        within(offset, size, self.memory.nbytes)
        return self.memory.data_ptr() + offset


def read(tensors: list[torch.Tensor], copies: Copies, pieces: Any = None) -> list[torch.Tensor | None]:
    """Make copies out of tensors that travel as the lane packs them. ``pieces``: what a descriptor says of them."""
    grouped, packed = packing.pack(tensors)
    mapped: list[Any] = [Allocation(tensor.view(-1).view(torch.uint8)) if tensor.nbytes else None for tensor in packed]
    places = [(b"", 0, tensor.nbytes, piece) for tensor, piece in zip(packed, pieces or grouped, strict=True)]
    shapes = [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
    return lane.CudaIpcLane(())._copy(mapped, places, shapes, copies, CPU, 0, Memory())


def test_packed_tensors_go_each_to_its_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(COPY_ROWS, "on", lambda *_: None)
    monkeypatch.setattr(lane, "driver", Memory)
    tensors = [torch.rand(3), torch.arange(5), torch.rand(2, 4), torch.empty(0), torch.arange(7), torch.rand(1 << 19)]
    wide = torch.zeros(2, 8)
    targets = [torch.zeros(3), None, wide[:, ::2], torch.empty(0), torch.zeros(7).long(), torch.zeros(1 << 19)]
    left = read(tensors, Copies.whole(targets))
    assert left[1] is not None and torch.equal(left[1], tensors[1])
    for tensor, target, rest in zip(tensors, targets, left, strict=True):
        if target is not None:
            assert torch.equal(target if rest is None else rest, tensor)
    assert not wide[:, 1::2].any()
    flat = tensors[5].view(torch.uint8)
    described = [Copy(0, Target.of(targets[0]), 400), Copy(0, Target.of(wide[:, 1:4]), 64, (100, 1))]  # type: ignore[arg-type]
    assert read([flat], Copies(described, [targets[0], wide[:, 1:4]])) == [None, None]
    assert torch.equal(targets[0], tensors[5][100:103])  # type: ignore[arg-type]
    assert torch.equal(wide[:, 1:4], tensors[5][16:216].view(2, 100)[:, :3])


@pytest.mark.parametrize("pieces", [[(0, 1, 2, 3)], [(0, 1, 2, 3, 3)], [(0, 1, 2, 3, -1)], [(0, 1, 2, 3, 9)], [()]])
def test_a_piece_that_lacks_a_tensor_is_refused(monkeypatch: pytest.MonkeyPatch, pieces: Any) -> None:
    monkeypatch.setattr(COPY_ROWS, "on", lambda *_: None)
    monkeypatch.setattr(lane, "driver", Memory)
    targets = [torch.zeros(3) for _ in range(5)]
    with pytest.raises((ValueError, LookupError)):
        read([torch.rand(3) for _ in range(5)], Copies.whole(targets), pieces)
    assert not any(target.any() for target in targets)
