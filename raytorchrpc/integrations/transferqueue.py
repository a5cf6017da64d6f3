"""A storage backend of TransferQueue. The process that calls ``transfer_queue.init`` first imports this module before,
and names the backend: ``{"backend": {"storage_backend": "RayTorchRpc"}}``.

Storage units are actors of a group that each process joins at its first put or get. A unit keeps CPU tensors where the
put has brought them: on one host in memory that it shares with the producer. Rows of a get that do not come in one
piece are copied into the packed tensor that TransferQueue returns. GPU tensors stay in the producer; the unit knows
where they are.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import mmap
import os
import pickle
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, cast

import ray
import torch

import raytorchrpc as rtr
from raytorchrpc.calls.receive_into import Window
from raytorchrpc.integrations.joined import Joined
from raytorchrpc.integrations.versions import adapted_to
from raytorchrpc.lanes.base import Copies
from raytorchrpc.process.locks import Lock
from raytorchrpc.process.this_process import default_capacity
from raytorchrpc.process.threads import in_thread
from raytorchrpc.tensors.host_device_copy import copy_into
from raytorchrpc.text import size_in_bytes

with adapted_to("TransferQueue"):
    from omegaconf import OmegaConf
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
    from tensordict import NonTensorStack, TensorDict
    from transfer_queue.metadata import extract_field_schema
    from transfer_queue.storage.bootstrap.provider import StorageBootstrapProvider
    from transfer_queue.storage.managers.base import StorageManager, StorageManagerFactory
    from transfer_queue.storage.managers.simple_storage_manager import AsyncSimpleStorageManager, RoutingGroup
    from transfer_queue.storage.simple_storage import StorageKeyNotFoundError
    from transfer_queue.utils.common import get_node_round_robin_scheduling_strategies

logger = logging.getLogger(__name__)

NAME = "RayTorchRpc"
#: Settings below ``backend.RayTorchRpc``. The first three are SimpleStorage's.
DEFAULTS = {
    "num_data_storage_units": 2,
    "total_storage_size": None,  # samples in all units; None: no limit
    "required_node_resource": None,
    "unit_bytes": None,  # that a unit keeps, such as "64GiB"; None: a quarter of the memory that its process may use
    "group": "_transferqueue",
    "timeout": 200.0,  # of a put, get or clear (seconds)
}
#: So many consecutive samples are in one unit: a batch then crosses in few pieces.
_CHUNK = 64
#: More pieces of smaller rows than this are copied together in the unit (pieces, bytes).
_PIECES, _SMALL = 16, 64 << 10
#: How often a call is sent again, to a unit that Ray restarts meanwhile.
_RETRY = 3
_HUGE_PAGE = 2 << 20
dumps: Callable[[Any], bytes] = ray.cloudpickle.dumps
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


# --- rows ------------------------------------------------------------------------------------------------------------


class Pickled(bytes):
    """A row that is no tensor: only who gets it unpickles it, so that units need no class of the user's."""


_ATOMS = {str, int, float, bool, bytes, type(None), Pickled}


class Kind(NamedTuple):
    """What rows need to have in common, so that they can be packed into one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of a row but for its first dimension."""
    is_scalar: bool
    """The rows have no dimension. They lie as if they had one."""


@dataclass(frozen=True)
class Elsewhere:
    """Rows on a GPU of the member that has put them."""

    owner: str
    number: int
    """Of the block there, and where in it they are."""
    begin: int = 0
    end: int = 0

    def __getitem__(self, part: slice) -> Elsewhere:
        return replace(self, begin=self.begin + part.start, end=self.begin + part.stop)


