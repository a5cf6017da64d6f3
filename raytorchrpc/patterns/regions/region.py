"""Regions: tensors that a member exposes, and that others read in pieces when they like."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy
import torch

from raytorchrpc.calls.member import LocalMember, process_member
from raytorchrpc.calls.options import MAX_TIMEOUT_S, CallOptions, checked_timeout, takes_timeout
from raytorchrpc.calls.peers import Member
from raytorchrpc.calls.receive_into import obstacle_of
from raytorchrpc.calls.scope import on_loop, refuse_on_loop, wait_serving
from raytorchrpc.errors import ConfigurationError, NotFound, RayTorchRpcError
from raytorchrpc.patterns.exposed_memory import ExposedMemory
from raytorchrpc.patterns.handle import checked_count
from raytorchrpc.patterns.home import object_services
from raytorchrpc.patterns.waits import once_ended
from raytorchrpc.process import locks
from raytorchrpc.process.completion import nothing
from raytorchrpc.tensors.cuda_streams import finish_stream
from raytorchrpc.tensors.dtypes import DTYPE_NAMES, as_copyable

KIND = "region"
#: Services of an owner: what a region has and where; rows of it in a message; whether what was read is right.
DESCRIBE, ROWS, CONFIRM = "raytorchrpc.region.describe", "raytorchrpc.region.rows", "raytorchrpc.region.confirm"

#: Rows, as users give them: integers in a tensor, an array or a sequence.
Rows = torch.Tensor | numpy.ndarray | Sequence[int]


class TensorEntry(NamedTuple):
    """One tensor of a region, for a reader."""

    name: Any
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device_type: str
    number: int
    """Which of the exposed tensors of that device type."""


class Description(NamedTuple):
    """What a reader needs to read a region. Valid for one instance of it."""

    instance_id: int
    dim: int
    entries: tuple[TensorEntry, ...]
    exposed: dict[str, tuple[str, Any]]
    """By device type: the lane that reads it in place, and its descriptor."""


class Region:
    """Tensors of this process that other members read in pieces, with ``raytorchrpc.read``, when they like.

    The region uses the tensors as they are and copies nothing. Over ``shm``, ``cuda_ipc`` and ``nixl``, readers read
    them out of this process's memory without its help; for others, this process collects the rows in a message. It
    keeps the tensors until ``close``, or until this process leaves its group; over ``nixl``, until reads have ended.

    A reader that has no lease may read rows while this process writes to them. ``lease`` tells when to write.

    Examples:
        >>> caches = {f"layer {number}": torch.zeros(64, 16, 2, 128) for number in range(4)}
        >>> region = rtr.Region("caches", caches)
        >>> with region.lease([3, 5], timeout=1) as lease:
        ...     region.leased([2, 3]).tolist()
        [False, True]
        >>> region.close()
    """

    def __init__(
        self,
        name: str,
        tensors: Mapping[str, torch.Tensor] | Sequence[torch.Tensor],
        *,
        dim: int = 0,
        group: str | None = None,
    ):
        """
        Args:
            name: not that of another region of this process.
            tensors: by name, or in a sequence, where their positions are their names. Dense, with any strides, on the
                CPU or a GPU. They may have different dtypes and shapes, but the same number of rows.
            dim: the dimension that rows index, of every tensor.
            group: whose members may read it, for a process in several groups; see ``raytorchrpc.current_member``.

        Raises ConfigurationError; NotAMember outside a group.
        """
        local = process_member(group=group)
        given: Any = name
        if not isinstance(given, str) or not given:
            raise ConfigurationError(f"a region needs a name, not {given!r}")
        named = as_named(tensors, f"region {name!r}")
        made = ExposedRegion(local, name, named, checked_tensors(named, dim, f"region {name!r}"), dim)
        if local.services.open(KIND, name, lambda: made) is not made:
            raise ConfigurationError(f"this process has a region {name!r} already: close() that first")
        self._exposed = made

    @property
    def name(self) -> str:
        """The region's name."""
        return self._exposed.name

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return self._exposed.rows

    @takes_timeout
    def lease(self, rows: Rows | None = None, *, timeout: float = 30.0, reader: Any = None, reads: int = 1) -> Lease:
        """Promise not to write to these rows until they have been read; pass the result to the reader.

        Call it when the rows are written: it waits for what this thread has queued on its CUDA streams. The lease ends
        when it has been read, at its timeout, with ``Lease.release``, or with the reader's process; then the program
        may write to the rows. Readers that come later, or are not done by then, get RpcTimeout.

        Args:
            rows: integers, without duplicates; None: all.
            timeout: seconds until it ends in any case.
            reader: the member that will read (handle, name, rank or Member): the lease also ends if that is lost. None:
                any member may read.
            reads: how many reads end it, for several readers.
        """
        return self._exposed.grant(rows, checked_timeout(timeout), reader, checked_count("reads", reads))

    def leased(self, rows: Rows | None = None) -> numpy.ndarray:
        """Whether each of these rows (None: of all rows) is leased, as booleans."""
        leased: numpy.ndarray = self._exposed.held[self._exposed.checked(rows)] > 0
        return leased

    @takes_timeout
    def wait(self, rows: Rows | None = None, timeout: float = 30.0) -> bool:
        """Block until none of these rows (None: of all rows) is leased, at most ``timeout`` seconds; whether so."""
        return self._exposed.wait(self._exposed.checked(rows), checked_timeout(timeout))

    def close(self) -> None:
        """End the region, with its leases, and release its tensors. Readers get NotFound. Idempotent."""
        with suppress(NotFound):
            exposed = self._exposed
            exposed.local.services.delete(KIND, exposed.name, exposed.instance_id, exposed.local.me.name)

    def __repr__(self) -> str:
        return f"<raytorchrpc.Region {self.name!r} of {self.rows} rows>"


