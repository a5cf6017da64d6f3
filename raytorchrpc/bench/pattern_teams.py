"""In the driver of ``--pattern``: the actors of one row, from their start to their end, and one measurement by them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from functools import partial
from itertools import count
from statistics import median
from typing import Any, NamedTuple

import ray
from ray.dag import InputNode
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import raytorchrpc as rtr
from raytorchrpc.bench.pairs import Failed, Stuck, get, one_line
from raytorchrpc.bench.pattern_actors import (
    LEAD_IN,
    AsyncGroupMember,
    AsyncMember,
    Calls,
    GroupMember,
    Member,
    Meter,
    Sample,
    Window,
    measure,
)
from raytorchrpc.bench.pattern_results import Turn
from raytorchrpc.bench.patterns import OURS, Case, Shape
from raytorchrpc.bench.transports import TIMEOUT_S

#: Ray's share of a GPU for each actor.
_GPU_SHARE = 0.01
#: Seconds until all callers of a case begin together, and until the callee's other method has started.
_START_S = 0.05
#: How many times longer a measurement is if the callee is busy, and if nothing is called.
_BUSY_TIMES, _IDLE_TIMES = 2, 10
#: Seconds that a busy callee goes on for, so that a caller that starts late still finds it busy.
_SPARE_S = 0.15
#: Samples of a row whose receiver must know their number in advance, and the bytes they may have together.
_EXCHANGES, _EXCHANGED_BYTES = 200, 4_000_000_000
#: Calls that a compiled graph may have in flight.
_GRAPH_CALLS = 64

_numbers = count()


class Place(NamedTuple):
    """Where actors run."""

    node: str
    """Node id."""
    gpus: Sequence[str]
    """Values of CUDA_VISIBLE_DEVICES, which the members take in turns; empty for CPU tensors."""


class Team:
    """The actors of one row in one shape."""

    def __init__(self, row: str, shape: Shape, place: Place) -> None:
        """Create the actors; returns before they have started."""
        self.row, self.shape = row, shape
        self.failed: str | None = None
        self.gpu_names: set[str] = set()
        self._pids: list[int] = []
        self._group: rtr.Group | None = None
        self._graph: Any = None
        self._actors = [self._start(rank, place) for rank in range(shape.members)]
        self._started = [actor.ready.remote() for actor in self._actors]

    def _start(self, rank: int, place: Place) -> Any:
        last = rank == self.shape.members - 1
        concurrency = self.shape.callee if last else self.shape.callers
        sync, coroutine = (GroupMember, AsyncGroupMember) if self.row == OURS else (Member, AsyncMember)
        # The recommended environment, also for the rows for comparison, which benefit from it too.
        env = dict(rtr.runtime_env()["env_vars"])
        if place.gpus:
            env["CUDA_VISIBLE_DEVICES"] = place.gpus[rank % len(place.gpus)]
        options: dict[str, Any] = {
            "num_cpus": 0,
            "num_gpus": _GPU_SHARE if place.gpus else 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(place.node, soft=False),
            "runtime_env": {"env_vars": env},
        }
        if concurrency:
            options["max_concurrency"] = concurrency
        return ray.remote(sync if concurrency else coroutine).options(**options).remote(bool(place.gpus))

    def open(self, timeout_s: float) -> None:
        """Wait for the actors and connect them. Raises Failed."""
        ready = get(self._started, timeout_s)
        self._pids = [pid for pid, _ in ready]
        self.gpu_names = {name for _, name in ready if name}
        if self.row == OURS:
            try:
                name = f"bench-{os.getpid()}-{next(_numbers)}"
                self._group = rtr.init_group(self._actors, name=name, timeout=timeout_s)
            except (rtr.RayTorchRpcError, RayTaskError, RayActorError) as error:
                raise Failed(one_line(error)) from error
        meeting = get(self._actors[0].open.remote(self.row, 0, self._actors, None), timeout_s)
        others = enumerate(self._actors[1:], 1)
        get([actor.open.remote(self.row, rank, self._actors, meeting) for rank, actor in others], timeout_s)

    def resume(self, timeout_s: float) -> None:
        """Begin a turn. Raises Failed."""
        if self.row == "ray-graph":
            try:
                with InputNode() as payload:
                    node = self._actors[-1].take.bind(payload)
                self._graph = node.experimental_compile(_max_inflight_executions=_GRAPH_CALLS)
            except Exception as error:  # a beta API: any exception is the row's reason
                raise Stuck(one_line(error)) from error
        elif self.row.startswith("bare-"):
            get([actor.resume.remote() for actor in self._actors], timeout_s)

    def pause(self, timeout_s: float) -> None:
        """End a turn: what polls while it is idle would disturb the other rows. Raises Failed."""
        if self._graph is not None:
            graph, self._graph = self._graph, None
            graph.teardown()
        elif self.row.startswith("bare-"):
            get([actor.pause.remote() for actor in self._actors], timeout_s)

    def turn(self, case: Case, window_s: float, timeout_s: float) -> Turn:
        """Measure a case once, for about ``window_s``. Raises Failed."""
        if case.pattern == "idle":
            return self._idle(window_s * _IDLE_TIMES)
        if self.row == "bare-nccl":
            fewest = max(5, min(_EXCHANGES, _EXCHANGED_BYTES // case.size))
            asked = [actor.exchange.remote(case, fewest, self._pids[-1]) for actor in self._actors]
            return summary(case, get(asked, timeout_s)[:1])
        work, window = None, Window(window_s)
        if case.busy:
            window_s *= _BUSY_TIMES
            window = Window(window_s, end=time.monotonic() + _START_S + window_s * (1 + LEAD_IN) + _SPARE_S)
            work = self._actors[-1].work.remote(case.busy, window.end)
            time.sleep(_START_S)
        samples = [self._call_graph(case, window)] if self._graph else self._call(case, window, timeout_s)
        if work is not None:
            get(work, timeout_s)
        return summary(case, samples)

    def _call(self, case: Case, window: Window, timeout_s: float) -> list[Sample]:
        last = self.shape.members - 1
        together = case.pattern == "all-to-all"
        callers = range(last + 1) if together else range(last)
        if len(callers) > 1:
            window = window._replace(start=time.monotonic() + _START_S)
        asked = []
        for rank in callers:
            peers = [peer for peer in callers if peer != rank] if together else [last]
            asked.append(self._actors[rank].measure.remote(case, peers, window, self._pids[last]))
        samples: list[Sample] = get(asked, timeout_s)
        return samples

    def _call_graph(self, case: Case, window: Window) -> Sample:
        def make(payload: Any = None) -> list[Calls]:
            send = partial(self._graph.execute, payload)
            return [Calls(lambda: send().get(TIMEOUT_S), send, lambda ref: ref.get(TIMEOUT_S))]

        try:
            return measure(make, case, "cpu", window, self._pids[-1])
        except Exception as error:  # a beta API
            raise Stuck(one_line(error)) from error

    def _idle(self, window_s: float) -> Turn:
        time.sleep(window_s / 4)
        begin, meters = time.monotonic(), list(map(Meter, self._pids))
        time.sleep(window_s)
        cpu_s = median(meter.used().cpu_s for meter in meters)
        return Turn(100 * cpu_s / (time.monotonic() - begin), [])

    def end(self, why: str) -> None:
        """Kill the actors and wait until their processes have ended; never raises."""
        self.failed = self.failed or why
        with contextlib.suppress(Exception):
            self.pause(0.0) if self._graph is not None else None
        for actor in self._actors if ray.is_initialized() else ():  # ray.kill would start Ray
            with contextlib.suppress(Exception):
                ray.kill(actor)
        if self._group is not None:
            with contextlib.suppress(Exception):
                self._group.shutdown(timeout=1)  # the members are dead; this frees the local state
            self._group = None
        limit = time.monotonic() + 5
        while any(os.path.exists(f"/proc/{pid}") for pid in self._pids) and time.monotonic() < limit:
            time.sleep(0.02)


def summary(case: Case, samples: Sequence[Sample]) -> Turn:
    """The turn that the samples of all callers make. Costs are per call; of a callee that is busy they are unknown."""
    peers = case.members - 1 if case.pattern == "all-to-all" else 1
    calls = sum(len(sample.seconds) for sample in samples) * peers
    rate = sum(len(sample.seconds) / sample.elapsed_s for sample in samples) * peers
    seconds = [each for sample in samples for each in sample.seconds]
    sides = 2 if case.pattern == "all-to-all" else 1  # there every process calls and is called
    switches = sum(sample.caller.switches for sample in samples) / calls / sides
    cpu_ms = sum(sample.caller.cpu_s for sample in samples) * 1e3 / calls / sides
    callee, served = samples[0].callee, rate * samples[0].elapsed_s
    known = sides == 1 and case.busy is None
    return Turn(
        value=rate if case.unit == "calls/s" else median(seconds) * 1e3,
        samples=[] if case.unit == "calls/s" else [each * 1e3 for each in seconds],
        switches=(switches, callee.switches / served if known else None),
        cpu_ms=(cpu_ms, callee.cpu_s * 1e3 / served if known else None),
    )
