"""Snapshots of tensors that do not change while readers hold leases on them; their memory is used again afterwards.

The tensors of a snapshot lie in one flat piece of memory for each device.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import secrets
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch

from raytorchrpc.errors import NotFound
from raytorchrpc.lanes.base import SMALL
from raytorchrpc.patterns.weights import conversions
from raytorchrpc.patterns.weights.deltas import Deltas, Runs
from raytorchrpc.patterns.weights.deltas import Span as DeltaSpan
from raytorchrpc.patterns.weights.shards import PlaceInWhole, Region, Row, cut
from raytorchrpc.process.completion import nothing
from raytorchrpc.process.locks import Lock, Turn
from raytorchrpc.process.workers import Deadlines
from raytorchrpc.tensors import host_device_copy
from raytorchrpc.tensors.cuda_streams import handoff_streams
from raytorchrpc.tensors.dtypes import DTYPE_NAMES, DTYPES, as_copyable, unrecorded, view_at

_ALIGN = 64
#: A tensor of this size or more is copied by several threads (bytes).
_LARGE = 8 << 20

#: Unused memory is freed after this time, but for one snapshot's if ``SnapshotPool.keeps_spare`` (seconds).
_UNUSED_S = 2.0

#: A tensor of a snapshot: (place in the layout, name of the conversion (None: unconverted); see ``conversions``).
Place = tuple[int, str | None]
Places = Sequence[Place]
#: Where a tensor begins: which of the pieces of its version's memory, and the offset there (bytes).
Span = tuple[int, int]

#: Allocates host memory that peers can read in place: (bytes) -> a flat uint8 tensor, or None if there is none.
AllocateShared = Callable[[int], torch.Tensor | None]
#: Copies host memory: (target address, source address, bytes).
CopyBytes = Callable[[int, int, int], object]


class TensorSpec(NamedTuple):
    """The dtype, shape and device of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Layout(NamedTuple):
    """The tensors that a version has."""

    number: int
    names: tuple[str, ...]
    specs: tuple[TensorSpec, ...]
    places: tuple[PlaceInWhole | None, ...]
    spans: tuple[Span, ...] | None = None
    """Where each tensor begins, if not where ``lay_out`` places it."""

    @property
    def rows(self) -> list[Row]:
        share: Callable[[Any, Any], Any] = {}.setdefault  # the layers of a model are alike: a message has each once
        rows = zip(self.names, self.specs, self.places, strict=True)
        return [
            (name, DTYPE_NAMES[spec.dtype], share(spec.shape, spec.shape), share(place, place))
            for name, spec, place in rows
        ]


def lay_out(kinds: Sequence[tuple[int, torch.device]]) -> tuple[list[int], dict[torch.device, int]]:
    """Of tensors of these bytes on these devices: the offset of each in its device's memory, and the bytes of each
    device. Small tensors lie together.
    """
    offsets, sizes = [0] * len(kinds), dict.fromkeys([device for _, device in kinds], 0)
    for are_small in (False, True):
        for place, (size, device) in enumerate(kinds):
            if (size < SMALL) is are_small:
                offsets[place] = sizes[device]
                sizes[device] += (size + _ALIGN - 1) & -_ALIGN
    return offsets, sizes


def converted_specs(specs: Sequence[TensorSpec], name: str) -> list[TensorSpec]:
    """Return the specs of the tensors after a conversion; those to which it does not apply become empty."""
    return [TensorSpec(*conversions.converted(spec.dtype, spec.shape, name), spec.device) for spec in specs]


