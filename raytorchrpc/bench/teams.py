"""The driver's side: the actors of a contestant, from their start to their end."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from concurrent import futures
from contextlib import nullcontext
from itertools import count
from statistics import median
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import raytorchrpc as rtr
from raytorchrpc.bench.actors import KINDS, LEAD_IN, TIMEOUT_S, get, one_line
from raytorchrpc.bench.cases import Device, Failed, Skipped
from raytorchrpc.bench.contestants import Contestant
from raytorchrpc.bench.patterns import Turn
from raytorchrpc.bench.site import Site
from raytorchrpc.process import threads

#: Ray's share of a GPU for each actor. All teams run at once, each actor with its own CUDA context.
_GPU_SHARE = 0.01
#: Longest time to wait for an answer of an actor in a turn (seconds).
_ANSWER_S = 60.0
#: How many times longer a turn is if the callee is busy, and if nothing is called.
_BUSY_TIMES, _IDLE_TIMES = 2, 10
#: Seconds until the callee's other method has started, and for which it goes on for a caller that starts late.
_BEGIN_S, _SPARE_S = 0.05, 0.15

_numbers = count()


class Team:
    """The actors of a contestant.

    Ray chooses the GPU of an actor that requests a fraction, and fills one GPU before it uses the next. So the actors
    request a fraction, and their runtime environment sets CUDA_VISIBLE_DEVICES, which Ray does not override. Between
    two nodes Ray chooses.
    """

    def __init__(self, one: Contestant, site: Site, device: Device, members: int, threads: int) -> None:
        """Create so many actors, which may run so many methods at once; returns before they have started."""
        self.one, self._site, self._device = one, site, device
        self.failed: str | None = None
        """Why the actors could not start or connect."""
        self._group: rtr.Group | None = None
        self._kind = KINDS[one.link]
        self._caller = self._kind(0, False, one.transport) if self._kind.in_driver else None
        self._by_torchrpc = one.transport == rtr.rdt.TRANSPORT
        if self._by_torchrpc:
            rtr.rdt.enable()  # affects actors that are created afterwards
        self._actors = [self._start(rank, threads) for rank in range(members)]

    def _start(self, rank: int, threads: int) -> Any:
        one, is_cuda = self.one, self._device == "cuda"
        # The recommended environment, also for the contestants that are not ours, which benefit from it too.
        env = {**({} if rank in one.bare_ends else rtr.runtime_env()["env_vars"]), **one.env}
        if is_cuda and (gpus := self._site.visible_gpus):
            env["CUDA_VISIBLE_DEVICES"] = gpus[0 if one.one_gpu else rank % len(gpus)]
            if one.alone:
                env |= {"CUDA_VISIBLE_DEVICES": ",".join(gpus[:2]), "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
        node = (self._site.a, self._site.b)[rank % 2].node
        options: dict[str, Any] = {
            "num_cpus": 0,
            "num_gpus": _GPU_SHARE if is_cuda else 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
            "runtime_env": {"env_vars": env},
        }
        if threads > 1:
            options["max_concurrency"] = threads
        by_ref: Any = {"enable_tensor_transport": True} if one.transport else {"max_restarts": 0}
        return ray.remote(**by_ref)(self._kind).options(**options).remote(rank, is_cuda, one.transport)

    def open(self, timeout_s: float) -> None:
        """Wait for the actors to start, and connect them; after a failure, ``failed`` says why. Blocks."""
        try:
            self._call("__ray_ready__", timeout_s)
            self._open(timeout_s)
        except Failed as failure:
            self.failed = str(failure)
            self.end()

    def _open(self, timeout_s: float) -> None:
        if self.one.link == "group" or self._by_torchrpc:
            self._group = self._form(timeout_s)
        if self.one.transport in ("gloo", "nccl"):
            _collective_group(self._actors, self.one.transport, timeout_s)
        if self._caller is not None:
            self._caller.open(self._actors, None)
            return
        meeting = get(self._actors[0].open.remote(self._actors, None), timeout_s)
        get([actor.open.remote(self._actors, meeting) for actor in self._actors[1:]], timeout_s)

    def _form(self, timeout_s: float) -> rtr.Group:
        settings = dict(self.one.config)
        if "channels" in settings and self._device == "cpu":  # a torch without CUDA has none of its channels
            settings["channels"] = tuple(name for name in settings["channels"] if "cuda" not in name)
        members = dict(zip("abcdefghijkl", self._actors, strict=False))
        try:
            config = rtr.GroupConfig(rpc_timeout_s=TIMEOUT_S, **settings)
            return rtr.init_group(
                members, name=f"bench-{os.getpid()}-{next(_numbers)}", config=config, timeout=timeout_s
            )
        except (rtr.RayTorchRpcError, RayTaskError, RayActorError) as error:
            raise Failed(one_line(error)) from error

    def _call(self, method: str, timeout_s: float = TIMEOUT_S) -> list[Any]:
        """Call a method of all actors at once. Raises Failed."""
        return list(get([getattr(actor, method).remote() for actor in self._actors], timeout_s))

    # --- measurements --------------------------------------------------------------------------------------------

    def turn(self, turn: Turn) -> tuple[float, str | None]:
        """Measure once. Raises Failed.

        Returns the figure in the unit of the pattern, and the lane that carried the tensors, if that is known.
        """
        if self._kind.polls:
            self._call("begin")
        before = self._carried() if turn.size else {}
        with self.one.around(self._group) if self.one.around else nullcontext():
            figure = self._idle(turn) if turn.pattern.is_idle else self._measure(turn)
        grown = {lane: sent - before.get(lane, 0) for lane, sent in self._carried().items()} if turn.size else {}
        via = max(grown, key=lambda lane: grown[lane], default=None)
        if self._kind.polls:
            self._call("end")
        if via is not None and self.one.carries and via not in self.one.carries:
            raise Skipped(f"uses {via} at this size")
        return figure, via

    def _measure(self, turn: Turn) -> float:
        work = None
        if turn.pattern.busy:
            turn = turn._replace(window_s=turn.window_s * _BUSY_TIMES)
            busy_s = _BEGIN_S + turn.window_s * (1 + LEAD_IN) + _SPARE_S
            work = self._actors[-1].work.remote(turn.pattern.busy, busy_s)
            time.sleep(_BEGIN_S)
        samples = self._samples(turn)
        if work is not None:
            get(work, _ANSWER_S)
        if turn.pattern.unit == "ms":
            return median(seconds for sample in samples for seconds in sample) * 1e3
        return sum(len(sample) / sum(sample) for sample in samples)

    def _samples(self, turn: Turn) -> list[list[float]]:
        """What each caller measures. Raises Failed."""
        last = len(self._actors) - 1
        if self._caller is not None:
            try:
                return [self._caller.measure(turn, [last])]
            except Failed:
                raise
            except Exception as error:  # an alpha or beta API: any exception is the contestant's reason
                raise Failed(one_line(error)) from error
        peers = {rank: [last] for rank in range(max(1, last))}
        if turn.pattern.is_together:
            peers = {rank: [peer for peer in range(last + 1) if peer != rank] for rank in range(last + 1)}
        return list(get([self._actors[rank].measure.remote(turn, called) for rank, called in peers.items()], _ANSWER_S))

    def _carried(self) -> Mapping[str, int]:
        """Bytes per lane, from the group's statistics."""
        if self.one.link != "group" or self._group is None:
            return {}
        return {counted.lane: counted.bytes_out for counted in self._group.stats() if counted.caller == "a"}

    def _idle(self, turn: Turn) -> float:
        """Median percents of a core that the actors take."""
        window_s = turn.window_s * _IDLE_TIMES
        time.sleep(window_s / 4)
        began, before = time.monotonic(), self._call("cpu_s")
        time.sleep(window_s)
        used = [after - start for start, after in zip(before, self._call("cpu_s"), strict=True)]
        return 100.0 * float(median(used)) / (time.monotonic() - began)

    def drop(self) -> None:
        """Free the memory of the last size; never raises."""
        with contextlib.suppress(Failed):
            self._call("drop")

    def end(self) -> None:
        """Kill the actors; never raises."""
        for actor in self._actors if ray.is_initialized() else ():  # ray.kill would start Ray
            with contextlib.suppress(Exception):
                ray.kill(actor)
        if self._group is not None:
            with contextlib.suppress(Exception):
                self._group.shutdown(timeout=1)  # the members are dead; this frees the local state
            self._group = None


def _collective_group(members: Sequence[Any], backend: str, timeout_s: float) -> None:
    """Create the collective group that Ray's two-sided transports need. Raises Failed."""
    from ray.experimental.collective import create_collective_group

    # create_collective_group has no timeout.
    created: futures.Future[Any] = futures.Future()
    threads.start(threads.settle, created, create_collective_group, list(members), backend, name="bench-rdt")
    try:
        created.result(timeout_s)
    except futures.TimeoutError:
        raise Failed(f"Ray did not create the collective group within {timeout_s:.0f} s") from None
    except Exception as error:  # an alpha API: any exception is the contestant's reason
        raise Failed(one_line(error)) from error
