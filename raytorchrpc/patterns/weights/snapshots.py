"""Copies of a model's tensors as they were at one moment, and who reads them. Their memory is used again."""

from __future__ import annotations

import ctypes
import itertools
import math
import secrets
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch

from raytorchrpc.errors import NotFound
from raytorchrpc.lanes.base import SMALL
from raytorchrpc.tensors import host_device_copy
from raytorchrpc.tensors.cuda_streams import handoff_streams, nothing
from raytorchrpc.tensors.dtypes import DTYPES, as_copyable

_ALIGN = 64
#: Pieces of memory that are kept for the next snapshots of one kind.
_SPARE = 2

#: From here on a tensor is worth several threads (bytes).
_LARGE = 8 << 20

#: Makes host memory that others can read where it is; None if there is no such.
Lend = Callable[[int], torch.Tensor | None]
#: Copies so many bytes to an address from another.
Move = Callable[[int, int, int], None]


class Kind(NamedTuple):
    """What a tensor is."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device


def laid_out(kinds: Sequence[Kind]) -> tuple[list[int], dict[torch.device, int]]:
    """Where each begins in its device's piece of a ``Flat``, and how long the pieces are (bytes).

    Small ones lie together behind the others, so that a lane can bring them at once.
    """
    bytes_of = [math.prod(kind.shape) * kind.dtype.itemsize for kind in kinds]
    offsets, sizes = [0] * len(kinds), dict.fromkeys((kind.device for kind in kinds), 0)
    for place in sorted(range(len(kinds)), key=lambda place: bytes_of[place] < SMALL):
        device = kinds[place].device
        offsets[place] = sizes[device]
        sizes[device] += (bytes_of[place] + _ALIGN - 1) & -_ALIGN
    return offsets, sizes


def converted_kinds(kinds: Sequence[Kind], dtype: torch.dtype) -> list[Kind]:
    """The floating ones as that dtype; the others are empty there."""
    kinds = [kind._replace(dtype=dtype) if kind.dtype.is_floating_point else kind for kind in kinds]
    return [kind if kind.dtype is dtype else kind._replace(shape=(0,)) for kind in kinds]


class Flat:
    """Memory for tensors of these kinds: one piece for each device."""

    def __init__(self, kinds: Sequence[Kind], lend: Lend) -> None:
        offsets, sizes = laid_out(kinds)
        self.whole: torch.Tensor | None = None
        """All of it as bytes, where that is one piece which peers read where it is."""
        pieces: dict[torch.device, torch.Tensor] = {}
        with torch.inference_mode(False):
            for device, size in sizes.items():
                lent = lend(size) if device.type == "cpu" else None
                pieces[device] = torch.empty(size, dtype=torch.uint8, device=device) if lent is None else lent
                if len(sizes) == 1 and (lent is not None or device.type == "cuda"):
                    self.whole = pieces[device]
            self.tensors = [_at(pieces[kind.device], offset, kind) for kind, offset in zip(kinds, offsets, strict=True)]
        self.pieces = list(pieces.values())
        self.stamps: list[int | None] = [None] * len(kinds)
        """For each tensor, which state of it is there: the version that it was new in."""
        self.uses: list[Callable[[], None]] = []
        """Of this process's own GPUs: to be called on the thread that writes here next, which then comes after them."""


def _at(piece: torch.Tensor, offset: int, kind: Kind) -> torch.Tensor:
    size = math.prod(kind.shape) * kind.dtype.itemsize
    if not size:
        return torch.empty(kind.shape, dtype=kind.dtype, device=kind.device)
    return piece[offset : offset + size].view(kind.dtype).view(kind.shape)


