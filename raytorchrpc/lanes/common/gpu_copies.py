"""Copies out of a peer's mapped tensors: strided regions as rows, and many rows as few kernels.

The driver takes 5 to 20 microseconds to queue a copy, and the GPU 10 to begin it. Between two H200, 365 copies of a
model of 0.6 GB took 1.8 ms to queue by the driver, and as kernels 0.08 ms. On another stream than the default one,
large copies are left to the copy engines: what the program computes beside them needs the GPU's processors (a training
loop beside copies of 2.1 GB, 20 times a second, took 12 % longer with kernels alone).
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy
import torch

from raytorchrpc.lanes.base import SMALL, Copies, Copy, Pieces
from raytorchrpc.lanes.common import packing
from raytorchrpc.process.cuda_driver import MAX_PITCH, Driver, Kernel, KernelSource
from raytorchrpc.tensors.dtypes import Dimension, Shape, collapse, span_of, strided_span, view_at, within


class Rows(NamedTuple):
    """One copy: ``number`` rows of ``width`` contiguous bytes."""

    target: int
    """Where the first row goes: its address, or the bytes from the begin of a region."""
    source: int
    """Where it begins, in bytes from the begin of the flat tensor, or of a region."""
    width: int
    number: int
    source_pitch: int
    """Bytes from one row to the next, at least ``width``; ``target_pitch`` likewise."""
    target_pitch: int


# --- strided regions as rows -----------------------------------------------------------------------------------------

#: Shorter rows are assumed to take longer to copy alone than with everything between them (bytes; not measured).
_NARROW = 32
#: Everything between the rows is only copied if the span of the region has at most this many times its bytes.
_DENSE = 4


def rows_of(
    shape: tuple[int, ...], itemsize: int, source: tuple[int, ...], target: tuple[int, ...], max_pitch: int
) -> tuple[Rows, ...] | None:
    """Return the copies that bring a strided region to a strided target; none for an empty one.

    ``source``, ``target``: the strides, in elements of ``itemsize`` bytes. ``max_pitch``: largest for ``Rows``. Returns
    None if it is better to copy the whole span of the region to a temporary, and from there with a strided copy.
    """
    if 0 in shape:
        return ()
    width, dimensions = collapse(shape, itemsize, source, target)
    row = Dimension(1, width, width)
    for dimension in dimensions:
        pitches = dimension.source, dimension.target
        if dimension.extent > row.extent and min(pitches) >= width and max(pitches) <= max_pitch:
            row = dimension
    if row.extent > 1:
        dimensions.remove(row)
    size = math.prod(shape) * itemsize
    needed = math.prod(dimension.extent for dimension in dimensions)
    slow = (width < _NARROW and size >= SMALL) or (needed > 1 and size < needed * SMALL)
    if slow and span_of(shape, source) * itemsize <= _DENSE * size:
        return None
    places = [(0, 0)]
    for extent, here, there in dimensions:
        places = [(begin + place * here, end + place * there) for begin, end in places for place in range(extent)]
    return tuple(Rows(end, begin, width, row.extent, row.source, row.target) for begin, end in places)


# --- rows as kernels -------------------------------------------------------------------------------------------------

#: Fewer copies are queued by the driver.
_MANY = 8
_THREADS, _BLOCKS = 512, 2
#: Copies of one kernel, which gets them as its argument: CUDA allows 4 KiB.
_AT_ONCE = 127
#: Larger copies are divided, so that all blocks have as much to do, or left to the copy engines (bytes).
_LARGEST = 4 << 20

_ENDS, _SIZES, _FLAT = struct.Struct("@QQ"), struct.Struct("@IIII"), struct.Struct("@Q")
_BATCH = _AT_ONCE * (_ENDS.size + _SIZES.size)

_COPY = """
struct Rows { unsigned long long target, offset; unsigned width, number, source_pitch, target_pitch; };

template <class Word> __device__ void copy(const Rows& rows, char* target, const char* source) {
    const int AHEAD = 4;  // loads of one thread that are under way at once
    const unsigned words = rows.width / sizeof(Word), total = words * rows.number;
    const unsigned step = blockDim.x * gridDim.y;
    for (unsigned first = blockIdx.y * blockDim.x + threadIdx.x; first < total; first += AHEAD * step) {
        Word loaded[AHEAD];
        #pragma unroll
        for (int ahead = 0; ahead < AHEAD; ++ahead) {
            const unsigned at = first + ahead * step, row = at / words, column = at - row * words;
            if (at < total)
                loaded[ahead] = reinterpret_cast<const Word*>(source + row * size_t(rows.source_pitch))[column];
        }
        #pragma unroll
        for (int ahead = 0; ahead < AHEAD; ++ahead) {
            const unsigned at = first + ahead * step, row = at / words, column = at - row * words;
            if (at < total)
                reinterpret_cast<Word*>(target + row * size_t(rows.target_pitch))[column] = loaded[ahead];
        }
    }
}

