"""Memory for the tensors of one version: laid out as one flat piece for each device, written, and compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from raytorchrpc.lanes.base import SMALL
from raytorchrpc.tensors import host_device_copy
from raytorchrpc.tensors.dtypes import as_copyable

_ALIGN = 64
#: A tensor of this size or more is copied by several threads (bytes).
_LARGE = 8 << 20

#: Allocates host memory that peers can read in place: (bytes) -> a flat uint8 tensor, or None if there is none.
AllocateShared = Callable[[int], torch.Tensor | None]
#: Copies host memory: (target address, source address, bytes).
CopyBytes = Callable[[int, int, int], None]


class TensorSpec(NamedTuple):
    """The dtype, shape and device of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device


def lay_out(specs: Sequence[TensorSpec]) -> tuple[list[int], dict[torch.device, int]]:
    """Return the offset of each tensor in its device's piece of memory, and the size of each piece (bytes).

    Small tensors lie together, after the others, so that a lane can bring them with one copy.
    """
    bytes_of = [math.prod(spec.shape) * spec.dtype.itemsize for spec in specs]
    offsets, sizes = [0] * len(specs), dict.fromkeys((spec.device for spec in specs), 0)
    for place in sorted(range(len(specs)), key=lambda place: bytes_of[place] < SMALL):
        device = specs[place].device
        offsets[place] = sizes[device]
        sizes[device] += (bytes_of[place] + _ALIGN - 1) & -_ALIGN
    return offsets, sizes


def converted_specs(specs: Sequence[TensorSpec], dtype: torch.dtype) -> list[TensorSpec]:
    """Return the specs with floating tensors as ``dtype``; all others become empty."""
    specs = [spec._replace(dtype=dtype) if spec.dtype.is_floating_point else spec for spec in specs]
    return [spec if spec.dtype is dtype else spec._replace(shape=(0,)) for spec in specs]


class VersionMemory:
    """Memory for tensors of these specs: one piece for each device."""

    def __init__(self, specs: Sequence[TensorSpec], allocate_shared: AllocateShared) -> None:
        offsets, sizes = lay_out(specs)
        self.whole: torch.Tensor | None = None
        """All of the memory as bytes, if it is one piece that peers can read in place."""
        pieces: dict[torch.device, torch.Tensor] = {}
        with torch.inference_mode(False):
            for device, size in sizes.items():
                shared = allocate_shared(size) if device.type == "cpu" else None
                pieces[device] = torch.empty(size, dtype=torch.uint8, device=device) if shared is None else shared
                if len(sizes) == 1 and (shared is not None or device.type == "cuda"):
                    self.whole = pieces[device]
            self.tensors = [_view(pieces[spec.device], at, spec) for spec, at in zip(specs, offsets, strict=True)]
        self.pieces = list(pieces.values())
        self.changed: list[int | None] = [None] * len(specs)
        """For each tensor, the version in which the content that is here was new."""
        self.own_reads: list[Callable[[], None]] = []
        """Reads by this process's GPUs: the thread that writes next calls these first, and so waits for the reads."""


def _view(piece: torch.Tensor, offset: int, spec: TensorSpec) -> torch.Tensor:
    size = math.prod(spec.shape) * spec.dtype.itemsize
    if not size:
        return torch.empty(spec.shape, dtype=spec.dtype, device=spec.device)
    return piece[offset : offset + size].view(spec.dtype).view(spec.shape)


def copy_tensors(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], copy_bytes: CopyBytes) -> None:
    """Copy each source to its target; GPU copies are queued on this thread's streams. No tensor requires grad."""
    others: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    for target, source in zip(targets, sources, strict=True):
        if target.nbytes >= _LARGE and _has_same_bytes(target, source):
            copy_bytes(target.data_ptr(), source.data_ptr(), target.nbytes)
        else:
            others[0].append(target)
            others[1].append(source)
    targets, sources = others
    # Tensors made under inference mode can only be written under it.
    with torch.inference_mode() if any(map(torch.Tensor.is_inference, targets)) else torch.no_grad():
        host_device_copy.copy_into(targets, sources)


def _has_same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether copying the bytes copies the tensor."""
    if one.dtype is not other.dtype or not (one.is_cpu and other.is_cpu):
        return False
    return all(tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj() for tensor in (one, other))


def equal_bits(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[bool]:
    """For each pair of tensors of one spec, return whether they are equal bit for bit. Blocks for GPUs."""
    equal = [False] * len(ones)
    on_gpu: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    with torch.no_grad():
        for place, (one, other) in enumerate(zip(ones, others, strict=True)):
            if one.device.type == "cpu":
                equal[place] = torch.equal(as_copyable(one), as_copyable(other))
            else:
                differs = (as_copyable(one) != as_copyable(other)).any()
                on_gpu.setdefault(one.device, []).append((place, differs))
        for found in on_gpu.values():
            for (place, _), differs in zip(found, torch.stack([flag for _, flag in found]).tolist(), strict=True):
                equal[place] = not differs
    return equal
