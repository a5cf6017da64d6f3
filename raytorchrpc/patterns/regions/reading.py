"""Reads of other members' regions: in pieces, one-sided where a lane can."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import torch

from raytorchrpc.calls.client.future import Future
from raytorchrpc.calls.member import LocalMember, current, memberships
from raytorchrpc.calls.options import MAX_TIMEOUT_S, CallOptions, checked_timeout, takes_timeout
from raytorchrpc.calls.peers import Member
from raytorchrpc.calls.scope import on_loop, refuse_on_loop, wait_serving
from raytorchrpc.calls.server.services import DeferredReply
from raytorchrpc.errors import ConfigurationError, LaneUnavailable, NotFound, PeerLost, RpcTimeout
from raytorchrpc.lanes.base import Pieces, TensorLane
from raytorchrpc.patterns.handle import begin, run
from raytorchrpc.patterns.regions.region import (
    CONFIRM,
    DESCRIBE,
    KIND,
    ROWS,
    Description,
    Lease,
    Rows,
    TensorEntry,
    as_named,
    checked_rows,
    checked_tensors,
)
from raytorchrpc.process.workers import Workers
from raytorchrpc.tensors.cuda_streams import finish_stream, own_streams
from raytorchrpc.tensors.dtypes import DTYPE_NAMES, as_copyable, collapse, spread, written

#: Reads of one member at a time; others wait.
_READS = 8
#: Most bytes of one message, where rows come in messages.
_MESSAGE_BYTES = 64 << 20


class Read:
    """One read of a region, made by ``read``, which goes on by itself. Awaitable. Until it is done, its tensors belong
    to it.

    Examples:
        >>> region = rtr.Region("blocks", [torch.ones(8, 4)])
        >>> blocks = torch.zeros(2, 4)
        >>> read = rtr.read("driver", "blocks", into=[blocks], rows=[3, 5])
        >>> read.wait(timeout=5)
        >>> read.done(), blocks.sum()
        (True, tensor(8.))
        >>> region.close()
    """

    def __init__(self, region: str) -> None:
        self._region, self._reply = region, DeferredReply()

    def done(self) -> bool:
        """Whether the rows are in their tensors, or the read has failed. Never blocks."""
        return self._reply.done()

    @takes_timeout
    def wait(self, timeout: float = MAX_TIMEOUT_S) -> None:
        """Block until it is done, at most ``timeout`` seconds; then raise RpcTimeout, and it goes on.

        The rows may be used on any CUDA stream then. Raises what made the read fail:

        - PeerLost: the owner's process is gone. The tensors may be partly overwritten.
        - RpcTimeout: the lease ended before the read did, so the tensors may have torn rows; or the read's own timeout
          passed.
        - NotFound: the owner has no such region, or no longer.
        - ConfigurationError: names, rows, dtypes or shapes do not fit; the tensors are unchanged.
        """
        if not self.done():
            if on_loop():
                refuse_on_loop(f"a read of region {self._region!r}", "`await read`")
            if not wait_serving(self._reply, checked_timeout(timeout)):
                raise RpcTimeout(f"the read of region {self._region!r} was not done within {timeout:.3g} s")
        self._reply.outcome()

    def __await__(self) -> Generator[Any, None, None]:
        return asyncio.shield(asyncio.wrap_future(self._reply)).__await__()


@takes_timeout
def read(
    member: Any,
    name: str,
    *,
    into: Mapping[Any, torch.Tensor] | Sequence[torch.Tensor],
    rows: Rows | None = None,
    at: Rows | None = None,
    lease: Lease | None = None,
    last: bool = True,
    timeout: float | None = None,
    group: str | None = None,
) -> Read:
    """Read rows of another member's ``Region`` into tensors of this process, on a thread and a CUDA stream of its own.

    Returns at once. The CUDA work that this thread has queued on the tensors before precedes the read.

    Args:
        member: the owner: actor handle, name, rank or Member.
        name: the region's.
        into: the tensors that receive the rows, by name: any of the region's. In a sequence: all of them, in the
            region's order. Each has the dtype and, but for the number of rows, the shape of the region's tensor; any
            strides; on the CPU or a GPU.
        rows: integers, which of the region's rows to read. None: those of the lease; without a lease all.
        at: integers, as many: which row of ``into`` each goes to. None: in order, from 0 on.
        lease: from ``Region.lease`` at the owner, with all of ``rows``. The read ends it.
        last: whether the read ends the lease; pass False if others under it follow. Without a lease, False leaves out
            the last question, whether the owner has the region still: the program asks the owner itself.
        timeout: seconds for all of the read; None: ``GroupConfig.rpc_timeout_s``.
        group: the group that has the member, as for ``rpc_sync``. None: that of the lease, if there is one.

    Raises ConfigurationError for arguments that cannot be right; all else is raised by ``Read.wait``.

    Examples:
        >>> region = rtr.Region("caches", {"layer 0": torch.ones(8, 4)})  # in the owner
        >>> caches = {"layer 0": torch.zeros(64, 4)}
        >>> rtr.read("driver", "caches", rows=[3, 5], into=caches, at=[40, 41]).wait()
        >>> caches["layer 0"].sum()
        tensor(8.)
        >>> region.close()
    """
    reading, made = _begin(member, name, into, rows, at, lease, last, timeout, group), Read(name)
    reading.reads.workers.submit(reading.run, made._reply)
    return made


def read_here(member: Any, name: str, **options: Any) -> None:
    """Read as ``read`` does, on this thread. Returns when the rows are there; raises what ``Read.wait`` does."""
    _begin(member, name, **options).run_here()


def expect_reads(group: str) -> None:
    """Threads of this process are about to read regions of a group: have Python switch between them quickly. To be
    called by the thread that has the interpreter lock, and would hold up theirs.
    """
    for local in memberships(group):
        _hurry(local)


def _hurry(local: LocalMember) -> None:
    if (interval := local.outgoing.interval) is not None and not interval.used:
        interval.shorten()


def _begin(
    member: Any,
    name: str,
    into: Mapping[Any, torch.Tensor] | Sequence[torch.Tensor],
    rows: Rows | None = None,
    at: Rows | None = None,
    lease: Lease | None = None,
    last: bool = True,
    timeout: float | None = None,
    group: str | None = None,
) -> _Reading:
    if lease is not None and not isinstance(lease, Lease):
        raise ConfigurationError(f"lease= is what the owner's Region.lease returned, not {lease!r}")
    group = lease._generation if lease is not None and group is None else group
    local, seconds = run(begin(timeout, member if current.members else None, group))
    _hurry(local)
    owner, label = local.peers.route(member).member, f"region {name!r}"
    targets = as_named(into, "into=")
    if rows is None and lease is not None:
        rows = lease.rows
    wanted = None if rows is None else checked_rows(rows, None, label)
    if lease is not None and (lease.region, lease.member) != (name, owner.name):
        raise ConfigurationError(f"the lease is on region {lease.region!r} of {lease.member!r}, not on this one")
    if lease is not None and wanted is not None and not numpy.isin(wanted, lease.rows).all():
        raise ConfigurationError("the lease has not all of rows=")
    reads = local.services.open("region reads", "", lambda: _Reads(local))
    by_name, until = isinstance(into, Mapping), time.monotonic() + seconds
    enter = own_streams(list(targets.values()))
    return _Reading(reads, local, owner, name, targets, by_name, wanted, at, lease, last, until, enter)


class _Reads:
    """What one member knows of regions that it reads; see ``Served``. Thread-safe."""

    instance_id: int
    settings = ()

    def __init__(self, local: LocalMember) -> None:
        self.local, self.workers = local, Workers("raytorchrpc-read", _READS)
        self.known: dict[tuple[int, str], Description] = {}
        """By rank and region."""

    def lose(self, rank: int) -> None:
        for key in [key for key in list(self.known) if key[0] == rank]:
            self.known.pop(key, None)

    def keep_only(self, rank: int, process: str | None) -> None:
        self.lose(rank)

    def close(self, error: Exception) -> None:
        self.known.clear()
        self.workers.stop()


class _Move(NamedTuple):
    """One tensor of a read."""

    entry: TensorEntry
    target: torch.Tensor


@dataclass
class _Reading:
    """One read, on its thread. See ``read`` for what it was given."""

    reads: _Reads
    local: LocalMember
    owner: Member
    name: str
    targets: dict[Any, torch.Tensor]
    by_name: bool
    rows: numpy.ndarray | None
    at: Rows | None
    lease: Lease | None
    last: bool
    until: float
    enter: Callable[[], AbstractContextManager[None]]
    """Has the thread use CUDA streams of its own."""

    def run(self, reply: DeferredReply) -> None:
        """Read, and settle the reply."""
        try:
            self.run_here()
        except Exception as error:
            reply.settle(None, error)
        else:
            reply.settle(None)
        finally:
            self.targets = {}

    def run_here(self) -> None:
        """Read. Raises what ``Read.wait`` does."""
        key = self.owner.rank, self.name
        known = self.reads.known.get(key)
        if known is not None and (self.lease is None or self.lease._address[2] == known.instance_id):
            try:
                return self._read_from(known)
            except (NotFound, PeerLost):  # another region of that name, perhaps of the member's next process
                if self.lease is not None:
                    raise
                self.reads.known.pop(key, None)
        instance_id = None if self.lease is None else self.lease._address[2]
        described = Description(*self._call(DESCRIBE, KIND, self.name, instance_id))
        known = described._replace(entries=tuple(TensorEntry(*entry) for entry in described.entries))
        self.reads.known[key] = known
        self._read_from(known)

    def _call(self, service: str, *args: Any) -> Any:
        seconds = self.until - time.monotonic()
        if seconds <= 0:
            raise RpcTimeout(f"the read of region {self.name!r} of {self.owner.name!r} has no time left")
        if self.owner.rank == self.local.me.rank:
            return self.local.incoming.services[service].function(self.local, self.owner.rank, *args)
        call = self.local.outgoing.call(self.owner.rank, service, args, {}, CallOptions(seconds, retry=0))
        return Future(call).wait()

    def _read_from(self, known: Description) -> None:
        moves, rows, at = self._checked(known)
        address = KIND, self.name, known.instance_id
        by_way: dict[tuple[str, torch.device], list[_Move]] = {}
        for move in moves if len(rows) else ():
            kind, device = move.entry.device_type, move.target.device
            way = kind if device.type == kind and kind in known.exposed else ""
            by_way.setdefault((way, device), []).append(move)
        targets = [move.target for move in moves]
        with written(targets), self.enter():
            try:
                for (way, device), some in by_way.items():
                    if not way or not self._gathered(known, way, device, some, rows, at):
                        self._bring(address, known.dim, some, rows, at)
            finally:  # of one that fails, too: nothing is written any more once that is known
                for device in {target.device for target in targets if target.is_cuda}:
                    finish_stream(device)
        if self.lease is None and not self.last:
            return
        number = 0 if self.lease is None else self.lease._number
        torn = self._call(CONFIRM, *address, number, self.last)
        if torn is not None:
            raise RpcTimeout(
                f"the lease on region {self.name!r} of {self.owner.name!r} does not cover this read ({torn}): the "
                f"rows in into= may be torn; read them under another lease, or lease with a longer timeout="
            )

    def _checked(self, known: Description) -> tuple[list[_Move], numpy.ndarray, numpy.ndarray]:
        """What to move where. Raises ConfigurationError."""
        label = f"region {self.name!r} of {self.owner.name!r}"
        entries = {entry.name: entry for entry in known.entries}
        names = list(self.targets) if self.by_name else list(entries)
        if unknown := [name for name in names if name not in entries]:
            raise ConfigurationError(f"{label} has no {unknown[0]!r}; it has {', '.join(map(repr, entries))}")
        if len(names) != len(self.targets):
            raise ConfigurationError(f"{label} has {len(names)} tensors, and into= {len(self.targets)}")
        moves = [_Move(entries[name], target) for name, target in zip(names, self.targets.values(), strict=True)]
        room = checked_tensors(dict(zip(names, self.targets.values(), strict=True)), known.dim, "into=")
        for (name, dtype, shape, *_), target in moves:
            here, there = list(target.shape), list(shape)
            here[known.dim] = there[known.dim] = -1
            if DTYPE_NAMES[target.dtype] != dtype or here != there:
                raise ConfigurationError(
                    f"{name!r} of {label} is {dtype} {shape}, and of into= {DTYPE_NAMES[target.dtype]} "
                    f"{tuple(target.shape)}: only the rows, along dim={known.dim}, may differ"
                )
        rows = checked_rows(self.rows, known.entries[0].shape[known.dim], label)
        at = checked_rows(numpy.arange(len(rows)) if self.at is None else self.at, room, "into=")
        if len(at) != len(rows):
            raise ConfigurationError(f"at= has {len(at)} rows, and rows= {len(rows)}")
        return moves, rows, at

    def _gathered(
        self,
        known: Description,
        kind: str,
        device: torch.device,
        moves: Sequence[_Move],
        rows: numpy.ndarray,
        at: numpy.ndarray,
    ) -> bool:
        """Have a lane copy the rows; False if it cannot."""
        name, descriptor = known.exposed[kind]
        lane: TensorLane | None = self.local.tensor_lanes.get(name)
        if lane is None or self.owner.rank == self.local.me.rank:
            return False
        try:
            lane.gather(self.owner.name, descriptor, pieces_of(moves, known.dim, rows, at), device)
        except LaneUnavailable as error:
            known.exposed.pop(kind, None)  # for the next reads
            owner = f"region {self.name!r} of {self.owner.name!r}"
            self.local.payloads.warn(f"rows of {owner} come in messages, not by {name}", error.reason)
            return False
        return True

    def _bring(self, address: Any, dim: int, moves: Sequence[_Move], rows: numpy.ndarray, at: numpy.ndarray) -> None:
        """Have the owner collect the rows in messages, and copy them."""
        names = [move.entry.name for move in moves]
        targets = [as_copyable(move.target.detach()) for move in moves]
        size = sum(target.nbytes // max(1, target.shape[dim]) for target in targets)
        step = max(1, _MESSAGE_BYTES // max(1, size))
        for begins in range(0, len(rows), step):
            part = slice(begins, begins + step)
            sources = self._call(ROWS, *address, names, rows[part], not targets[0].is_cuda)
            index = torch.from_numpy(at[part])
            for target, source in zip(targets, sources, strict=True):
                target.index_copy_(dim, index.to(target.device), source.to(target.device))


def pieces_of(
    moves: Sequence[tuple[TensorEntry, torch.Tensor]], dim: int, rows: numpy.ndarray, at: numpy.ndarray
) -> list[Pieces]:
    """The contiguous pieces of these rows, from the entries' tensors to the targets: those of one layout together."""
    by_layout: dict[Any, tuple[list[int], list[int]]] = {}
    for entry, target in moves:
        layout = entry.shape, entry.strides, target.stride(), target.element_size()
        numbers, addresses = by_layout.setdefault(layout, ([], []))
        numbers.append(entry.number)
        addresses.append(target.data_ptr())
    pieces = []
    for (shape, there, here, itemsize), (numbers, addresses) in by_layout.items():
        inner = [[*each[:dim], *each[dim:][1:]] for each in (shape, there, here)]
        if 0 in inner[0]:
            continue
        width, dimensions = collapse(inner[0], itemsize, inner[1], inner[2])
        offsets, places = spread(dimensions, rows * (there[dim] * itemsize), at * (here[dim] * itemsize))
        begins = numpy.array(addresses, numpy.int64)
        pieces.append(
            Pieces(
                numpy.repeat(numpy.array(numbers, numpy.int64), len(offsets)),
                numpy.tile(offsets, len(numbers)),
                (begins[:, None] + places).ravel(),
                width,
            )
        )
    return pieces