class VersionMemory:
    """The memory of the tensors of a version."""

    def __init__(self, tensors: list[torch.Tensor], pieces: list[torch.Tensor], readable: list[torch.Tensor]) -> None:
        """
        Args:
            tensors: of the version.
            pieces: tensors on each device that it uses.
            readable: all of the memory as flat bytes, if peers can read it in place; else none.
        """
        self.tensors, self.pieces, self.readable = tensors, pieces, readable
        self.spans: tuple[Span, ...] | None = None  # see ``Layout``
        self.is_lent = False  # whether it is the program's own, see ``lent``
        self.sizes: dict[torch.device, int] = {}  # bytes of what the store allocated
        self.unused_since = 0.0  # while it is spare (``time.monotonic``)
        self.changed: list[int | None] = [None] * len(tensors)
        """For each tensor, the version in which the content that is here was new."""
        self.own_reads: list[Callable[[], None]] = []
        """Reads by this process's GPUs: the thread that writes next calls these first, and so waits for the reads."""

    @classmethod
    def allocate(cls, specs: Sequence[TensorSpec], allocate_shared: AllocateShared) -> VersionMemory:
        """Allocate memory for tensors of these specs: one piece for each device."""
        offsets, sizes = lay_out([(spec.nbytes, spec.device) for spec in specs])
        readable: list[torch.Tensor] = []
        pieces: dict[torch.device, torch.Tensor] = {}
        with torch.inference_mode(False):
            for device, size in sizes.items():
                shared = allocate_shared(size) if device.type == "cpu" else None
                pieces[device] = torch.empty(size, dtype=torch.uint8, device=device) if shared is None else shared
                if len(sizes) == 1 and (shared is not None or device.type == "cuda"):
                    readable = [pieces[device]]
            tensors = [
                view_at(pieces[spec.device], offset, (spec.dtype, spec.shape))
                for spec, offset in zip(specs, offsets, strict=True)
            ]
        memory = cls(tensors, list(pieces.values()), readable)
        memory.sizes = sizes
        return memory

    @classmethod
    def lent(cls, tensors: Sequence[torch.Tensor]) -> VersionMemory:
        """Use the program's own tensors, without autograd. One that is not contiguous is copied.

        Peers can read those of one GPU in place: the storages that they have. CPU memory, which lanes have not
        allocated, is read by its addresses; see ``ExposedMemory``.
        """
        tensors = [tensor.contiguous() for tensor in tensors]
        on_devices = {tensor.device: tensor for tensor in tensors}
        memory = cls(tensors, list(on_devices.values()), [])
        memory.is_lent = True
        if [device.type for device in on_devices] == ["cuda"]:
            memory.readable, memory.spans = _storages(tensors)
        return memory


def _storages(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], tuple[Span, ...]]:
    """The memory of contiguous tensors as flat pieces, one for each storage, and where in these each one begins."""
    begins = [int(tensor.storage_offset()) * tensor.itemsize for tensor in tensors]
    used: dict[int, tuple[torch.UntypedStorage, int, int]] = {}  # by address: the bytes that tensors use of a storage
    for tensor, begin in zip(tensors, begins, strict=True):
        storage = tensor.untyped_storage()
        _, low, high = used.get(storage.data_ptr(), (storage, begin, begin))
        used[storage.data_ptr()] = storage, min(low, begin & -_ALIGN), max(high, begin + tensor.nbytes)
    pieces, numbers = list[torch.Tensor](), dict[int, tuple[int, int]]()
    with torch.inference_mode(False):
        for number, (address, (storage, low, high)) in enumerate(used.items()):
            empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
            pieces.append(empty.set_(storage, low, (high - low,), (1,)))
            numbers[address] = number, low
    spans = list[Span]()
    for tensor, begin in zip(tensors, begins, strict=True):
        number, low = numbers[tensor.untyped_storage().data_ptr()]
        spans.append((number, begin - low))
    return pieces, tuple(spans)


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
    with unrecorded(targets):
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
        for flags in on_gpu.values():
            for (place, _), differs in zip(flags, torch.stack([flag for _, flag in flags]).tolist(), strict=True):
                equal[place] = not differs
    return equal