class Lease:
    """Rows of a region that do not change until they are read. Made by ``Region.lease``; picklable.

    As a context manager it is released at the end of the block.

    Examples:
        >>> region = rtr.Region("blocks", [torch.ones(8, 4)])
        >>> lease = region.lease([3, 5], timeout=30)
        >>> blocks = torch.zeros(2, 4)
        >>> rtr.read("driver", "blocks", into=[blocks], lease=lease).wait()  # in any member
        >>> lease.ended, blocks.sum()
        ('read', tensor(8.))
        >>> region.close()
    """

    _exposed: ExposedRegion | None = None  # the rest is of the owner alone
    _reader: Member | None = None
    _reads = 1
    _ended: str | None = None
    _cancel_deadline: Callable[[], None] = staticmethod(nothing)

    def __init__(
        self, member: str, region: str, instance_id: int, number: int, rows: numpy.ndarray, generation: str
    ) -> None:
        """``generation``: of the group."""
        self.member, self.region, self.rows = member, region, rows
        """The owner's name, the region's, and the rows (an array, int64)."""
        self._address, self._number = (KIND, region, instance_id), number
        self._generation = generation

    def done(self) -> bool:
        """Whether it has ended, so that the owner may write to the rows. Only in the owner."""
        return self.ended is not None

    @property
    def ended(self) -> str | None:
        """How it has ended: "read", "expired", "released", "lost" (its reader) or "closed" (its region); None: not yet.
        Only in the owner.
        """
        if self._exposed is None:
            raise RayTorchRpcError(f"only {self.member!r}, which granted this lease, is told how it ends")
        return self._ended

    @takes_timeout
    def wait(self, timeout: float = MAX_TIMEOUT_S) -> bool:
        """Block until it has ended, at most ``timeout`` seconds; whether so. Only in the owner."""
        if not self.done() and on_loop():
            refuse_on_loop("waiting for a lease", "`await asyncio.to_thread(lease.wait)`")
        assert self._exposed is not None
        return wait_serving(_Waits(self._exposed.changed, self.done), checked_timeout(timeout))

    def release(self) -> None:
        """End it now. In the owner, a read in progress raises RpcTimeout. In a reader, does not wait for the owner."""
        if self._exposed is not None:
            self._exposed.end(self, "released")
            return
        local = process_member(group=self._generation)
        with suppress(RayTorchRpcError):
            args = (*self._address, self._number, True, True)
            local.outgoing.call(self.member, CONFIRM, args, {}, CallOptions(retry=0))

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *raised: object) -> None:
        self.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return Lease, (self.member, self.region, self._address[2], self._number, self.rows, self._generation)


