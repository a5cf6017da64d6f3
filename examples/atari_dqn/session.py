"""Starts and ends the actors of a run, and connects them by one transport."""

from __future__ import annotations

import queue
from contextlib import ExitStack
from typing import Any

import ray

import raytorchrpc as rtr

from .collector import Collector
from .learner import Learner
from .settings import Settings
from .transports import LANES, GroupTransport, RayTransport

#: Seconds for actors to start, which may require the cluster to add nodes.
START_S = 300
#: CPUs that each actor asks Ray for: a fraction, so that a machine with fewer cores than actors suffices.
CPUS = 0.5
#: GPUs that a learner asks for: a fraction, because its network is small.
GPUS = 0.25


class Session:
    """Runs a learner and its collectors until the ``with`` block ends."""

    def __init__(
        self, settings: Settings, transport: str, actions: int, state: dict[str, Any] | None = None, life: int = 0
    ) -> None:
        """``state``: the learner's, from a checkpoint. ``life``: how often the run was resumed."""
        self.settings, self.restarts = settings, 0
        self._transport_name, self._actions, self._state = transport, actions, state
        self._life = 1_000 * life
        self._ending = ExitStack()
        self._changes: queue.SimpleQueue[rtr.Change] = queue.SimpleQueue()
        self._down: set[int] = set()  # collectors that have died and are not running again
        self._back: set[int] = set()  # collectors that have rejoined the group

    def __enter__(self) -> Session:
        try:
            self._start()
        except BaseException:
            self._ending.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.close()

    def _start(self) -> None:
        settings = self.settings
        # Two threads each, so that stop() and the end of the group do not wait for train() or run().
        each: dict[str, Any] = {"num_cpus": CPUS, "max_concurrency": 2}
        gpus = GPUS if settings.device == "cuda" else 0
        depth = settings.depth * settings.collectors
        if self._transport_name == "ray":
            self._transport: Any = RayTransport(depth)
            self._ending.callback(self._transport.close)
        self.learner = ray.remote(Learner).options(**each, num_gpus=gpus).remote(settings, self._actions)
        self._ending.callback(ray.kill, self.learner)
        self.collectors = []
        for number in range(settings.collectors):
            self.collectors.append(ray.remote(Collector).options(**each, max_restarts=-1).remote(settings, number))
            self._ending.callback(ray.kill, self.collectors[-1])
        self.routes = "plain Ray: its queue and its object store"
        if self._transport_name != "ray":
            members = {"learner": self.learner}
            members |= {f"collector_{number}": actor for number, actor in enumerate(self.collectors)}
            config = rtr.GroupConfig.from_env(lanes=LANES[self._transport_name])
            name = f"atari-{self._transport_name}"
            group = rtr.init_group(members, name=name, config=config, timeout=START_S)
            self._ending.callback(group.shutdown)
            group.on_change(self._changes.put)
            self._transport, self.routes = GroupTransport(depth), str(group.routes())
        self._steps = ray.get(self.learner.begin.remote(self._transport, self._state), timeout=START_S)
        self._runs = {self._run(number): number for number in range(settings.collectors)}
        self._ending.callback(self._end)

    def _end(self) -> None:
        """Tells the collectors that the run ends, so that the end of the transport is no error to them."""
        ends = [collector.end.remote() for collector in self.collectors]
        ray.wait(ends, num_returns=len(ends), timeout=10)

    def _run(self, number: int) -> Any:
        return self.collectors[number].run.remote(self._transport, self._steps, self._life)

    def train(self, iterations: int) -> Any:
        """Starts ``iterations`` and returns a handle for ``finished``."""
        return self.learner.train.remote(iterations)

    def finished(self, training: Any, timeout_s: float) -> dict[str, Any] | None:
        """Returns the learner's statistics, or None after ``timeout_s``. Restarts collectors that died meanwhile.

        Raises errors of the learner, and of a collector that did not die.
        """
        ready, _ = ray.wait([training, *self._runs], num_returns=1, timeout=timeout_s)
        for run in ready:
            if run is not training:
                self._check_failure(run)
        self._resume_collectors()
        if training in ready:
            progress: dict[str, Any] = ray.get(training, timeout=timeout_s)
            self._steps = progress["steps"]
            return progress
        return None

    def _check_failure(self, run: Any) -> None:
        number = self._runs.pop(run)
        try:
            ray.get(run)
        except ray.exceptions.RayActorError:
            self._down.add(number)

    def _resume_collectors(self) -> None:
        """Calls ``run`` again on collectors that Ray has restarted and the group has readmitted."""
        while not self._changes.empty():
            change = self._changes.get()
            named = {int(name.rpartition("_")[2]) for name in change.members if name.startswith("collector_")}
            self._back = self._back | named if change.kind == "back" else self._back - named
        ready = self._down if self._transport_name == "ray" else self._down & self._back
        for number in sorted(ready):
            self.restarts, self._life = self.restarts + 1, self._life + 1
            self._runs[self._run(number)] = number
        self._down, self._back = self._down - ready, self._back - ready