class Snapshot:
    """The tensors of one version. They do not change until the snapshot is retired and has no readers."""

    def __init__(
        self,
        version: int,
        layout: Layout,
        memory: VersionMemory,
        changed: Sequence[int],
        pool: SnapshotPool,
        deltas: Deltas | None = None,
    ) -> None:
        """The thread that wrote ``memory`` calls this."""
        self.version, self.layout, self.memory, self.changed = version, layout, memory, changed
        self.deltas = deltas
        self.readers = 0
        self.retired = self.is_revoked = False
        self._pool = pool
        self._converting = Turn()
        self.converted: dict[str, VersionMemory] = {}
        self._handoffs = [handoff_streams(memory.pieces)]

    def make_current(self) -> None:
        """Order this thread's CUDA streams after the writes to the tensors."""
        for handoff in tuple(self._handoffs):
            handoff()

    def tensors(self, places: Places, regions: Sequence[Region] | None = None) -> list[torch.Tensor]:
        """These tensors, or a region of each, for this thread. Each conversion is made once. Raises OutOfBounds."""
        if any([conversion is not None for _, conversion in places]):
            whole = self._converted_tensors(places)
        else:  # without waiting while another thread converts
            self.make_current()
            whole = [self.memory.tensors[place] for place, _ in places]
        if regions is None:
            return whole
        return [cut(tensor, region) for tensor, region in zip(whole, regions, strict=True)]

    def _converted_tensors(self, places: Places) -> list[torch.Tensor]:
        made: list[torch.Tensor] = []
        with self._converting.once("a conversion"):
            self.make_current()  # not before: it also waits for what another thread has converted
            tensors = [self._tensor(place, conversion, made) for place, conversion in places]
            if made:
                self._handoffs.append(handoff_streams(made))
                self.note_own_reads()
        return tensors

    def read_deltas(self, spans: Sequence[DeltaSpan]) -> tuple[Runs, list[torch.Tensor]]:
        """Return the changed elements of these spans; see ``Deltas.read``."""
        if self.deltas is None:
            raise NotFound("this version of the weights has no deltas")
        self.make_current()
        return self.deltas.read(spans)

    def pieces(self, device_type: str, places: Places) -> list[torch.Tensor]:
        """The memory of these tensors on this type of device, as flat tensors: one for each conversion, in order, and
        then those of ``VersionMemory.readable`` for what is not converted.

        Without places: of all, unconverted. Empty if peers cannot read all of it in place.
        """
        if places:
            self.tensors(places)
        else:
            self.make_current()
        names = dict.fromkeys(name for _, name in places) or {None: None}
        memories = [self.converted[name] for name in names if name is not None]
        if None in names:
            memories.append(self.memory)
        pieces = [piece for memory in memories for piece in memory.readable]
        is_readable = all(memory.readable for memory in memories)
        return pieces if is_readable and all(piece.device.type == device_type for piece in pieces) else []

    def copy_into(
        self, targets: Sequence[torch.Tensor], places: Places, regions: Sequence[Region] | None = None
    ) -> None:
        """Copy these tensors, or a region of each, into tensors of this process."""
        copy_tensors(targets, self.tensors(places, regions), self._pool.copy_bytes)
        self.note_own_reads()

    def note_own_reads(self) -> None:
        """Have the thread that writes to this memory next wait for what this thread's CUDA streams read of it."""
        if any(piece.is_cuda for piece in self.memory.pieces):
            for memory in (self.memory, *tuple(self.converted.values())):
                memory.own_reads.append(handoff_streams(memory.pieces))

    def _tensor(self, place: int, name: str | None, made: list[torch.Tensor]) -> torch.Tensor:
        tensor = self.memory.tensors[place]
        if name is None or DTYPES.get(name) is tensor.dtype:
            return tensor
        memory = self._converted(name)
        if memory.changed[place] != self.changed[place]:
            memories = list(map(self._converted, conversions.made_together(name)))
            targets = [each.tensors[place] for each in memories]
            conversions.convert(name, tensor, targets)
            for each in memories:
                each.changed[place] = self.changed[place]
            made += targets
        return memory.tensors[place]

    def _converted(self, name: str) -> VersionMemory:
        memory = self.converted.get(name)
        if memory is None:
            memory = self.converted[name] = self._pool.memory(self.layout.specs, name)
        return memory


