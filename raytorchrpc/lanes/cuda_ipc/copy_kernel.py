"""Many copies as few kernels: the driver takes 5 to 20 microseconds to queue a copy, and the GPU 10 to begin it.

Between two H200, 365 copies of a model of 0.6 GB took 1.8 ms to queue by the driver, and as kernels 0.08 ms. On another
stream than the default one, large copies are left to the copy engines: what the program computes beside them needs the
GPU's processors (a training loop beside copies of 2.1 GB, 20 times a second, took 12 % longer with kernels alone).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence

from raytorchrpc.process.cuda_driver import Driver, Kernel, KernelSource

#: Fewer copies are queued by the driver.
_MANY = 8
_THREADS, _BLOCKS = 512, 4
#: Copies of one kernel, which gets them as its argument: CUDA allows 4 KiB.
_AT_ONCE = 127
#: Larger copies are divided, so that all blocks have as much to do, or left to the copy engines (bytes).
_LARGEST = 4 << 20

#: One copy: target's address, offset in the flat tensor, width, number of rows, pitches of source and target.
Rows = tuple[int, int, int, int, int, int]
_ROWS, _FLAT = struct.Struct("@QQIIII"), struct.Struct("@Q")
_BATCH = _AT_ONCE * _ROWS.size

COPY_ROWS = KernelSource(
    "copy_rows",
    """
struct Rows { unsigned long long target, offset; unsigned width, number, source_pitch, target_pitch; };
struct Batch { Rows rows[127]; };

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

extern "C" __global__ void copy_rows(const __grid_constant__ Batch batch, const char* flat) {
    const Rows& rows = batch.rows[blockIdx.x];
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
""",
)


class Copies:
    """Copies of rows from a flat tensor. Holds addresses, and none of the memory."""

    def __init__(self, rows: Iterable[Rows] = (), *, beside: bool = False) -> None:
        """``beside``: leave large ones to the copy engines, because the GPU has other work."""
        self._beside, self.rows = beside, list(rows)
        """Changed by nobody once they have been queued."""
        self._kernels: tuple[list[tuple[int, bytes]], list[Rows]] | None = None
        """Of each kernel: how many copies, and its argument; and what is left to the copy engines."""

    def queue(self, flat: int, driver: Driver, kernel: Callable[[], Kernel | None], stream: int) -> None:
        """Queue them on ``stream``.

        ``flat``: address of the flat tensor. ``kernel``: COPY_ROWS for the GPU whose context is current, if that is
        compiled.
        """
        if self._kernels is None:
            self._kernels = self._joined()
        batches, left = self._kernels
        copy = kernel() if batches else None
        if copy is None:
            driver.copy_all(self.rows, flat, stream)
            return
        for number, batch in batches:
            copy.launch((number, _BLOCKS), _THREADS, batch + _FLAT.pack(flat), stream)
        driver.copy_all(left, flat, stream)

    def _joined(self) -> tuple[list[tuple[int, bytes]], list[Rows]]:
        here: list[Rows] = []
        left: list[Rows] = []
        for rows in self.rows:
            (left if self._beside and rows[2] * rows[3] > _LARGEST else here).append(rows)
        if len(here) < _MANY:
            return [], self.rows
        parts = [part for rows in here for part in _divided(rows)]
        return [_packed(parts[at : at + _AT_ONCE]) for at in range(0, len(parts), _AT_ONCE)], left


def _divided(rows: Rows) -> Iterator[Rows]:
    """Copies of at most _LARGEST bytes each, if rows are not longer."""
    target, offset, width, number, source_pitch, target_pitch = rows
    if number > 1 and width <= _LARGEST:
        at_once = _LARGEST // width
        for row in range(0, number, at_once):
            begin, end = offset + row * source_pitch, target + row * target_pitch
            yield end, begin, width, min(at_once, number - row), source_pitch, target_pitch
        return
    for row in range(number):
        begin, end = offset + row * source_pitch, target + row * target_pitch
        for at in range(0, width, _LARGEST):
            yield end + at, begin + at, min(_LARGEST, width - at), 1, 0, 0


def _packed(rows: Sequence[Rows]) -> tuple[int, bytes]:
    return len(rows), b"".join(_ROWS.pack(*each) for each in rows).ljust(_BATCH, b"\0")
