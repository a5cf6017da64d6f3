"""Conversions of published tensors: to another floating dtype, or to fp8 with a scale for each block.

A conversion has a name, which messages carry: the name of a dtype, or one of the two that ``BlockFp8`` has.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from raytorchrpc.errors import ConfigurationError
from raytorchrpc.patterns.weights import quantize_kernel
from raytorchrpc.patterns.weights.shards import Box
from raytorchrpc.tensors.dtypes import DTYPE_NAMES, DTYPES

FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max
#: The dtypes that ``BlockFp8`` converts, by name.
SOURCES = frozenset({"bfloat16", "float16", "float32"})

_SCALES = "/scales"
_NAME = re.compile(r"float8_e4m3fn/([1-9]\d{0,8})x([1-9]\d{0,8})(/scales)?")

#: Elements that are converted at once. They bound the temporary memory: 4 bytes for each, on a GPU about 12.
_AT_ONCE = {"cpu": 1 << 20}
_AT_ONCE_ON_GPU = 1 << 24


@dataclass(frozen=True)
class BlockFp8:
    """Converts matrices to fp8 with one float32 scale for each block, for ``WeightStore.pull(convert=BlockFp8())``.

    Wherever the model has a ``torch.float8_e4m3fn`` matrix, and the published one is bfloat16, float16 or float32, the
    publisher converts it, once for each version. A block's scale is its largest magnitude divided by 448; each element
    is divided by the scale, and then rounded. Element times scale is the published value again, rounded. Such is the
    layout of DeepSeek-V3, and of vLLM. All other tensors are converted as by ``convert=True``.

    A block whose largest magnitude is below 5.3e-36 has scale 1 and becomes zeros.
    NaN and infinities become NaN; the scale of their block is that of its finite elements.

    Attributes:
        block: rows and columns of a block. Blocks at the end of a row or column are smaller if need be.
        suffix: the model's scales for ``name`` are the tensor ``name + suffix``: float32, with one element for each
            block, so of shape ``(ceil(rows / block[0]), ceil(columns / block[1]))``.

    Examples:
        >>> rtr.BlockFp8(block=(64, 64)).suffix
        '_scale_inv'
    """

    block: tuple[int, int] = (128, 128)
    suffix: str = "_scale_inv"

    def __post_init__(self) -> None:
        given: Any = self.block
        block = tuple(given) if isinstance(given, Sequence) else ()
        if len(block) != 2 or not all(type(extent) is int and 0 < extent < 10**9 for extent in block):
            raise ConfigurationError(
                f"block={self.block!r} has to be two positive numbers: rows and columns of a block"
            )
        if not self.suffix or not isinstance(self.suffix, str):
            raise ConfigurationError(f"suffix={self.suffix!r} has to be a name's end, such as '_scale_inv'")
        object.__setattr__(self, "block", block)

    @property
    def values(self) -> str:
        """The name of the conversion to fp8."""
        return f"{DTYPE_NAMES[FP8]}/{self.block[0]}x{self.block[1]}"

    @property
    def scales(self) -> str:
        """The name of the conversion that gives the scales."""
        return self.values + _SCALES

    def __str__(self) -> str:
        return f"{self.block[0]} x {self.block[1]}"


#: The argument ``convert`` of a pull.
Convert = bool | BlockFp8


def converts_blocks(convert: Convert) -> bool:
    """Whether this argument of a pull is a ``BlockFp8``. Raises ConfigurationError if it is no such argument at all."""
    given: Any = convert
    if isinstance(given, type):
        raise ConfigurationError("convert=BlockFp8 is the class: pass convert=BlockFp8()")
    if given is not None and not isinstance(given, (bool, BlockFp8)):
        raise ConfigurationError(
            f"convert={given!r} has to be True, which converts to the dtype of each tensor of the model, or BlockFp8()"
        )
    return isinstance(convert, BlockFp8)


def blocks_in(shape: Sequence[int], block: tuple[int, int]) -> tuple[int, ...]:
    """Return how many blocks a matrix has in each dimension."""
    return tuple(-(-extent // most) for extent, most in zip(shape, block, strict=True))


def scales_of(box: Box, whole: Sequence[int], block: tuple[int, int]) -> Box | None:
    """Return which scales belong to a box of a matrix of shape ``whole``; None if the box cuts a block."""
    begin, end = blocks_in(box.offset, block), blocks_in(box.end, block)
    for first, last, extent, most in zip(box.offset, box.end, whole, block, strict=True):
        if box.size and (first % most or (last % most and last != extent)):
            return None
    return Box(begin, tuple(last - first for first, last in zip(begin, end, strict=True)))


def converted(dtype: torch.dtype, shape: tuple[int, ...], name: str) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return the dtype and shape of a tensor after a conversion; shape (0,) if the conversion does not apply to it."""
    block = _NAME.fullmatch(name)
    if block is None:
        to = DTYPES[name]
        return to if dtype.is_floating_point else dtype, shape if dtype.is_floating_point or dtype is to else (0,)
    to = torch.float32 if block[3] else FP8
    if DTYPE_NAMES[dtype] not in SOURCES or len(shape) != 2:
        return to, (0,)
    return to, blocks_in(shape, (int(block[1]), int(block[2]))) if block[3] else shape