class Block:
    """Rows of one field that were put together."""

    kept = 0
    """How many of the rows the unit still has."""

    def __init__(self, values: Any, starts: Sequence[int], kind: Kind | None) -> None:
        """
        Args:
            values: a tensor in which all rows lie behind each other, or Elsewhere; or a list of ``Pickled`` and atoms.
            starts: where each row begins, and the end of the last.
            kind: of the rows of a tensor.
        """
        self.values, self.starts, self.kind = values, starts, kind

    def __reduce__(self) -> tuple[Any, ...]:
        return Block, (self.values, self.starts, self.kind)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def nbytes(self) -> int:
        return sum(map(sys.getsizeof, self.values)) if self.kind is None else getattr(self.values, "nbytes", 0)

    def cut(self, begin: int, end: int) -> Block:
        """Some of its rows, of the same memory."""
        starts = self.starts[begin : end + 1]
        return Block(self.values[starts[0] : starts[-1]], [start - starts[0] for start in starts], self.kind)

    def rows(self, fetch: Callable[[Elsewhere], Any]) -> Any:
        """Each row; objects as they are kept. ``fetch`` brings those that are elsewhere."""
        if self.kind is None:
            return self.values
        values: Any = fetch(self.values) if isinstance(self.values, Elsewhere) else self.values
        return values.unbind() if self.kind.is_scalar else values.split(self.lengths)

    @property
    def lengths(self) -> list[int]:
        """Of the first dimension of each row."""
        return [end - begin for begin, end in itertools.pairwise(self.starts)]

    @classmethod
    def of(cls, rows: Any) -> Block:
        """Rows as TransferQueue has them: a tensor, a nested one, or objects. Views a tensor's memory if it can."""
        if isinstance(rows, torch.Tensor):
            rows = rows.detach()
            if not rows.is_nested:
                length = rows.shape[1] if rows.dim() > 1 else 1
                values = rows.flatten(0, 1) if rows.dim() > 1 else rows
                starts = range(0, len(values) + 1, length) if length else [0] * (len(rows) + 1)
                return cls(values, starts, Kind(rows.dtype, tuple(rows.shape[2:]), rows.dim() == 1))
            if rows.layout is torch.jagged and rows.lengths() is None and rows._ragged_idx == 1:
                values = rows.values()
                return cls(values, rows.offsets().tolist(), Kind(rows.dtype, tuple(values.shape[1:]), False))
            rows = rows.unbind()
        rows = rows.tolist() if isinstance(rows, NonTensorStack) else [*rows]
        kinds = {Kind(row.dtype, tuple(row.shape[1:]), not row.dim()) if _is_plain(row) else None for row in rows}
        if len(kinds) > 1 or None in kinds:
            rows = [row if type(row) in _ATOMS else Pickled(dumps(row)) for row in rows]
            return cls(rows, range(len(rows) + 1), None)
        values = [row.detach()[None] if row.dim() == 0 else row.detach() for row in rows]
        return cls(torch.cat(values), [0, *itertools.accumulate(map(len, values))], kinds.pop())


def _is_plain(row: Any) -> bool:
    return type(row) is torch.Tensor and row.layout is torch.strided and row.is_cpu


class Batch:
    """The rows of one field that a get brings: what receives them, and what TransferQueue returns of them."""

    def __init__(self, count: int, pieces: Sequence[tuple[Sequence[int], Block]], is_here: bool = False) -> None:
        """``count``: of all rows. ``pieces``: rows that come together, with their positions in the batch. ``is_here``:
        there is one piece, whose tensor has arrived.
        """
        self._pieces, kinds = pieces, {piece.kind for _, piece in pieces}
        self._rows: Any = [None] * count
        self._packed: torch.Tensor | None = None
        self.targets: list[Any]
        """What receives the tensor of each piece; None if that has none."""
        if len(kinds) > 1 or not all(_is_tensor(piece) for _, piece in pieces):
            self.targets = [_target(piece) for _, piece in pieces]
            return
        kind: Any = kinds.pop()
        lengths = [0] * count
        for positions, piece in pieces:
            for position, length in zip(positions, piece.lengths, strict=True):
                lengths[position] = length
        ends = [0, *itertools.accumulate(lengths)]
        values: Any = pieces[0][1].values if is_here else _empty((ends[-1], *kind.shape), kind.dtype)
        self._packed = values
        if not all(_is_run(positions) for positions, _ in pieces):
            self._rows = values.split(lengths)
        self.targets = [
            values[ends[positions[0]] : ends[positions[-1] + 1]] if _is_run(positions) else _target(piece)
            for positions, piece in pieces
        ]
        if not kind.is_scalar:
            offsets, least, most = torch.tensor(ends), min(lengths), max(lengths)
            self._packed = torch.nested.nested_tensor_from_jagged(values, offsets, min_seqlen=least, max_seqlen=most)

    def result(self, fetch: Callable[[Elsewhere], torch.Tensor]) -> Any:
        """A jagged tensor, or what else TransferQueue makes of the rows, once the targets are filled."""
        for (positions, piece), target in zip(self._pieces, self.targets, strict=True):
            if self._packed is None:
                rows = Block(target if _is_tensor(piece) else piece.values, piece.starts, piece.kind).rows(fetch)
                for position, row in zip(positions, rows, strict=True):
                    self._rows[position] = pickle.loads(row) if type(row) is Pickled else row
            elif not _is_run(positions):
                copy_into([self._rows[position] for position in positions], target.split(piece.lengths))
        return AsyncSimpleStorageManager._pack_field_values(self._rows) if self._packed is None else self._packed


