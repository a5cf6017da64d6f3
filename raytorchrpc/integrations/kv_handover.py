"""Engines read the KV blocks of prompts out of each other's caches. Knows no engine.

A scheduler keeps a ``Ledger``: what its workers are to do in the next step. A worker has ``Holds`` for those that read
its cache, and a ``Reader`` of the caches of others; its process is a ``Peer`` in a group of such workers.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple

import ray
import torch

import raytorchrpc as rtr
from raytorchrpc._compat import ray_internals
from raytorchrpc.group.tickets import find_ticket
from raytorchrpc.integrations.engines import check_fields
from raytorchrpc.process import locks, threads
from raytorchrpc.process.workers import Workers

logger = logging.getLogger(__name__)

#: Names of vLLM's in the parameters of a request, which proxies set and pass on; and the one that has what is ours.
_REMOTE_PREFILL, _REMOTE_DECODE, _BLOCKS, _OURS = (
    "do_remote_prefill",
    "do_remote_decode",
    "remote_block_ids",
    "raytorchrpc",
)
#: Reads of one worker at a time.
_READS = 16
#: How long a step without computation waits for a read to end; how often a process looks for its group (seconds).
_IDLE_S, _WATCH_S = 0.002, 10.0
_AGAIN_S = 0.2
#: Of the actors that supervise groups, in Ray.
_NAMESPACE = "raytorchrpc.kv"

Blocks = Sequence[Sequence[int]]
"""Ids by group of layers, in the order of a request's tokens. 0: none, as the tokens have left the window."""


@dataclass
class Settings:
    """What ``kv_connector_extra_config`` takes.

    Attributes:
        group: of the engines' workers. The first one forms it, unless a program has, with ``joinable_by="cluster"``.
        hold_s: for how long a prefill engine holds the blocks of a prompt that nobody reads (seconds).
        timeout_s: of a read; then the decode engine computes the prompt itself (seconds).
    """

    group: str = "_kv-caches"
    hold_s: float = 120.0
    timeout_s: float = 30.0

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Settings:
        """Raises ConfigurationError, which names what is wrong."""
        if unknown := given.keys() - cls.__dataclass_fields__:
            known = [*cls.__dataclass_fields__]
            raise rtr.ConfigurationError(f"kv_connector_extra_config has no {sorted(unknown)}; it has {known}")
        settings = cls(**given)
        check_fields(settings)
        return settings


class Source(NamedTuple):
    """A worker whose cache others read. The region is new in each process: blocks of an earlier one are not found."""

    member: str
    region: str


