"""Engines read the KV blocks of prompts out of each other's caches. Knows no engine.

A scheduler keeps a ``Ledger``: what its workers are to do in the next step. A ``Worker`` has ``Holds`` for those that
read its cache, and reads those of others; its process is a ``Peer`` in a group of such workers.
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
from typing import Any, ClassVar, NamedTuple, cast

import ray
import torch

import raytorchrpc as rtr
from raytorchrpc.integrations.engines import check_fields
from raytorchrpc.integrations.joined import Joined
from raytorchrpc.patterns.regions.reading import expect_reads, read_here
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

    holds: list[tuple[int, str]] = field(default_factory=list)
    """Numbers and requests."""
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
        """By request: those whose blocks are not read yet."""
        self._computed: dict[str, int] = {}
        """By request: how many of its tokens this engine had when it last asked."""
        self._step = Step()

    def arrive(self, request_id: str, parameters: Mapping[str, Any] | None) -> None:
        """A request has come."""
        if (prompt := Prompt.of(parameters)) is not None:
            self._prompts[request_id] = prompt

    def matched(self, request_id: str, prompt_tokens: int, computed: int) -> int:
        """How many tokens can be read beyond the first ``computed`` ones. The last one of the prompt is computed here,
        to have the next.
        """
        if (prompt := self._prompts.get(request_id)) is None:
            return 0
        self._computed[request_id] = computed
        return max(0, min(prompt.tokens, prompt_tokens - 1) - computed)

    def allocated(self, request_id: str, blocks: Blocks, external: int) -> None:
        """A request has blocks, of which those of ``external`` tokens are to be read. Each prompt is read once: a
        request that comes again, as it failed or was preempted, is computed here.
        """
        begin = self._computed.pop(request_id, 0)
        if (prompt := self._prompts.pop(request_id, None)) is None:
            return
        if external:
            self._step.loads.append(Load(request_id, prompt, self._rows(prompt, blocks, begin, begin + external)))
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
        self._computed.pop(request_id, None)
        if (unread := self._prompts.pop(request_id, None)) is not None:
            self._step.drops.append(unread)
        if not parameters or not parameters.get(_REMOTE_DECODE) or not is_complete or not self.sources:
            return None
        number, ids = next(self._numbers), [list(group) for group in blocks]
        self._step.holds.append((number, request_id))
        prompt = Prompt(self.sources, number, ids, tokens, self._block_sizes, self._heads)
        return prompt.as_parameters(self._engine_id, request_id)

    def next_step(self, *, is_idle: bool) -> Step:
        """What has come together since the last one."""
        step, self._step = self._step, Step()
        step.is_idle = is_idle
        return step


@dataclass
class _Hold:
    until: float
    request_id: str | None = None
    """None: this worker's step has yet to come."""
    readers: int | None = None
    """Who is still to read; None: it is not known how many."""


class Holds:
    """Prompts whose blocks are not freed until they are read, or their time is over. Thread-safe.

    The scheduler holds the blocks of a prompt from its end on, so readers may be done before this worker is told. They
    need no permission: each reads, and then asks whether the blocks were held until now.
    """

    def __init__(self, seconds: float) -> None:
        """``seconds``: for which a prompt is held that nobody reads."""
        self._seconds = seconds
        self._held: dict[int, _Hold] = {}
        self._newest = 0
        self._lock = locks.Lock()

    def add(self, number: int, request_id: str) -> None:
        """Report when the blocks of a request need not be held any more. Numbers ascend."""
        with self._lock:
            self._hold(number).request_id = request_id
            self._newest = number

    def release(self, number: int, readers: int = 0) -> None:
        """One of so many readers has read a prompt; or, if 0, nobody will. Raises NotFound if it was no longer held, so
        that its blocks may have been written to.
        """
        with self._lock:
            hold = self._hold(number)
            hold.readers = (readers if hold.readers is None else hold.readers) - 1 if readers else 0

    def _hold(self, number: int) -> _Hold:
        if number not in self._held:
            if number <= self._newest:
                raise rtr.NotFound(f"prompt {number} is not held: its {self._seconds:g} s are over, or it was read")
            self._held[number] = _Hold(time.monotonic() + self._seconds)
        return self._held[number]

    def ended(self) -> set[str]:
        """The requests whose blocks need not be held any more; each is returned once."""
        with self._lock:
            over, now = dict[int, str](), time.monotonic()
            for number, hold in self._held.items():
                is_over = now > hold.until or (hold.readers is not None and hold.readers <= 0)
                if is_over and hold.request_id is not None:
                    over[number] = hold.request_id
            for number in over:
                del self._held[number]
            return set(over.values())

    def __len__(self) -> int:
        return len(self._held)