def write(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], move: Move) -> None:
    """Copy each; on GPUs queued on this thread's streams. None requires grad."""
    others: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    for target, source in zip(targets, sources, strict=True):
        if target.nbytes >= _LARGE and _as_they_lie(target, source):
            move(target.data_ptr(), source.data_ptr(), target.nbytes)
        else:
            others[0].append(target)
            others[1].append(source)
    targets, sources = others
    # Tensors made under inference mode can only be written under it.
    with torch.inference_mode() if any(map(torch.Tensor.is_inference, targets)) else torch.no_grad():
        host_device_copy.copy_into(targets, sources)


def _as_they_lie(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype is not other.dtype or not (one.is_cpu and other.is_cpu):
        return False
    return all(tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj() for tensor in (one, other))


def equal(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[bool]:
    """For each pair of the same kind, whether they are alike bit for bit. Waits for GPUs."""
    alike = [False] * len(ones)
    on_gpu: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    with torch.no_grad():
        for place, (one, other) in enumerate(zip(ones, others, strict=True)):
            if one.device.type == "cpu":
                alike[place] = torch.equal(as_copyable(one), as_copyable(other))
            else:
                differs = (as_copyable(one) != as_copyable(other)).any()
                on_gpu.setdefault(one.device, []).append((place, differs))
        for found in on_gpu.values():
            for (place, _), differs in zip(found, torch.stack([flag for _, flag in found]).tolist(), strict=True):
                alike[place] = not differs
    return alike


class Snapshot:
    """One version. Its tensors do not change while it is on the shelf or somebody reads it."""

    def __init__(self, version: int, kinds: Sequence[Kind], flat: Flat, changed: Sequence[int], shelf: Shelf) -> None:
        """``changed``: for each tensor, the version that it was new in. Made by the thread that wrote ``flat``."""
        self.version, self.kinds, self.flat, self.changed = version, kinds, flat, changed
        self.readers = 0
        self.shelved = True
        self._shelf = shelf
        self._converting = threading.Lock()
        self.converted: dict[torch.dtype, Flat] = {}
        self._make_current = [handoff_streams(flat.pieces)]

    def make_current(self) -> None:
        """On the thread that is going to use the tensors."""
        for make_current in tuple(self._make_current):
            make_current()

    def tensors(self, wanted: Sequence[tuple[int, str | None]]) -> list[torch.Tensor]:
        """Those of these numbers, each as a dtype of that name; None: as it is. Converts each once."""
        self.make_current()
        made: list[torch.Tensor] = []
        with self._converting:
            found = [self._tensor(number, name, made) for number, name in wanted]
            if made:
                self._make_current.append(handoff_streams(made))
                self._used()
        return found

    def wholes(self, kind: str, wanted: Sequence[tuple[int, str | None]]) -> list[torch.Tensor]:
        """Memory on that kind of device that holds these, one flat tensor for each dtype's name (None: as they are), in
        the order in which the names appear. None of it if it cannot all be told by its place in one piece.
        """
        self.tensors(wanted)
        names = dict.fromkeys(name for _, name in wanted)
        flats = [self.flat if name is None else self.converted[DTYPES[name]] for name in names]
        found = [flat.whole for flat in flats if flat.whole is not None and flat.whole.device.type == kind]
        return found if len(found) == len(flats) else []

    def whole(self, kind: str) -> list[torch.Tensor]:
        """Likewise, all of them as they are."""
        whole = self.flat.whole
        if whole is None or whole.device.type != kind:
            return []
        self.make_current()
        return [whole]

    def read(self, wanted: Sequence[tuple[int, str | None]], targets: Sequence[torch.Tensor]) -> None:
        """Copy them to tensors of this process."""
        write(targets, self.tensors(wanted), self._shelf.move)
        self._used()

    def _used(self) -> None:
        if any(piece.is_cuda for piece in self.flat.pieces):
            self.flat.uses.append(handoff_streams(self.flat.pieces))

    def _tensor(self, number: int, name: str | None, made: list[torch.Tensor]) -> torch.Tensor:
        tensor = self.flat.tensors[number]
        if name is None or DTYPES[name] is tensor.dtype:
            return tensor
        dtype = DTYPES[name]
        flat = self.converted.get(dtype)
        if flat is None:
            flat = self.converted[dtype] = self._shelf.memory(self.kinds, dtype)
        target = flat.tensors[number]
        if flat.stamps[number] != self.changed[number]:
            with torch.inference_mode(False), torch.no_grad():
                target.copy_(tensor)
            flat.stamps[number] = self.changed[number]
            made.append(target)
        return target


def _move(target: int, source: int, size: int) -> None:
    ctypes.memmove(target, source, size)


class Shelf:
    """Snapshots, their memory, and who reads them. Thread-safe."""

    def __init__(
        self, lend: Lend, at: Callable[[float, Callable[[], None]], Callable[[], None]], move: Move = _move
    ) -> None:
        """``at``: see workers.Deadlines."""
        self._lend, self._at, self.move = lend, at, move
        self._lock = threading.Lock()
        self._leases: dict[int, tuple[Snapshot, int, Callable[[], None]]] = {}
        # A number that another process of this member, or another object, gave out is none of these.
        self._numbers = itertools.count(1 + secrets.randbits(48))
        self._spare: dict[Hashable, list[Flat]] = {}

    def memory(self, kinds: Sequence[Kind], dtype: torch.dtype | None = None) -> Flat:
        """For tensors of these kinds; ``dtype``: for the floating ones among them, converted to it."""
        with self._lock:
            spare = self._spare.get((tuple(kinds), dtype))
            if spare:
                return spare.pop()
        return Flat(kinds if dtype is None else converted_kinds(kinds, dtype), self._lend)

    def forget_memory(self) -> None:
        """What is kept for the next: they are of other kinds."""
        with self._lock:
            self._spare.clear()

    def keep_memory(self, kinds: Sequence[Kind], flat: Flat, dtype: torch.dtype | None = None) -> None:
        """For the next."""
        with self._lock:
            self._keep(kinds, flat, dtype)

    def _keep(self, kinds: Sequence[Kind], flat: Flat, dtype: torch.dtype | None) -> None:
        spare = self._spare.setdefault((tuple(kinds), dtype), [])
        if len(spare) < _SPARE:
            spare.append(flat)

    # --- readers -------------------------------------------------------------------------------------------------

    def lease(self, snapshot: Snapshot, rank: int, until: float | None) -> int:
        """Somebody reads it until ``release``, or ``until`` (``time.monotonic``). Under whatever keeps it shelved.

        ``until`` None: without a limit, for a thread of this process, which may stand still for any time.
        """
        with self._lock:
            number = next(self._numbers)
            snapshot.readers += 1
            prevent = nothing if until is None else self._at(until, lambda: self.release(number))
            self._leases[number] = (snapshot, rank, prevent)
        return number

    def leases_of(self, rank: int) -> set[int]:
        """Of that member."""
        return {number for number, lease in list(self._leases.items()) if lease[1] == rank}

    def leased(self, number: int) -> Snapshot:
        """Raises NotFound."""
        lease = self._leases.get(number)
        if lease is None:
            raise NotFound("these weights were kept for this pull until its time was over, and let go")
        return lease[0]

    def release(self, number: int) -> None:
        """It has been read. Idempotent."""
        with self._lock:
            lease = self._leases.pop(number, None)
            if lease is None:
                return
            snapshot, _, prevent = lease
            snapshot.readers -= 1
            self._let_go(snapshot)
        prevent()

    def take_off(self, snapshot: Snapshot) -> None:
        """Nobody begins to read it any more."""
        with self._lock:
            snapshot.shelved = False
            self._let_go(snapshot)

    def _let_go(self, snapshot: Snapshot) -> None:
        if not snapshot.shelved and not snapshot.readers:
            self._keep(snapshot.kinds, snapshot.flat, None)
            for dtype, flat in snapshot.converted.items():
                self._keep(snapshot.kinds, flat, dtype)
            snapshot.converted = {}

    @property
    def readers(self) -> int:
        """Under way."""
        return len(self._leases)