def heads_of(rank: int, size: int, heads: int) -> range:
    """The KV heads of a rank of ``size``. Where there are more ranks than heads, several have the same one."""
    begin = rank * heads // size
    return range(begin, max(begin + 1, (rank + 1) * heads // size))


def reads_of(sources: int, readers: int, heads: int) -> list[dict[int, list[int]]]:
    """For each rank of the readers: the ranks that it reads from, and which heads; none: whole layers."""
    if sources == readers:
        return [{rank: []} for rank in range(readers)]
    plan = list[dict[int, list[int]]]()
    for rank in range(readers):
        plan.append({})
        for head in heads_of(rank, readers, heads):
            owners = [source for source in range(sources) if head in heads_of(source, sources, heads)]
            plan[-1].setdefault(owners[rank % len(owners)], []).append(head)
    return plan


def _ids(blocks: Blocks) -> list[int]:
    return sorted({block for group in blocks for block in group if block})


def _settle(read: rtr.Read) -> None:
    """Wait until a read writes no more. Before, its blocks must not be given to another request."""
    with suppress(rtr.RayTorchRpcError):
        read.wait()


def by_head(tensors: Mapping[str, torch.Tensor], heads: range) -> Iterator[tuple[str, torch.Tensor]]:
    """Views of each head of layers that are (blocks, ..., heads, tokens, width), as LAYER:HEAD."""
    for name, tensor in tensors.items():
        if tensor.dim() >= 4 and tensor.shape[-3] == len(heads):
            yield from ((f"{name}:{head}", tensor.select(-3, number)) for number, head in enumerate(heads))


@dataclass(frozen=True)
class Prompt:
    """The blocks of a prompt in another engine."""

    sources: list[Source]
    """By rank."""
    hold: int
    blocks: Blocks
    tokens: int
    block_sizes: list[int]
    """By group of layers."""
    heads: int

    def as_parameters(self, engine_id: str, request_id: str) -> dict[str, Any]:
        """For the decode engine, in plain JSON; with names of vLLM's own connectors, at which a proxy may look."""
        names = {"remote_engine_id": engine_id, "remote_request_id": request_id, "tp_size": len(self.sources)}
        handover = [self.sources, self.hold, self.tokens, self.block_sizes, self.heads]
        there = {"remote_host": None, "remote_port": None, _BLOCKS: self.blocks}
        return {_REMOTE_PREFILL: True, _REMOTE_DECODE: False, **names, **there, _OURS: handover}

    @classmethod
    def of(cls, parameters: Mapping[str, Any] | None) -> Prompt | None:
        """None: the request names no blocks elsewhere, or those of another connector."""
        if not parameters or not parameters.get(_REMOTE_PREFILL) or not (handover := parameters.get(_OURS)):
            return None
        sources, hold, *others = handover
        return cls([Source(*each) for each in sources], hold, parameters[_BLOCKS], *others)


@dataclass(frozen=True)
class Load:
    """A prompt that a worker is to read. ``rows``: blocks there and here, by group; None: the caches do not fit."""

    request_id: str
    prompt: Prompt
    rows: list[tuple[list[int], list[int]]] | None


@dataclass
class Step:
    """What workers are to do in the next step of their engine."""

    holds: list[tuple[int, str, list[int]]] = field(default_factory=list)
    """Number, request and blocks."""
    loads: list[Load] = field(default_factory=list)
    drops: list[Prompt] = field(default_factory=list)
    """Prompts elsewhere that nobody here will read."""
    is_idle: bool = False
    """Nothing is computed."""


class Ledger:
    """The side of a scheduler: which blocks cross."""

    def __init__(self, engine_id: str, block_sizes: list[int], heads: int) -> None:
        self.sources: list[Source] = []
        """This engine's workers, by rank."""
        self._engine_id, self._block_sizes, self._heads = engine_id, block_sizes, heads
        self._numbers = itertools.count(1)
        self._prompts: dict[str, Prompt] = {}
        """By request: those whose blocks have not been asked for."""
        self._step = Step()

    def arrive(self, request_id: str, parameters: Mapping[str, Any] | None) -> None:
        """A request has come."""
        if (prompt := Prompt.of(parameters)) is not None:
            self._prompts[request_id] = prompt

    def matched(self, request_id: str, prompt_tokens: int, computed: int) -> int:
        """How many tokens can be read beyond the first ``computed`` ones. The last one of the prompt is computed here,
        to have the next. Changes nothing.
        """
        prompt = self._prompts.get(request_id)
        return 0 if prompt is None else max(0, min(prompt.tokens, prompt_tokens - 1) - computed)

    def allocated(self, request_id: str, prompt_tokens: int, blocks: Blocks, external: int) -> None:
        """A request has blocks, of which those of ``external`` tokens are to be read. Each prompt is read once: a
        request that comes again, as it failed or was preempted, is computed here.
        """
        if (prompt := self._prompts.pop(request_id, None)) is None:
            return
        end = min(prompt.tokens, prompt_tokens - 1)
        if external:
            self._step.loads.append(Load(request_id, prompt, self._rows(prompt, blocks, end - external, end)))
        else:
            self._step.drops.append(prompt)

    def _rows(self, prompt: Prompt, blocks: Blocks, begin: int, end: int) -> list[tuple[list[int], list[int]]] | None:
        sizes, theirs = self._block_sizes, prompt.block_sizes
        if theirs != sizes or len(prompt.blocks) != len(blocks):
            text = "a prompt is computed here again: blocks have %s tokens there and %s here, by group of layers; "
            logger.warning(text + "give both engines the same model and block_size", theirs, sizes)
            return None
        rows = []
        for size, there, here in zip(sizes, prompt.blocks, blocks, strict=True):
            wanted = [place for place in range(begin // size, -(-end // size)) if here[place]]
            if any(place >= len(there) or not there[place] for place in wanted):
                logger.info("a prompt is computed here again: a block has left the window of the prefill engine")
                return None
            rows.append(([there[place] for place in wanted], [here[place] for place in wanted]))
        return rows

    def finished(
        self, request_id: str, parameters: Mapping[str, Any] | None, blocks: Blocks, tokens: int, *, is_complete: bool
    ) -> dict[str, Any] | None:
        """A request has ended. The parameters for the engine that decodes it, for which its blocks are held from now
        on; None: there is none. ``is_complete``: it was not aborted.
        """
        if (unread := self._prompts.pop(request_id, None)) is not None:
            self._step.drops.append(unread)
        if not parameters or not parameters.get(_REMOTE_DECODE) or not is_complete or not self.sources:
            return None
        number, ids = next(self._numbers), [list(group) for group in blocks]
        self._step.holds.append((number, request_id, _ids(ids)))
        prompt = Prompt(self.sources, number, ids, tokens, self._block_sizes, self._heads)
        return prompt.as_parameters(self._engine_id, request_id)

    def next_step(self, *, is_idle: bool) -> Step:
        """What has come together since the last one."""
        step, self._step = self._step, Step()
        step.is_idle = is_idle
        return step


@dataclass
class _Hold:
    rows: list[int]
    until: float
    request_id: str | None = None
    """None: this worker's step has yet to come."""
    readers: int | None = None
    """Who is still to come; None: it is not known how many."""
    leases: list[rtr.Lease] = field(default_factory=list)


class Holds:
    """Blocks that are not freed until they are read, their time is over, or their reader is lost. Thread-safe.

    The scheduler holds the blocks of a prompt from its end on, so readers may come before this worker is told.
    """

    def __init__(self, name: str, tensors: Mapping[str, torch.Tensor], group: str, seconds: float) -> None:
        """See ``Region``. ``seconds``: for which blocks are held that nobody reads."""
        self._expose, self._seconds = partial(rtr.Region, name, tensors, group=group), seconds
        self.region = self._expose()
        self._held: dict[int, _Hold] = {}
        self._newest = 0
        self._lock = locks.Lock()

    def expose_again(self) -> None:
        """This process is in another group of the name: the leases of the earlier one have ended."""
        with self._lock:
            self.region = self._expose()

    def add(self, number: int, request_id: str, rows: list[int]) -> None:
        """Report when the blocks of a request need not be held any more. Numbers ascend."""
        with self._lock:
            self._hold(number, rows).request_id = request_id
            self._newest = number

    def take(self, number: int, rows: list[int], reader: str, readers: int, reads: int) -> rtr.Lease:
        """A lease for one of ``readers``, which reads so often. Raises NotFound if the blocks are no longer held."""
        with self._lock:
            hold = self._hold(number, rows)
            lease = self.region.lease(hold.rows, timeout=self._seconds, reader=reader, reads=reads)
            hold.leases.append(lease)
            hold.readers = (readers if hold.readers is None else hold.readers) - 1
            return lease

    def drop(self, number: int) -> None:
        """Nobody will read these blocks, or nobody else."""
        with self._lock, suppress(rtr.NotFound):
            self._hold(number, []).readers = 0

    def _hold(self, number: int, rows: list[int]) -> _Hold:
        if number not in self._held:
            if number <= self._newest:
                raise rtr.NotFound(f"prompt {number} is not held: its {self._seconds:g} s are over, or it was read")
            self._held[number] = _Hold(rows, time.monotonic() + self._seconds)
        return self._held[number]

    def ended(self) -> set[str]:
        """The requests whose blocks need not be held any more; each is returned once."""
        with self._lock:
            over, now = dict[int, str](), time.monotonic()
            for number, hold in self._held.items():
                is_read = hold.readers is not None and hold.readers <= 0
                is_over = (is_read or now > hold.until) and all(lease.done() for lease in hold.leases)
                if is_over and hold.request_id is not None:
                    over[number] = hold.request_id
            for number in over:
                del self._held[number]
            return set(over.values())

    def __len__(self) -> int:
        return len(self._held)


class Reader:
    """Reads prompts into this worker's cache, on threads of its own. Thread-safe."""

    read = failed = 0
    """How many prompts were read, and could not be."""
    running = 0

    def __init__(
        self, peer: Peer, groups: Sequence[Mapping[str, torch.Tensor]], rank: int, size: int, heads: int, timeout: float
    ) -> None:
        """``groups``: of layers, the tensors of each by name. ``rank``: of ``size`` workers of the engine."""
        self._peer, self._groups, self._timeout = peer, groups, timeout
        self._rank, self._size, self._heads = rank, size, heads
        self._device = next(tensor.device for group in groups for tensor in group.values())
        self._workers = Workers("raytorchrpc-kv", _READS)
        self._done, self._failed = set[str](), set[str]()
        self._changed = locks.condition()

    def start(self, load: Load) -> None:
        """Read a prompt, after what is queued on this thread's stream. ``finished`` says when it is there."""
        queued = None
        if self._device.type == "cuda":
            queued = torch.cuda.Event()  # type: ignore[no-untyped-call]
            queued.record(torch.cuda.current_stream(self._device))
        with self._changed:
            self.running += 1
        self._workers.submit(self._run, load, queued)

    def drop(self, prompt: Prompt) -> None:
        """Let the prefill engine free a prompt that is not read."""
        for source in prompt.sources if self._rank == 0 else ():
            self._drop(source, prompt.hold)

    def finished(self, *, waits: bool) -> tuple[set[str], set[str]]:
        """The requests whose reads have ended, and those of them that failed; each is returned once.

        ``waits``: for a moment, if there are none.
        """
        with self._changed:
            if waits and not self._done:
                self._changed.wait(_IDLE_S)
            done, failed, self._done, self._failed = self._done, self._failed, set(), set()
            return done, failed

    def close(self) -> None:
        """End the threads, after what they do."""
        self._workers.stop()

    def _call(self, source: Source) -> Any:
        return rtr.rpc_async(source.member, timeout=self._timeout, group=self._peer.group)

    def _drop(self, source: Source, hold: int) -> None:
        with suppress(rtr.RayTorchRpcError):  # it has ended, and its blocks with it
            self._call(source).drop(source.region, hold).add_done_callback(rtr.Future.exception)

    def _run(self, load: Load, queued: Any) -> None:
        is_read = False
        try:
            if queued is not None:
                torch.cuda.set_device(self._device)
                torch.cuda.current_stream().wait_event(queued)
            if load.rows is None:
                self.drop(load.prompt)
            else:
                self._read(load.prompt, load.rows)
                is_read = True
        except Exception as error:
            level = logging.WARNING if isinstance(error, rtr.RayTorchRpcError) else logging.ERROR
            logger.log(level, "the prompt of request %s is computed here again: %s", load.request_id, error)
        with self._changed:
            self.running -= 1
            self.read, self.failed = self.read + is_read, self.failed + (not is_read)
            self._done.add(load.request_id)
            self._failed |= set() if is_read else {load.request_id}
            self._changed.notify_all()

    def _read(self, prompt: Prompt, rows: Sequence[tuple[list[int], list[int]]]) -> None:
        if prompt.heads != self._heads:
            raise rtr.ConfigurationError(f"the prefill engine's model has {prompt.heads} KV heads, not {self._heads}")
        plan, until = reads_of(len(prompt.sources), self._size, self._heads), time.monotonic() + self._timeout
        used, reads = [group for group, (there, _) in enumerate(rows) if there], list[rtr.Read]()
        held = _ids(prompt.blocks)
        with ExitStack() as undo:
            asked = []
            for rank, heads in plan[self._rank].items():
                source, readers = prompt.sources[rank], sum(rank in each for each in plan)
                lease = self._call(source).take(source.region, prompt.hold, held, self._peer.name, readers, len(used))
                undo.callback(self._drop, source, prompt.hold)
                asked.append((source, heads, lease))
            for source, heads, granted in asked:
                lease = granted.wait()
                undo.callback(lease.release)
                for group in used:
                    into, at = self._into(self._groups[group], heads), rows[group][1]
                    options = {"lease": lease, "timeout": max(0.001, until - time.monotonic())}
                    read = partial(rtr.read, source.member, source.region, group=self._peer.group, **options)
                    reads.append(read(rows=rows[group][0], into=into, at=at))
                    undo.callback(_settle, reads[-1])
            for each in reads:
                each.wait()
            undo.pop_all()
        for rank, source in enumerate(prompt.sources if self._rank == 0 else ()):
            if not any(rank in each for each in plan):  # it has the same heads as another one
                self._drop(source, prompt.hold)

    def _into(self, tensors: Mapping[str, torch.Tensor], heads: list[int]) -> dict[str, torch.Tensor]:
        if not heads:
            return dict(tensors)
        views = dict(by_head(tensors, heads_of(self._rank, self._size, self._heads)))
        names = [f"{name}:{head}" for name in tensors for head in heads]
        if missing := [name for name in names if name not in views]:
            raise rtr.ConfigurationError(f"{missing[0]} is no head here: give both engines one tensor_parallel_size")
        return {name: views[name] for name in names}


class Peer:
    """This process in the group of caches, which all its workers share. Thread-safe."""

    _here: ClassVar[dict[str, Peer]] = {}
    _joining: ClassVar[Any] = locks.Lock()

    def __init__(self, group: str, timeout: float) -> None:
        self.group, self.name, self._timeout = group, f"kv.{os.getpid()}.{os.urandom(4).hex()}", timeout
        self._joined: rtr.Group | None = None
        self._has_left = threading.Event()
        self.holds: dict[str, Holds | None] = {}
        """Of each worker, by region."""

    @classmethod
    def join(cls, group: str, region: str, timeout: float) -> Peer:
        """Join the group for a worker, unless this process has. Blocks. Raises NotAMember, BootstrapError."""
        with cls._joining:
            if (peer := cls._here.get(group)) is None:
                peer = cls(group, timeout)
                peer._joined = _join(group, peer, timeout)
                threads.start(peer._watch, name="raytorchrpc-kv-group")
                cls._here[group] = peer
            peer.holds[region] = None
            return peer

    def leave(self, region: str) -> None:
        """A worker ends, and if it is the last one, the membership."""
        with self._joining:
            if (holds := self.holds.pop(region, None)) is not None:
                holds.region.close()
            if not self.holds and self._joined is not None:
                self._here.pop(self.group, None)
                self._has_left.set()
                joined, self._joined = self._joined, None
                joined.leave()

    def _watch(self) -> None:
        while not self._has_left.wait(_WATCH_S):
            try:
                self._follow()
            except Exception as error:
                logger.warning("group %r of KV caches has ended, and is not there again yet: %s", self.group, error)

    def _follow(self) -> None:
        """Move to the group that has the name now, if the one of this process has lost its supervisor."""
        with self._joining:
            if self._joined is None or self._is_current(self._joined.generation):
                return
            self._joined.leave()
            self._joined = _join(self.group, self, self._timeout)
            for holds in filter(None, self.holds.values()):
                holds.expose_again()

    def _is_current(self, generation: str) -> bool:
        try:
            ticket = find_ticket(self.group, time.monotonic() + self._timeout)
        except rtr.NotAMember:
            return False
        return ticket.record.credentials.generation == generation

    @rtr.method(concurrent=True)
    def take(self, region: str, *args: Any) -> rtr.Lease:
        """See ``Holds``, also for the other method."""
        return self._of(region).take(*args)

    @rtr.method(concurrent=True)
    def drop(self, region: str, number: int) -> None:
        self._of(region).drop(number)

    def _of(self, region: str) -> Holds:
        if (holds := self.holds.get(region)) is None:
            raise rtr.NotFound(f"{self.name} has no cache {region!r}: the prompt was of an engine that has ended")
        return holds


class Host:
    """The actor that forms the group and supervises it, for as long as the cluster lasts."""

    def form(self, group: str) -> None:
        """Idempotent."""
        try:
            rtr.get_group(group)
        except rtr.NotAMember:
            config = rtr.GroupConfig.from_env(joinable_by="cluster")
            rtr.init_group([], name=group, include_driver=True, config=config)


def _join(group: str, peer: Peer, timeout: float) -> rtr.Group:
    if not ray.is_initialized():
        try:
            ray.init(address=ray_internals.cluster_above() or "auto", log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError as unreachable:
            raise rtr.NotAMember(
                f"the KV caches of engines are in group {group!r} of a Ray cluster, and no Ray runs on this host: "
                f"start the engine in the cluster, or with RAY_ADDRESS"
            ) from unreachable
    until = time.monotonic() + timeout

    def join() -> rtr.Group:
        while True:
            try:
                return rtr.join(group, name=peer.name, instance=peer, timeout=timeout)
            except (rtr.ConfigurationError, rtr.BootstrapError):  # a process of this actor was killed as it joined
                if time.monotonic() > until:
                    raise
                threads.pause(_AGAIN_S)

    with suppress(rtr.NotAMember):
        return join()
    options = {"name": group, "namespace": _NAMESPACE, "lifetime": "detached", "get_if_exists": True}
    host: Any = ray.remote(Host).options(num_cpus=0, max_restarts=-1, **options).remote()
    ray.get(host.form.remote(group), timeout=timeout)
    return join()