class Worker:
    """The cache of a worker of an engine: others read it, and it reads theirs, on threads of its own. Thread-safe."""

    read = failed = running = 0
    """How many prompts were read, could not be read, and are being read."""

    def __init__(
        self, groups: Sequence[Mapping[str, torch.Tensor]], rank: int, size: int, heads: int, settings: Settings
    ) -> None:
        """Joins the group. Blocks. ``groups``: of layers, the tensors of each by name. ``rank``: of ``size`` workers of
        the engine. Raises NotAMember, BootstrapError.
        """
        self._groups, self._rank, self._size, self._heads = groups, rank, size, heads
        self._device = next(tensor.device for group in groups for tensor in group.values())
        self._timeout, self._is_idle = settings.timeout_s, False
        self._workers = Workers("raytorchrpc-kv", _READS)
        self._done, self._failed = set[str](), set[str]()
        self._changed = locks.condition()
        self.holds, self._region = Holds(settings.hold_s), f"cache.{os.urandom(8).hex()}"
        self._peer = Peer.join(settings.group, self._region, self, max(60.0, self._timeout))
        self.source = Source(self._peer.name, self._region)

    def expose(self, group: str) -> rtr.Region:
        """Let the members of a group read this cache."""
        tensors = {name: tensor for layers in self._groups for name, tensor in layers.items()}
        if self._heads > 1:
            tensors |= dict(by_head(tensors, heads_of(self._rank, self._size, self._heads)))
        return rtr.Region(self._region, tensors, group=group)

    def begin(self, step: Step) -> None:
        """Begin what a step asks for, after what is queued on this thread's stream. ``results`` says what has ended."""
        queued, self._is_idle = None, step.is_idle
        if step.loads and self._device.type == "cuda":
            queued = torch.cuda.Event()  # type: ignore[no-untyped-call]
            queued.record(torch.cuda.current_stream(self._device))
        for hold in step.holds:
            self.holds.add(*hold)
        if step.loads:
            expect_reads(self._peer.group)
        for load in step.loads:
            with self._changed:
                self.running += 1
            self._workers.submit(self._run, load, queued)
        for prompt in step.drops:
            self._drop_all(prompt)

    def results(self) -> tuple[set[str], set[str], set[str]]:
        """Requests whose blocks were sent, were received, and of these, failed; each is returned once. While nothing is
        computed, waits for a moment, if there are none.
        """
        sent = self.holds.ended()
        with self._changed:
            if self._is_idle and not sent and not self._done and (self.holds or self.running):
                self._changed.wait(_IDLE_S)
            done, failed, self._done, self._failed = self._done, self._failed, set(), set()
            return sent, done, failed

    def close(self) -> None:
        """End the threads, after what they do; and leave the group, if this is the last worker of the process."""
        self._workers.stop()
        self._peer.leave(self._region)

    def _call(self, source: Source) -> Any:
        return rtr.rpc_async(source.member, timeout=self._timeout, group=self._peer.group)

    def _drop(self, source: Source, hold: int) -> None:
        with suppress(rtr.RayTorchRpcError):  # it has ended, and its blocks with it
            self._call(source).release(source.region, hold).add_done_callback(rtr.Future.exception)

    def _drop_all(self, prompt: Prompt) -> None:
        """Let the prefill engine free a prompt that is not read."""
        for source in prompt.sources if self._rank == 0 else ():
            self._drop(source, prompt.hold)

    def _run(self, load: Load, queued: Any) -> None:
        is_read = False
        try:
            if queued is not None:
                torch.cuda.set_device(self._device)
                torch.cuda.current_stream().wait_event(queued)
            if load.rows is None:
                self._drop_all(load.prompt)
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
        plan = reads_of(len(prompt.sources), self._size, self._heads)
        sources = {prompt.sources[rank]: sum(rank in each for each in plan) for rank in plan[self._rank]}
        with ExitStack() as undo:
            for source, heads in zip(sources, plan[self._rank].values(), strict=True):
                undo.callback(self._drop, source, prompt.hold)
                options = {"timeout": self._timeout, "group": self._peer.group, "last": False}
                for tensors, (there, here) in zip(self._groups, rows, strict=True):
                    if there:
                        into = self._into(tensors, heads)
                        read_here(source.member, source.region, into=into, rows=there, at=here, **options)
            for source, readers in sources.items():
                self._call(source).release(source.region, prompt.hold, readers).wait()
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
        self.group, self._timeout = group, timeout
        self._joined = Joined(group, "kv", self)
        self.name = cast("str", self._joined.name)
        self._has_left = threading.Event()
        self._workers: dict[str, tuple[Worker, rtr.Region]] = {}
        """By region."""

    @classmethod
    def join(cls, group: str, region: str, worker: Worker, timeout: float) -> Peer:
        """Join the group for a worker, unless this process has. Blocks. Raises NotAMember, BootstrapError."""
        with cls._joining:
            if (peer := cls._here.get(group)) is None:
                peer = cls(group, timeout)
                peer._enter()
                threads.start(peer._watch, name="raytorchrpc-kv-group")
                cls._here[group] = peer
            peer._workers[region] = worker, worker.expose(group)
            return peer

    def leave(self, region: str) -> None:
        """A worker ends, and if it is the last one, the membership."""
        with self._joining:
            if region in self._workers:
                self._workers.pop(region)[1].close()
            if not self._workers:
                self._here.pop(self.group, None)
                self._has_left.set()
                self._joined.leave()

    def _watch(self) -> None:
        while not self._has_left.wait(_WATCH_S):
            try:
                self._follow()
            except Exception as error:
                logger.warning("group %r of KV caches has ended, and is not there again yet: %s", self.group, error)

    def _follow(self) -> None:
        """Move to the group that has the name now, if the one of this process has lost its supervisor."""
        with self._joining:
            with suppress(rtr.NotAMember):
                if self._has_left.is_set() or self._joined.is_current(self._timeout):
                    return
            self._joined.leave()
            self._enter()
            for region, (worker, _) in self._workers.items():
                self._workers[region] = worker, worker.expose(self.group)

    def _enter(self) -> None:
        try:
            self._joined.join(self._timeout)
        except rtr.NotAMember:
            if not ray.is_initialized():
                raise
            options = {"name": self.group, "namespace": _NAMESPACE, "lifetime": "detached", "get_if_exists": True}
            host: Any = ray.remote(Host).options(num_cpus=0, max_restarts=-1, **options).remote()
            ray.get(host.form.remote(self.group), timeout=self._timeout)
            self._joined.join(self._timeout)

    @rtr.method(concurrent=True)
    def release(self, region: str, *args: Any) -> None:
        """See ``Holds``."""
        if region not in self._workers:
            raise rtr.NotFound(f"{self.name} has no cache {region!r}: the prompt was of an engine that has ended")
        self._workers[region][0].holds.release(*args)


class Host:
    """The actor that forms the group and supervises it, for as long as the cluster lasts."""

    def form(self, group: str) -> None:
        """Idempotent."""
        try:
            rtr.get_group(group)
        except rtr.NotAMember:
            config = rtr.GroupConfig.from_env(joinable_by="cluster")
            rtr.init_group([], name=group, include_driver=True, config=config)