class _Waits(NamedTuple):
    """What to wait for with ``wait_serving``."""

    changed: threading.Condition
    is_over: Callable[[], bool]

    def wait(self, timeout_s: float) -> bool:
        with self.changed:
            return self.changed.wait_for(self.is_over, timeout_s)


class ExposedRegion:
    """A region, in its owner; see ``Served``. Thread-safe."""

    instance_id: int
    settings = ()

    def __init__(self, local: LocalMember, name: str, tensors: dict[Any, torch.Tensor], rows: int, dim: int) -> None:
        self.local, self.name, self.rows, self._dim = local, name, rows, dim
        self._tensors = {key: tensor.detach() for key, tensor in tensors.items()}
        self.held = numpy.zeros(rows, numpy.int64)
        """How many leases each row has."""
        self.changed = locks.condition()
        self._leases: dict[int, Lease] = {}
        # Random, so that leases of an earlier process of this member are not valid here.
        self._numbers = itertools.count(1 + secrets.randbits(48))
        self._memory = ExposedMemory(local, f"region {name!r}", self._tensors.values())

    def checked(self, rows: Rows | None) -> numpy.ndarray:
        return checked_rows(rows, self.rows, f"region {self.name!r}")

    # --- leases --------------------------------------------------------------------------------------------------

    def grant(self, rows: Rows | None, seconds: float, reader: Any, reads: int) -> Lease:
        checked, me = self.checked(rows), self.local.me.name
        self.local.services.find(KIND, self.name, self.instance_id, me)
        for device in {tensor.device for tensor in self._tensors.values() if tensor.is_cuda}:
            finish_stream(device)
        lease = Lease(me, self.name, self.instance_id, next(self._numbers), checked, self.local.generation)
        lease._exposed, lease._reads = self, reads
        lease._reader = member = None if reader is None else self.local.peers.route(reader).member
        with self.changed:
            expire = partial(self.end, lease, "expired")
            lease._cancel_deadline = self.local.deadlines.at(time.monotonic() + seconds, expire)
            self._leases[lease._number] = lease
            self.held[checked] += 1
        if member is not None and member.name in self.local.peers.away():
            self.lose(member.rank)
        return lease

    def end(self, lease: Lease, how: str) -> None:
        with self.changed:
            if self._leases.pop(lease._number, None) is None:
                return
            self.held[lease.rows] -= 1
            lease._ended = how
            self.changed.notify_all()
        lease._cancel_deadline()

    def wait(self, rows: numpy.ndarray, seconds: float) -> bool:
        if on_loop():
            refuse_on_loop("waiting for leases", "`await asyncio.to_thread(region.wait, rows)`")

        def is_over() -> bool:
            return not self.held[rows].any()

        until = time.monotonic() + seconds
        # Once more after another method of the actor has run, which may have leased them.
        while wait_serving(_Waits(self.changed, is_over), max(0.0, until - time.monotonic())):
            if is_over():
                return True
        return False

    def lose(self, rank: int) -> None:
        """See ``Served``. A process that lives, out of reach, may go on reading until its leases end."""
        for lease in list(self._leases.values()):
            if (reader := lease._reader) is not None and reader.rank == rank:
                lost = partial(self.end, lease, "lost")
                if reader.node_id == self.local.me.node_id:
                    once_ended(self.local.deadlines, reader.pid, lost, partial(self._leases.get, lease._number))
                else:  # nobody here knows whether it has ended
                    lost()

    def keep_only(self, rank: int, process: str | None) -> None:
        """See ``Served``."""

    def close(self, error: Exception) -> None:
        for lease in list(self._leases.values()):
            self.end(lease, "closed")
        self._tensors = {}
        self._memory.end()

    # --- services ------------------------------------------------------------------------------------------------

    def describe(self, rank: int) -> Description:
        """What the region has, and how the member of that rank can read it."""
        entries, numbers = [], Counter[str]()
        for name, tensor in self._tensors.items():
            kind, shape, strides = tensor.device.type, tuple(tensor.shape), tuple(tensor.stride())
            entries.append(TensorEntry(name, DTYPE_NAMES[tensor.dtype], shape, strides, kind, numbers[kind]))
            numbers[kind] += 1
        return Description(self.instance_id, self._dim, tuple(entries), self._memory.describe(rank))

    def collect(self, names: Sequence[Any], rows: numpy.ndarray, on_cpu: bool) -> list[torch.Tensor]:
        """Copies of these rows of these tensors, ``on_cpu`` if they are to arrive there."""
        index = torch.from_numpy(self.checked(rows))
        collected = []
        for name in names:
            tensor = as_copyable(self._tensors[name])
            some = tensor.index_select(self._dim, index.to(tensor.device))
            collected.append(some.cpu() if on_cpu else some)
        return collected

    def confirm(self, rank: int, number: int, is_last: bool, gives_up: bool = False) -> str | None:
        """The end of a read, under the lease of that number (0: none). Why what was read may be torn; None: it is not.

        ``is_last``: the lease has been read. ``gives_up``: nothing was, and the lease ends.
        """
        if not number:
            return None
        with self.changed:
            lease = self._leases.get(number)
            if lease is None:
                return "it has ended: its time was over, it was read, or the owner took it back"
            if lease._reader is not None and lease._reader.rank != rank:
                return "it was granted to another member"
            lease._reads -= int(is_last)
            if is_last and (gives_up or lease._reads <= 0):
                self.end(lease, "released" if gives_up else "read")
        return None