def made_together(name: str) -> tuple[str, ...]:
    """Return the names of the conversions that one computation makes, in the order in which ``convert`` takes them."""
    if _NAME.fullmatch(name) is None:
        return (name,)
    values = name.removesuffix(_SCALES)
    return values, values + _SCALES


def convert(name: str, source: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
    """Convert a tensor into those of ``made_together(name)``. On a GPU, queued on this thread's current stream."""
    block = _NAME.fullmatch(name)
    with torch.inference_mode(False), torch.no_grad():
        if block is None:
            targets[0].copy_(source)
        else:
            _quantize(source, targets[0], targets[1], (int(block[1]), int(block[2])))


def _quantize(source: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> None:
    if not source.numel() or quantize_kernel.quantize(source, values, scales, block):
        return
    rows, columns = map(min, block, source.shape)
    width = source.shape[1]
    at_once = _AT_ONCE.get(source.device.type, _AT_ONCE_ON_GPU)
    padded = scales.shape[1] * columns
    step = min(max(1, at_once // (rows * padded)), scales.shape[0])  # in rows of blocks
    buffer = source.new_empty((step * rows, padded), dtype=torch.float32)
    for first in range(0, scales.shape[0], step):
        last = min(first + step, scales.shape[0])
        piece, given = buffer[: (last - first) * rows], source[first * rows : last * rows]
        if given.shape != piece.shape:
            piece.zero_()
        kept = piece[: given.shape[0], :width].copy_(given)
        scale = _scaled(piece.view(last - first, rows, scales.shape[1], columns))
        values[first * rows : last * rows].copy_(kept)
        scales[first:last].copy_(scale)


def _scaled(blocks: torch.Tensor) -> torch.Tensor:
    """Divide blocks (row, row within, column, column within) by their scales, in place, and return these."""
    largest = None if blocks.is_cuda else torch.maximum(blocks.amax(3), -blocks.amin(3)).amax(1)
    if largest is None or not bool(torch.isfinite(largest).all()):  # to look would have the CPU wait for the GPU
        finite = torch.isfinite(blocks)
        largest = blocks.masked_fill(~finite, 0.0).abs_().amax(3).amax(1)
        blocks.masked_fill_(~finite, float("nan"))  # torch casts infinities to 448, or to NaN
    # Dividing by a number on the CPU would multiply by its reciprocal on a GPU, and round differently.
    scale = largest / largest.new_full((1,), _LARGEST)
    scale.masked_fill_(scale < torch.finfo(torch.float32).tiny, 1.0)
    blocks /= scale[:, None, :, None]
    return scale