__device__ void copy_one(const Rows& rows, const char* flat) {
    char* target = reinterpret_cast<char*>(rows.target);
    const char* source = flat + rows.offset;
    const unsigned pitches = rows.number > 1 ? rows.source_pitch | rows.target_pitch : 0;
    const unsigned all = unsigned(rows.target) | unsigned(size_t(source)) | rows.width | pitches;
    if (all % 16 == 0) copy<uint4>(rows, target, source);
    else if (all % 8 == 0) copy<uint2>(rows, target, source);
    else if (all % 4 == 0) copy<unsigned>(rows, target, source);
    else if (all % 2 == 0) copy<unsigned short>(rows, target, source);
    else copy<unsigned char>(rows, target, source);
}
"""

COPY_ROWS = KernelSource(
    "copy_rows",
    _COPY
    + """
struct Batch { Rows rows[127]; };

extern "C" __global__ void copy_rows(const __grid_constant__ Batch batch, const char* flat) {
    copy_one(batch.rows[blockIdx.x], flat);
}
""",
)

#: For more of them than an argument holds: the rows are in memory of the GPU.
COPY_LISTED = KernelSource(
    "copy_listed",
    _COPY
    + """
extern "C" __global__ void copy_listed(const Rows* rows, const char* flat) {
    copy_one(rows[blockIdx.x], flat);
}
""",
)

#: ``Rows`` of the kernels.
_LISTED = numpy.dtype([*((name, "u8") for name in ("target", "offset")), *((name, "u4") for name in Rows._fields[2:])])


def queue_pieces(
    pieces: Pieces,
    begins: numpy.ndarray,
    device: torch.device,
    driver: Driver,
    kernel: Callable[[], Kernel | None],
    stream: int,
) -> None:
    """Queue the copies of a gather on ``stream``, the current one of ``device``: one kernel for all of one width.

    ``begins``: addresses of the exposed tensors. ``kernel``: COPY_LISTED, as for ``RowCopies.queue``.
    """
    source, offset, target, width = pieces
    steps = numpy.arange(0, width, _LARGEST)
    listed = numpy.zeros((len(target), len(steps)), _LISTED)
    listed["target"], listed["offset"] = target[:, None] + steps, (begins[source] + offset)[:, None] + steps
    listed["width"], listed["number"] = numpy.minimum(width - steps, _LARGEST), 1
    if (copy := kernel()) is None:
        driver.copy_all(listed.ravel().tolist(), 0, stream)
    elif listed.size:
        table = torch.from_numpy(listed.view(numpy.uint8)).to(device)  # its memory is used again on this stream alone
        copy.launch((listed.size, _BLOCKS), _THREADS, _ENDS.pack(table.data_ptr(), 0), stream)


class RowCopies:
    """Copies of rows from one memory. Holds addresses, and none of the memory."""

    def __init__(self, rows: Iterable[Rows] = (), *, beside: bool = False) -> None:
        """``beside``: leave large ones to the copy engines, because the GPU has other work."""
        self._beside, self.rows = beside, list(rows)
        """Changed by nobody once they have been queued."""
        self._kernels: tuple[list[tuple[int, bytes]], list[Rows]] | None = None
        """Of each kernel: how many copies, and its argument; and what is left to the copy engines."""

    def queue(self, flat: int, driver: Driver, kernel: Callable[[], Kernel | None], stream: int) -> None:
        """Queue them on ``stream``.

        ``flat``: address from which their sources count. ``kernel``: COPY_ROWS for the GPU whose context is current, if
        that is compiled.
        """
        copy = kernel() if len(self.rows) >= _MANY else None
        if copy is None:
            driver.copy_all(self.rows, flat, stream)
            return
        if self._kernels is None:
            self._kernels = self._joined()
        batches, large = self._kernels
        for number, batch in batches:
            copy.launch((number, _BLOCKS), _THREADS, batch + _FLAT.pack(flat), stream)
        driver.copy_all(large, flat, stream)

    def _joined(self) -> tuple[list[tuple[int, bytes]], list[Rows]]:
        here, large = self.rows, list[Rows]()
        if self._beside:
            large = [rows for rows in here if rows.width * rows.number > _LARGEST]
            here = [rows for rows in here if rows.width * rows.number <= _LARGEST]
        if len(here) < _MANY:
            return [], self.rows
        packed = [
            _ENDS.pack(target + end, offset + begin) + rest
            for target, offset, *sizes in here
            for end, begin, rest in _divided(*sizes, _LARGEST)
        ]
        batches = [packed[at : at + _AT_ONCE] for at in range(0, len(packed), _AT_ONCE)]
        return [(len(batch), b"".join(batch).ljust(_BATCH, b"\0")) for batch in batches], large


@functools.lru_cache(1024)  # the layers of a model are alike
def _divided(
    width: int, number: int, source_pitch: int, target_pitch: int, most: int
) -> Sequence[tuple[int, int, bytes]]:
    """Divide rows into copies of at most ``most`` bytes each: where they begin in target and source, and their sizes as
    the kernel has them.
    """
    if number > 1 and width <= most:
        at_once, pitches = most // width, (source_pitch, target_pitch)
        return [
            (row * target_pitch, row * source_pitch, _SIZES.pack(width, min(at_once, number - row), *pitches))
            for row in range(0, number, at_once)
        ]
    pieces = [(at, _SIZES.pack(min(most, width - at), 1, 0, 0)) for at in range(0, width, most)]
    return [(row * target_pitch + at, row * source_pitch + at, sizes) for row in range(number) for at, sizes in pieces]


# --- the copies of a read --------------------------------------------------------------------------------------------


class Scatter(NamedTuple):
    """How to make the copies of one read on a GPU. Holds addresses, and none of the memory."""

    direct: RowCopies
    alone: list[int]
    """Copies that need a temporary each, by index."""
    origins: Sequence[int]
    """Where each exported tensor begins, in bytes from the first of them: one kernel copies out of many."""

    @classmethod
    def of(
        cls,
        copies: Copies,
        sizes: Sequence[int],
        device: torch.device,
        beside: bool = False,
        origins: Sequence[int] = (0,),
    ) -> Scatter:
        """``sizes``: of the exported tensors (bytes). ``beside``: see RowCopies. Raises OutOfBounds."""
        scatter = cls(RowCopies(beside=beside), [], origins)
        for index, (source, target, offset, strides) in enumerate(copies):
            if target is None:
                scatter.alone.append(index)
                continue
            span, rows = _region(target.shape, target.dtype.itemsize, strides, target.strides)
            within(offset, span, sizes[source])
            if rows is None or target.device != device:
                scatter.alone.append(index)
                continue
            offset += origins[source]
            for end, begin, *rest in rows:
                scatter.direct.rows.append(Rows(target.address + end, offset + begin, *rest))
        return scatter

    def queue(
        self,
        copies: Copies,
        first: int,
        shapes: Sequence[Shape],
        device: torch.device,
        driver: Driver,
        kernel: Callable[[], Kernel | None],
        stream: int,
    ) -> list[tuple[int, torch.Tensor]]:
        """Queue it on ``stream``, the current one of ``device``. Returns what arrives in temporaries, by the copy.

        ``copies``: those for which it was made. ``first``: address from which ``origins`` count. ``shapes``: dtypes and
        shapes of the exported tensors. ``kernel``: see ``RowCopies``.
        """
        self.direct.queue(first, driver, kernel, stream)
        arrived = list[tuple[int, torch.Tensor]]()
        for index in self.alone:
            copy = copies[index]
            flat = first + self.origins[copy.source]
            arrived.append((index, _by_temporary(copy, flat, shapes[copy.source], device, driver, stream)))
        return arrived


@functools.lru_cache(8192)  # the layers of a model are alike
def _region(
    shape: tuple[int, ...], itemsize: int, strides: tuple[int, ...] | None, goal: tuple[int, ...]
) -> tuple[int, tuple[Rows, ...] | None]:
    """The bytes from the first to the last of a region's elements, and the rows; None: better by way of a temporary.

    ``strides``: see Copy. ``goal``: of where it goes. Raises OutOfBounds for negative strides.
    """
    contiguous, size = packing.layout(shape)
    span = size * itemsize if strides is None else strided_span(shape, strides, itemsize)
    return span, rows_of(shape, itemsize, contiguous if strides is None else strides, goal, MAX_PITCH)


def _by_temporary(
    copy: Copy, flat: int, whole: Shape, device: torch.device, driver: Driver, stream: int
) -> torch.Tensor:
    """Queue a copy to a temporary on ``device``. Returns what the target is to receive there."""
    _, target, offset, strides = copy
    dtype, shape = whole if target is None else (target.dtype, target.shape)
    contiguous = packing.layout(shape)[0]
    is_elsewhere = target is None or target.device != device
    rows = _region(shape, dtype.itemsize, strides, contiguous)[1] if is_elsewhere else None
    if rows is None:  # very many or very short rows
        strides = strides or contiguous
        span = torch.empty(span_of(shape, strides) * dtype.itemsize, dtype=torch.uint8, device=device)
        driver.copy(span.data_ptr(), flat + offset, span.nbytes, stream)
        return view_at(span, 0, (dtype, shape), strides)
    arrived = torch.empty(shape, dtype=dtype, device=device)
    begin, end = flat + offset, arrived.data_ptr()
    driver.copy_all([row._replace(target=end + row.target) for row in rows], begin, stream)
    return arrived