def _is_tensor(piece: Block) -> bool:
    return isinstance(piece.values, torch.Tensor)


def _is_run(positions: Sequence[int]) -> bool:
    return positions[-1] - positions[0] + 1 == len(positions)


def _target(piece: Block) -> torch.Tensor | None:
    if piece.kind is None or not _is_tensor(piece):
        return None
    return torch.empty((piece.starts[-1], *piece.kind.shape), dtype=piece.kind.dtype)


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Like ``torch.empty``. A large one is in huge pages: the kernel provides those several times as fast."""
    tensor = torch.empty(shape, dtype=dtype)
    begin = -(-tensor.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
    if (size := tensor.data_ptr() + tensor.nbytes - begin) >= _HUGE_PAGE:
        _madvise(begin, size // _HUGE_PAGE * _HUGE_PAGE, mmap.MADV_HUGEPAGE)  # if that fails, nothing changes
    return tensor


# --- a unit ----------------------------------------------------------------------------------------------------------


class Unit:
    """The actor that keeps rows. Its methods are quick, and can run again."""

    def __init__(self, name: str, samples: int | None, nbytes: int | None) -> None:
        self._name, self._samples, self._room = name, samples, nbytes or default_capacity()
        self._life = os.urandom(8).hex()
        self._columns = defaultdict[str, dict[int, tuple[Block, int]]](dict)
        """By field and index: the block, and which row of it."""
        self._indexes, self._held = set[int](), 0
        self._lock = Lock()

    @rtr.method(concurrent=True, retry=_RETRY)
    def put(self, parts: list[tuple[list[int], dict[str, Block]]]) -> str:
        """Keep rows, by index: of each part. Returns an id of this process. Raises ValueError without room."""
        size = sum(block.nbytes for _, fields in parts for block in fields.values())
        with self._lock:
            indexes = self._indexes.union(*[own for own, _ in parts])
            if self._samples is not None and len(indexes) > self._samples:
                raise ValueError(
                    f"Storage capacity exceeded: {self._name} has room for {self._samples} samples; clear some, "
                    f"or raise backend.{NAME}.total_storage_size"
                )
            if self._held + size > self._room:
                raise ValueError(
                    f"Storage capacity exceeded: {self._name} keeps {self._held} of {self._room} bytes, and {size} "
                    f"were put; clear samples, or raise backend.{NAME}.unit_bytes or num_data_storage_units"
                )
            self._indexes, replaced = indexes, list[tuple[Block, int] | None]()
            for own, fields in parts:
                for field, block in fields.items():
                    column, block.kept = self._columns[field], len(block)
                    replaced += map(column.get, own)
                    column.update(zip(own, ((block, row) for row in range(len(block))), strict=True))
                    self._held += block.nbytes
            released = self._drop(replaced)
        _release(released)
        return self._life

    @rtr.method(concurrent=True, retry=_RETRY)
    def get(self, fields: list[str], runs: list[list[int]]) -> list[list[Block]]:
        """Rows by field, in the order of their indexes. ``runs``: indexes of rows that follow each other in the batch.

        Raises StorageKeyNotFoundError.
        """
        with self._lock:
            return [_pieces([self._rows(field, run) for run in runs]) for field in fields]

    @rtr.method(concurrent=True, retry=_RETRY)
    def clear(self, indexes: list[int]) -> None:
        """Drop these rows of all fields."""
        with self._lock:
            rows = [column.pop(index, None) for column in self._columns.values() for index in indexes]
            released = self._drop(rows)
            self._indexes.difference_update(indexes)
        _release(released)

    @rtr.method(concurrent=True)
    def stats(self) -> dict[str, int]:
        """What it keeps, and the most bytes that it may."""
        with self._lock:
            return {"samples": len(self._indexes), "bytes": self._held, "most_bytes": self._room}

    @rtr.method(concurrent=True)
    def save(self, path: str) -> None:
        """Write all rows to a file, with tensors on the CPU."""
        with self._lock:
            columns = {field: dict(column) for field, column in self._columns.items()}
        rows = {
            field: {index: _own(*block.cut(row, row + 1).rows(_fetch)) for index, (block, row) in column.items()}
            for field, column in columns.items()
        }
        with open(path, "wb") as file:
            pickle.dump(rows, file, pickle.HIGHEST_PROTOCOL)

    @rtr.method(concurrent=True)
    def load(self, path: str) -> None:
        """Have the rows of a file, instead of those that it has."""
        with open(path, "rb") as file:
            columns = pickle.load(file)
        self.clear([*self._indexes])
        self.put([([*rows], {field: Block.of([*rows.values()])}) for field, rows in columns.items() if rows])

    def _rows(self, field: str, indexes: list[int]) -> list[tuple[Block, int]]:
        column = self._columns.get(field, {})
        try:
            return [column[index] for index in indexes]
        except KeyError as missing:
            raise StorageKeyNotFoundError(
                f"{self._name} has no key {missing} of field {field!r}: it was never put, or cleared, or this unit has "
                f"restarted and lost it"
            ) from None

    def _drop(self, rows: Sequence[tuple[Block, int] | None]) -> list[Block]:
        """Returns the blocks of which that were the last rows."""
        released = list[Block]()
        for block, _ in filter(None, rows):
            block.kept -= 1
            if not block.kept:
                self._held -= block.nbytes
                released.append(block)
        return released


def _pieces(runs: list[list[tuple[Block, int]]]) -> list[Block]:
    """See ``Unit.get``."""
    spans = list[tuple[Block, int, int]]()  # rows that follow each other both in a block and in the batch
    for run in runs:
        last, end = None, 0
        for block, row in run:
            begin = spans.pop()[1] if block is last and row == end else row
            last, end = block, row + 1
            spans.append((block, begin, end))
    pieces = [block.cut(begin, end) for block, begin, end in spans]
    if len(pieces) <= _PIECES or sum(piece.nbytes for piece in pieces) > _SMALL * len(pieces):
        return pieces
    if len({piece.kind for piece in pieces}) > 1 or not all(map(_is_tensor, pieces)):
        return pieces
    starts = [0, *itertools.accumulate(length for piece in pieces for length in piece.lengths)]
    return [Block(torch.cat([piece.values for piece in pieces]), starts, pieces[0].kind)]


def _own(row: Any) -> Any:
    """In memory of its own: the file of a view would hold all that it views."""
    return row.clone() if isinstance(row, torch.Tensor) else row


def _fetch(rows: Elsewhere) -> torch.Tensor:
    (tensor,) = rtr.rpc_sync(rows.owner).rows([rows], True)
    return cast("torch.Tensor", tensor)


def _release(blocks: Sequence[Block]) -> None:
    """Tell the owners of blocks that are elsewhere that nobody needs them."""
    numbers = defaultdict[str, list[int]](list)
    for block in blocks:
        if isinstance(block.values, Elsewhere):
            numbers[block.values.owner].append(block.values.number)
    for owner, own in numbers.items():
        with suppress(rtr.RayTorchRpcError):  # it has ended, and its tensors with it
            rtr.rpc_async(owner).release(own).add_done_callback(rtr.Future.exception)


# --- a process that puts and gets ------------------------------------------------------------------------------------


class Participant:
    """This process in the group of a storage, and the rows on GPUs that it has put. Thread-safe."""

    of_generation: ClassVar[dict[str, Participant]] = {}
    lock = Lock()

    def __init__(self, group: str) -> None:
        self.users, self.membership = 0, Joined(group, "client", self)
        self._numbers = itertools.count()
        self._lent: dict[int, tuple[Block, str]] = {}
        """By number: a block, and the unit that knows of it."""
        self._lives: dict[str, str] = {}

    def call(self, member: str, **options: Any) -> Any:
        """As ``rpc_async``. Joins the group first, if necessary, which blocks; raises BootstrapError, NotAMember, and
        PeerLost for a member that has left.
        """
        group = self.membership.join()
        target = next((each for each in group.members if each.name == member), None)
        if target is None:
            cause = f"it has left group {group.name!r} for good, with what it kept"
            raise rtr.PeerLost(member, cause, may_have_run=False)
        return rtr.rpc_async(target, **options)

    def takes_gpu(self, owner: str) -> bool:
        """Whether a tensor on a GPU of that member arrives on a GPU of this process."""
        return bool(self.membership.join().device_map(owner, self.membership.name))

    def lend(self, unit: str, block: Block, lent: set[int]) -> Block:
        """What the unit keeps instead of a block on a GPU, whose number is added to ``lent``.

        This process keeps a copy, as the tensor may be written to after the put. Blocks until the GPU has made it.
        """
        if not _is_tensor(block) or not self.stays(block.values):
            return block
        number, values = next(self._numbers), block.values.clone()
        _finish(values)
        self._lent[number] = Block(values, block.starts, block.kind), unit
        lent.add(number)
        return Block(Elsewhere(cast("str", self.membership.name), number), block.starts, block.kind)

    @staticmethod
    def stays(values: torch.Tensor) -> bool:
        """Whether rows are not to leave the GPU until they are read."""
        return values.is_cuda

    def confirm(self, unit: str, life: str, numbers: set[int]) -> None:
        """A unit keeps these. If it has restarted, it has lost the others."""
        if self._lives.setdefault(unit, life) != life:
            self._lives[unit] = life
            self.release([number for number, (_, to) in [*self._lent.items()] if to == unit and number not in numbers])

    @rtr.method(concurrent=True)
    def rows(self, wanted: list[Elsewhere], on_cpu: bool) -> list[torch.Tensor]:
        """Rows that are here. Raises StorageKeyNotFoundError."""
        lent = [self._lent.get(each.number) for each in wanted]
        if None in lent:
            raise StorageKeyNotFoundError(f"{self.membership.name} has not all of these rows: they were cleared")
        tensors = [block.values[of.begin : of.end] for (block, _), of in zip(filter(None, lent), wanted, strict=True)]
        return [tensor.cpu() for tensor in tensors] if on_cpu else tensors

    @rtr.method(concurrent=True)
    def release(self, numbers: Iterable[int]) -> None:
        """Nobody needs these blocks any more."""
        for number in numbers:
            self._lent.pop(number, None)


@StorageManagerFactory.register(NAME)
class RayTorchRpcStorageManager(AsyncSimpleStorageManager):
    """The puts and gets of one client, each on a thread of its own. Waits for a unit while Ray restarts it."""

    _is_open = False

    def __init__(self, controller_info: Any, config: Any, zmq_context: Any = None) -> None:
        StorageManager.__init__(self, controller_info, config, zmq_context=zmq_context)
        self.storage_unit_infos = dict.fromkeys(config["units"])
        self._timeout = float(config["timeout"])
        with Participant.lock:
            participant = Participant(config["group"])
            self._here = Participant.of_generation.setdefault(config["generation"], participant)
            self._here.users += 1
        self._is_open = True

    def close(self) -> None:
        """Leave the group, unless another client of this process is in it."""
        if self._is_open:
            self._is_open = False
            with Participant.lock:
                self._here.users -= 1
            if not self._here.users:
                self._here.membership.leave()
        super().close()

    def _call(self, member: str, into: Window | None = None) -> Any:
        return self._here.call(member, timeout=self._timeout, into=into)

    def _group_by_hash(self, global_indexes: list[int]) -> dict[str, RoutingGroup]:
        """Indexes and positions in the batch, by unit."""
        units, groups = [*self.storage_unit_infos], dict[str, RoutingGroup]()
        for position, index in enumerate(global_indexes):
            group = groups.setdefault(units[index // _CHUNK % len(units)], RoutingGroup([], []))
            group.global_indexes.append(index)
            group.batch_positions.append(position)
        return groups

    async def put_data(self, data: TensorDict, metadata: Any, data_parser: Any = None) -> None:
        """See StorageManager. Raises RayTorchRpcError, which names the unit; ValueError if a unit has no room."""
        if data_parser is not None:
            raise NotImplementedError("data_parser is only supported by the backend SimpleStorage")
        if metadata.size:
            schema = extract_field_schema(data)
            fields = [*data.keys()]  # items() would wrap arrays
            await in_thread(self._put, {field: data[field] for field in fields}, metadata.global_indexes)
            await self.notify_data_update(metadata.partition_ids[0], metadata.global_indexes, schema)

    def _put(self, data: dict[str, Any], global_indexes: list[int]) -> None:
        here, calls = self._here, list[tuple[str, set[int], rtr.Future[str]]]()
        for rows in data.values():
            _finish(rows)
        blocks = {field: Block.of(rows) for field, rows in data.items()}
        with ExitStack() as undo:
            for unit, (indexes, positions) in self._group_by_hash(global_indexes).items():
                parts, lent = list[tuple[list[int], dict[str, Block]]](), set[int]()
                undo.callback(here.release, lent)
                for begin, end in _runs(positions):
                    rows = positions[begin], positions[end - 1] + 1
                    cut = {field: here.lend(unit, block.cut(*rows), lent) for field, block in blocks.items()}
                    parts.append((indexes[begin:end], cut))
                calls.append((unit, lent, self._call(unit).put(parts)))
            lives = rtr.gather(*[call for *_, call in calls])
            undo.pop_all()
        for (unit, lent, _), life in zip(calls, lives, strict=True):
            here.confirm(unit, life, lent)

    async def get_data(self, metadata: Any) -> TensorDict:
        """See StorageManager. Raises StorageKeyNotFoundError, also for what a unit has lost, and RayTorchRpcError."""
        if metadata.size == 0:
            return TensorDict({}, batch_size=0)
        try:
            rows = await in_thread(self._get, metadata.field_names, metadata.global_indexes)
        except rtr.PeerLost as lost:
            logger.warning("a get of %d samples starts again: %s", metadata.size, lost)
            rows = await in_thread(self._get, metadata.field_names, metadata.global_indexes)
        return TensorDict(rows, batch_size=metadata.size)

    def _get(self, fields: list[str], global_indexes: list[int]) -> dict[str, Any]:
        asked = []
        for unit, (indexes, positions) in self._group_by_hash(global_indexes).items():
            window, runs = Window(), [indexes[begin:end] for begin, end in _runs(positions)]
            asked.append((positions, window, self._call(unit, window).get(fields, runs)))
        answers = [(positions, window, call.wait()) for positions, window, call in asked]
        batches, (_, first, pieces) = list[Batch](), answers[0]
        if is_whole := len(answers) == 1 and all(
            len(field) == 1 for field in pieces
        ):  # there is nothing to put together
            tensors = iter(first.take())
            for (piece,) in pieces:
                piece.values = next(tensors) if _is_tensor(piece) else piece.values
        for place in range(len(fields)):
            placed = [each for positions, _, answer in answers for each in _placed(positions, answer[place])]
            batches.append(Batch(len(global_indexes), placed, is_whole))
        targets = [iter(batch.targets) for batch in batches]
        for _, window, answer in () if is_whole else answers:
            goals = [next(own) for own, pieces in zip(targets, answer, strict=True) for _ in pieces]
            window.make(Copies.whole([goal for goal in goals if goal is not None]))
        brought = self._fetch([piece.values for _, _, answer in answers for pieces in answer for piece in pieces])
        return {field: batch.result(brought.__getitem__) for field, batch in zip(fields, batches, strict=True)}

    def _fetch(self, values: Iterable[Any]) -> dict[Elsewhere, torch.Tensor]:
        """Those that are elsewhere, by one call of each owner."""
        by_owner = defaultdict[str, list[Elsewhere]](list)
        for rows in values:
            if isinstance(rows, Elsewhere):
                by_owner[rows.owner].append(rows)
        calls = {owner: self._call(owner).rows(own, not self._here.takes_gpu(owner)) for owner, own in by_owner.items()}
        return {
            rows: tensor
            for owner, own in by_owner.items()
            for rows, tensor in zip(own, calls[owner].wait(), strict=True)
        }

    async def _ask(self, unit: str, method: str, *args: Any) -> None:
        await in_thread(lambda: getattr(self._call(unit), method)(*args).wait())

    async def _clear_single_storage_unit(self, global_indexes: list[int], target_storage_unit: str) -> None:
        await self._ask(target_storage_unit, "clear", global_indexes)

    async def _save_single_storage_unit(self, path: str, target_storage_unit: str) -> None:
        await self._ask(target_storage_unit, "save", path)

    async def _load_single_storage_unit(self, path: str, target_storage_unit: str) -> None:
        await self._ask(target_storage_unit, "load", path)

    def stats(self) -> dict[str, dict[str, int]]:
        """By unit: samples and bytes that it keeps, and the most bytes that it may. Blocks."""
        calls = {unit: self._call(unit).stats() for unit in self.storage_unit_infos}
        return {unit: call.wait() for unit, call in calls.items()}


def _finish(rows: Any) -> None:
    """Block until a tensor is made, if it is on a GPU, by whichever stream: the thread of a put does not know it."""
    if getattr(rows, "is_cuda", False):
        torch.cuda.synchronize(rows.device)


def _runs(positions: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Begin and end of each part of ascending numbers that has no gap."""
    begin = 0
    for end in range(1, len(positions) + 1):
        if end == len(positions) or positions[end] != positions[end - 1] + 1:
            yield begin, end
            begin = end