SERVICES = object_services(
    {
        DESCRIBE: lambda region, rank: tuple(region.describe(rank)),
        ROWS: lambda region, rank, *args: region.collect(*args),
        CONFIRM: ExposedRegion.confirm,
    }
)


# --- checks, in owners and readers -------------------------------------------------------------------------------


def as_named(tensors: Any, label: str) -> dict[Any, torch.Tensor]:
    """Tensors by name, or by their positions in a sequence. Raises ConfigurationError."""
    if not isinstance(tensors, (Mapping, Sequence)):
        raise ConfigurationError(f"{label} takes tensors in a mapping or a sequence, not {type(tensors).__name__}")
    named = dict(tensors) if isinstance(tensors, Mapping) else dict(enumerate(tensors))
    if strange := [name for name, tensor in named.items() if not isinstance(tensor, torch.Tensor)]:
        raise ConfigurationError(f"{strange[0]!r} of {label} is no tensor, but {type(named[strange[0]]).__name__}")
    return named


def checked_tensors(tensors: Mapping[Any, torch.Tensor], dim: int, label: str) -> int:
    """How many rows these tensors have. Raises ConfigurationError."""
    if not tensors:
        raise ConfigurationError(f"{label} has no tensors")
    if not isinstance(dim, int):
        raise ConfigurationError(f"dim= of {label} is a whole number, not {dim!r}")
    extents = {}
    for name, tensor in tensors.items():
        if (obstacle := obstacle_of(tensor)) is not None:
            raise ConfigurationError(f"tensor {name!r} of {label} {obstacle}")
        if not -tensor.dim() <= dim < tensor.dim():
            raise ConfigurationError(f"tensor {name!r} of {label} has {tensor.dim()} dimensions, and none is dim={dim}")
        extents[name] = tensor.shape[dim]
    if len(set(extents.values())) > 1:
        raise ConfigurationError(f"the tensors of {label} differ in their rows, along dim={dim}: {extents}")
    return int(next(iter(extents.values())))


def checked_rows(rows: Any, most: int | None, label: str) -> numpy.ndarray:
    """Rows as an array (int64); None: all of ``most``, which is None if it is not known. Raises ConfigurationError."""
    if rows is None and most is not None:
        return numpy.arange(most)
    array = rows.detach().cpu().numpy() if isinstance(rows, torch.Tensor) else numpy.asarray(rows)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ConfigurationError(f"rows of {label} are integers in one dimension, not {array.dtype} {array.shape}")
    array = numpy.ascontiguousarray(array, numpy.int64)
    wrong = array[(array < 0) | (array >= (array.max(initial=0) + 1 if most is None else most))]
    if wrong.size:
        end = "on" if most is None else f"to {most - 1}"
        raise ConfigurationError(f"{label} has rows from 0 {end}, and not {', '.join(map(str, wrong[:8].tolist()))}")
    if len(numpy.unique(array)) != len(array):
        raise ConfigurationError(f"rows of {label} occur more than once")
    return array