class SnapshotPool:
    """Leases on snapshots, and the memory of snapshots that nothing uses any more. Thread-safe."""

    def __init__(
        self,
        allocate_shared: AllocateShared,
        deadlines: Deadlines,
        leave: Callable[..., object],
        fence: Callable[[int], None],
        copy_bytes: CopyBytes = ctypes.memmove,
    ) -> None:
        """``leave``: see ``DeferredCleanup``. ``fence``: orders this thread's CUDA work after reads by peers."""
        self.keeps_spare = True
        """Whether to keep memory for the next version while no snapshot uses it."""
        self._allocate_shared, self._deadlines, self.copy_bytes = allocate_shared, deadlines, copy_bytes
        self._leave, self._fence = leave, fence
        self._lock = Lock()
        self._released = threading.Condition(self._lock)
        self._leases: dict[int, tuple[Snapshot, int, Callable[[], None]]] = {}
        # Random, so that leases of an earlier process of this member, or of another object, are not valid here.
        self._numbers = itertools.count(1 + secrets.randbits(48))
        self._spare: dict[tuple[tuple[TensorSpec, ...], str | None], list[VersionMemory]] = {}
        """By the specs that have been asked for since the layout changed: of others, none is kept. The memory that was
        used last is at the end.
        """
        self._made: weakref.WeakSet[VersionMemory] = weakref.WeakSet()

    def memory(self, specs: Sequence[TensorSpec], name: str | None = None) -> VersionMemory:
        """Memory for tensors of these specs, or for a conversion of them, that this thread may write to."""
        with self._lock:
            spare = self._spare.setdefault((tuple(specs), name), [])
            memory = spare.pop() if spare else None
        if memory is None:
            specs = specs if name is None else converted_specs(specs, name)
            memory = VersionMemory.allocate(specs, self._allocate_shared)
            with self._lock:
                self._made.add(memory)
        for index in {tensor.device.index for tensor in memory.tensors if tensor.is_cuda}:
            self._fence(index)  # peers may still be reading it with their GPUs
        own_reads, memory.own_reads = memory.own_reads, []
        for wait_for_read in own_reads:
            wait_for_read()
        return memory

    def put_back(self, specs: Sequence[TensorSpec], memory: VersionMemory) -> None:
        """Take back memory for which no snapshot was made. The thread that has written to it calls this."""
        memory.own_reads.append(handoff_streams(memory.pieces))
        with self._lock:
            self._spare_memory(tuple(specs), None, memory)

    def drop_spare_memory(self) -> None:
        """Free unused memory, and what is in use once it is not: the layout has changed, or the store has ended."""
        with self._lock:
            self._spare.clear()

    # --- readers -------------------------------------------------------------------------------------------------

    def lease(self, snapshot: Snapshot, rank: int, until: float | None) -> int:
        """Keep a snapshot for a reader until ``release``, or ``until``, if given; returns the lease.

        The caller holds the lock that keeps the snapshot from being retired.
        """
        with self._lock:
            number = next(self._numbers)
            snapshot.readers += 1
            cancel = nothing if until is None else self._deadlines.at(until, lambda: self._expire(number))
            self._leases[number] = (snapshot, rank, cancel)
        return number

    def hold(self, number: int) -> None:
        """Keep a lease until ``release``, whatever its end was. Raises NotFound if the lease has ended."""
        with self._lock:
            snapshot = self.leased(number)
            _, rank, cancel_deadline = self._leases[number]
            self._leases[number] = snapshot, rank, nothing
        cancel_deadline()

    def leases_of(self, rank: int) -> set[int]:
        return {number for number, lease in list(self._leases.items()) if lease[1] == rank}

    def leased(self, number: int) -> Snapshot:
        """Return the snapshot of a lease. Raises NotFound if the lease has ended."""
        lease = self._leases.get(number)
        if lease is None:
            raise NotFound("the lease of this pull has ended: the weights were kept for it until its time was over")
        return lease[0]

    def release(self, number: int) -> bool:
        """End a lease; whether it had not ended before."""
        with self._lock:
            lease = self._leases.pop(number, None)
            if lease is None:
                return False
            snapshot, _, cancel_deadline = lease
            snapshot.readers -= 1
            self._released.notify_all()
            self._reuse(snapshot)
        cancel_deadline()
        return True

    def release_loans(self, numbers: Collection[int]) -> None:
        """End those of these leases that are on lent tensors: a reader that lives asks at its end, and is refused."""
        for number in numbers:
            if (lease := self._leases.get(number)) is not None and lease[0].memory.is_lent:
                self.release(number)

    def _expire(self, number: int) -> None:
        self.release(number)

    def wait_unread(self, snapshot: Snapshot, seconds: float) -> None:
        """Block until no lease on a snapshot is left, but not longer."""
        with self._released:
            self._released.wait_for(lambda: not snapshot.readers, seconds)

    def revoke(self, snapshot: Snapshot) -> set[int]:
        """End all leases on a snapshot; returns the ranks of their readers."""
        leases = {number: lease[1] for number, lease in list(self._leases.items()) if lease[0] is snapshot}
        if leases:  # a thread that serves one may still write a conversion
            snapshot.is_revoked = True
        return {rank for number, rank in leases.items() if self.release(number)}

    def retire(self, snapshot: Snapshot) -> None:
        """Take back a snapshot's memory once its last lease ends. No lease on it begins any more."""
        with self._lock:
            snapshot.retired = True
            self._reuse(snapshot)

    def _reuse(self, snapshot: Snapshot) -> None:
        if snapshot.retired and not snapshot.readers:
            for name, memory in [(None, snapshot.memory), *snapshot.converted.items()]:
                if not memory.is_lent and not (name is not None and snapshot.is_revoked):
                    self._spare_memory(snapshot.layout.specs, name, memory)
            snapshot.converted = {}

    def _spare_memory(self, specs: tuple[TensorSpec, ...], name: str | None, memory: VersionMemory) -> None:
        """Keep memory for the next version, unless the layout has changed. The caller holds the lock."""
        spare = self._spare.get((specs, name))
        if spare is not None:
            memory.unused_since = time.monotonic()
            spare.append(memory)
            if len(spare) > self._most_spare(name):
                self._deadlines.at(memory.unused_since + _UNUSED_S, self._shrink)

    def _most_spare(self, name: str | None) -> int:
        """How much memory for a conversion (None: unconverted) is kept though nothing has used it for a while."""
        return int(self.keeps_spare or name is not None)

    def _shrink(self) -> None:
        """Free memory that nobody has used for a while. What a busy store uses in turns, it keeps."""
        since, surplus = time.monotonic() - _UNUSED_S, list[VersionMemory]()
        with self._lock:
            for (_, name), spare in self._spare.items():
                while len(spare) > self._most_spare(name) and spare[0].unused_since <= since:
                    surplus.append(spare.pop(0))
        self._leave(surplus.clear)

    @property
    def readers(self) -> int:
        return len(self._leases)

    @property
    def held(self) -> dict[str, int]:
        """Bytes of the memory of all snapshots, and of what is spare, by device."""
        sizes = Counter[str]()
        with self._lock:
            for memory in self._made:
                sizes.update({str(device): size for device, size in memory.sizes.items()})
        return dict(sizes)