def _placed(positions: list[int], pieces: Sequence[Block]) -> Iterator[tuple[list[int], Block]]:
    """The positions of each of the pieces that have all of them together."""
    begin = 0
    for piece in pieces:
        yield positions[begin : begin + len(piece)], piece
        begin += len(piece)


# --- the process that starts a storage -------------------------------------------------------------------------------


class Registration:
    """Part of the configuration that TransferQueue brings to every process: to unpickle it loads this module there."""


class Storage:
    """Units and their group. They end when ``transfer_queue.close`` drops this."""

    def __init__(self, units: Mapping[str, Any], group: rtr.Group) -> None:
        weakref.finalize(self, _end, units, group).atexit = False


def _end(units: Mapping[str, Any], group: rtr.Group) -> None:
    group.shutdown()
    for unit in units.values():
        ray.kill(unit)


@StorageBootstrapProvider.register_provider(NAME)  # type: ignore[untyped-decorator, unused-ignore]
def start(conf: Any) -> Storage:
    """Start units, and form their group. Raises ConfigurationError for settings other than ``DEFAULTS``."""
    given = OmegaConf.to_container(conf.backend[NAME]) if NAME in conf.backend else {}
    if unknown := given.keys() - DEFAULTS:
        raise rtr.ConfigurationError(f"backend.{NAME} has no settings {sorted(unknown)}; it has {[*DEFAULTS]}")
    settings: dict[str, Any] = DEFAULTS | given
    count, samples, room = settings["num_data_storage_units"], settings["total_storage_size"], settings["unit_bytes"]
    if isinstance(room, str) and (room := size_in_bytes(room)) is None:
        raise rtr.ConfigurationError(f"backend.{NAME}.unit_bytes is a number of bytes, or text such as '64GiB'")
    if not isinstance(count, int) or count < 1:
        raise rtr.ConfigurationError(f"backend.{NAME}.num_data_storage_units is at least 1, not {count!r}")
    if not isinstance(settings["timeout"], (int, float)):
        raise rtr.ConfigurationError(f"backend.{NAME}.timeout is a number of seconds, not {settings['timeout']!r}")
    nodes = get_node_round_robin_scheduling_strategies(count, required_node_resource=settings["required_node_resource"])
    units = dict[str, Any]()
    for number, node in enumerate(nodes):
        place = NodeAffinitySchedulingStrategy(node.node_id, soft=True)
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "scheduling_strategy": place}
        remote: Any = ray.remote(**options)(Unit)
        name = f"unit_{number}"
        units[name] = remote.remote(name, samples and samples // count + _CHUNK, room)  # their shares differ by a chunk
    group = rtr.init_group(units, name=settings["group"], config=rtr.GroupConfig.from_env(joinable_by="cluster"))
    settings |= {"units": [*units], "generation": group.generation, "registration": Registration()}
    OmegaConf.update(conf, f"backend.{NAME}", settings, force_add=True)
    return Storage(units, group)
