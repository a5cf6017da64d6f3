"""Snapshots of tensors that do not change while readers hold leases on them; their memory is used again afterwards."""

from __future__ import annotations

import ctypes
import itertools
import secrets
import threading
from collections.abc import Callable, Hashable, Sequence

import torch

from raytorchrpc.errors import NotFound
from raytorchrpc.patterns.weights.memory import (
    AllocateShared,
    CopyBytes,
    TensorSpec,
    VersionMemory,
    converted_specs,
    copy_tensors,
)
from raytorchrpc.process.deadlines import Deadlines
from raytorchrpc.tensors.cuda_streams import handoff_streams, nothing
from raytorchrpc.tensors.dtypes import DTYPES

#: Unused memory of one layout that is kept for the next snapshots.
_SPARE = 2

#: Tensors of a snapshot: (place in the layout, name of the dtype to convert it to (None: unconverted)).
Places = Sequence[tuple[int, str | None]]


class Snapshot:
    """The tensors of one version. They do not change until the snapshot is retired and has no readers."""

    def __init__(
        self,
        version: int,
        specs: Sequence[TensorSpec],
        memory: VersionMemory,
        changed: Sequence[int],
        pool: SnapshotPool,
    ) -> None:
        """``changed``: for each tensor, the version that it was new in. The thread that wrote ``memory`` calls this."""
        self.version, self.specs, self.memory, self.changed = version, specs, memory, changed
        self.readers = 0
        self.retired = False
        self._pool = pool
        self._converting = threading.Lock()
        self.converted: dict[torch.dtype, VersionMemory] = {}
        self._handoffs = [handoff_streams(memory.pieces)]

    def make_current(self) -> None:
        """Order this thread's CUDA streams after the writes to the tensors."""
        for handoff in tuple(self._handoffs):
            handoff()

    def tensors(self, places: Places) -> list[torch.Tensor]:
        """Return these tensors, for use on this thread. Each is converted to a dtype once."""
        self.make_current()
        made: list[torch.Tensor] = []
        with self._converting:
            found = [self._tensor(place, dtype, made) for place, dtype in places]
            if made:
                self._handoffs.append(handoff_streams(made))
                self._note_own_reads()
        return found

    def pieces(self, device_type: str, places: Places) -> list[torch.Tensor]:
        """Return the memory that holds these tensors on this type of device: one flat tensor for each dtype name.

        The names (None: unconverted) count in the order in which they first appear in ``places``. Empty if the memory
        of any of them is not one piece that peers can read in place.
        """
        self.tensors(places)
        names = dict.fromkeys(name for _, name in places)
        memories = [self.memory if name is None else self.converted[DTYPES[name]] for name in names]
        wholes = [memory.whole for memory in memories]
        found = [whole for whole in wholes if whole is not None and whole.device.type == device_type]
        return found if len(found) == len(memories) else []

    def whole(self, device_type: str) -> list[torch.Tensor]:
        """Return the memory of all tensors, unconverted, if it is one piece on this type of device; else nothing."""
        whole = self.memory.whole
        if whole is None or whole.device.type != device_type:
            return []
        self.make_current()
        return [whole]

    def copy_into(self, targets: Sequence[torch.Tensor], places: Places) -> None:
        """Copy these tensors into tensors of this process."""
        copy_tensors(targets, self.tensors(places), self._pool.copy_bytes)
        self._note_own_reads()

    def _note_own_reads(self) -> None:
        if any(piece.is_cuda for piece in self.memory.pieces):
            self.memory.own_reads.append(handoff_streams(self.memory.pieces))

    def _tensor(self, place: int, name: str | None, made: list[torch.Tensor]) -> torch.Tensor:
        tensor = self.memory.tensors[place]
        if name is None or DTYPES[name] is tensor.dtype:
            return tensor
        dtype = DTYPES[name]
        memory = self.converted.get(dtype)
        if memory is None:
            memory = self.converted[dtype] = self._pool.memory(self.specs, dtype)
        target = memory.tensors[place]
        if memory.changed[place] != self.changed[place]:
            with torch.inference_mode(False), torch.no_grad():
                target.copy_(tensor)
            memory.changed[place] = self.changed[place]
            made.append(target)
        return target


def _memmove(target: int, source: int, size: int) -> None:
    ctypes.memmove(target, source, size)


class SnapshotPool:
    """Leases on snapshots, and the memory of snapshots that nothing uses any more. Thread-safe."""

    def __init__(self, allocate_shared: AllocateShared, deadlines: Deadlines, copy_bytes: CopyBytes = _memmove) -> None:
        self._allocate_shared, self._deadlines, self.copy_bytes = allocate_shared, deadlines, copy_bytes
        self._lock = threading.Lock()
        self._leases: dict[int, tuple[Snapshot, int, Callable[[], None]]] = {}
        # Random, so that leases of an earlier process of this member, or of another object, are not valid here.
        self._numbers = itertools.count(1 + secrets.randbits(48))
        self._spare: dict[Hashable, list[VersionMemory]] = {}

    def memory(self, specs: Sequence[TensorSpec], dtype: torch.dtype | None = None) -> VersionMemory:
        """Return memory for tensors of these specs. ``dtype``: only for the floating ones, converted to it."""
        with self._lock:
            spare = self._spare.get((tuple(specs), dtype))
            if spare:
                return spare.pop()
        return VersionMemory(specs if dtype is None else converted_specs(specs, dtype), self._allocate_shared)

    def drop_spare_memory(self) -> None:
        """Free unused memory: the layout has changed."""
        with self._lock:
            self._spare.clear()

    # --- readers -------------------------------------------------------------------------------------------------

    def lease(self, snapshot: Snapshot, rank: int, until: float | None) -> int:
        """Keep a snapshot for a reader until ``release``, or ``until`` (``time.monotonic``); returns the lease.

        The caller holds the lock that keeps the snapshot from being retired. ``until`` None: without a limit, for a
        thread of this process, which may be suspended for any time.
        """
        with self._lock:
            number = next(self._numbers)
            snapshot.readers += 1
            cancel = nothing if until is None else self._deadlines.at(until, lambda: self.release(number))
            self._leases[number] = (snapshot, rank, cancel)
        return number

    def leases_of(self, rank: int) -> set[int]:
        """Return the leases of a member."""
        return {number for number, lease in list(self._leases.items()) if lease[1] == rank}

    def leased(self, number: int) -> Snapshot:
        """Return the snapshot of a lease. Raises NotFound if the lease has ended."""
        lease = self._leases.get(number)
        if lease is None:
            raise NotFound("the lease of this pull has ended: the weights were kept for it until its time was over")
        return lease[0]

    def release(self, number: int) -> None:
        """End a lease. Idempotent."""
        with self._lock:
            lease = self._leases.pop(number, None)
            if lease is None:
                return
            snapshot, _, cancel_deadline = lease
            snapshot.readers -= 1
            self._reuse(snapshot)
        cancel_deadline()

    def retire(self, snapshot: Snapshot) -> None:
        """Take back a snapshot's memory once its last lease ends. No lease on it begins any more."""
        with self._lock:
            snapshot.retired = True
            self._reuse(snapshot)

    def _reuse(self, snapshot: Snapshot) -> None:
        if snapshot.retired and not snapshot.readers:
            for dtype, memory in [(None, snapshot.memory), *snapshot.converted.items()]:
                spare = self._spare.setdefault((tuple(snapshot.specs), dtype), [])
                if len(spare) < _SPARE:
                    spare.append(memory)
            snapshot.converted = {}

    @property
    def readers(self) -> int:
        """How many leases there are."""
        return len(self._leases)
