"""The driver's side: the actors of a contestant, from their start to their end."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from concurrent import futures
from contextlib import AbstractContextManager, ExitStack
from itertools import count
from statistics import median
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import raytorchrpc as rtr
from raytorchrpc.bench import actors
from raytorchrpc.bench.actors import Member, Ready, Samples, Window
from raytorchrpc.bench.cases import Device, Failed, Skipped, Stuck
from raytorchrpc.bench.contestants import Contestant
from raytorchrpc.bench.links import LINKS, TIMEOUT_S, Link, get, one_line
from raytorchrpc.bench.patterns import Pattern, Shape
from raytorchrpc.bench.site import Site
from raytorchrpc.process import threads

#: Ray's share of a GPU for each actor. All teams run at once, each actor with its own CUDA context.
_GPU_SHARE = 0.01
#: Longest time until the actors of a team have started, beside those of so many others (seconds).
START_S = 240.0
#: Seconds until all callers begin together, and until the callee's other method has started.
_BEGIN_S = 0.05
#: How many times longer a turn is if the callee is busy, and if nothing is called.
_BUSY_TIMES, _IDLE_TIMES = 2, 10
#: Seconds that a busy callee goes on for, so that a caller that starts late still finds it busy.
_SPARE_S = 0.15
#: Samples of a turn whose receiver must know their number in advance, and the bytes they may have together.
_EXCHANGES, _EXCHANGED_BYTES = 100, 4_000_000_000

_numbers = count()


class Place(NamedTuple):
    """Where actors run, by rank; ranks beyond the last take turns.

    Ray chooses the GPU of an actor that requests a fraction, and fills one GPU before it uses the next. So the actors
    request a fraction, and their runtime environment sets CUDA_VISIBLE_DEVICES, which Ray does not override. The UUIDs
    show whether both ends got different GPUs.
    """

    nodes: Sequence[str]
    """Node ids."""
    gpus: Sequence[str | None] = ()
    """Values of CUDA_VISIBLE_DEVICES; None leaves the choice to Ray. Empty: no GPUs."""
    channels: frozenset[str] = frozenset()
    """The TensorPipe channels of this torch build."""

    @classmethod
    def at(cls, site: Site, patterns: bool, chosen: bool) -> Place:
        """Of patterns all GPUs, else at most two. ``chosen``: the user has named the nodes."""
        gpus: list[str | None] = []
        if site.has_gpus and chosen:
            gpus = [None, None]
        elif site.has_gpus:
            visible = [part for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part]
            gpus = [*(visible or map(str, range(site.a.gpus)))][: site.a.gpus]
            if not patterns:
                gpus = (gpus * 2)[:2] if len(gpus) == 1 else gpus[:2]
        return cls([site.a.node, site.b.node], gpus, frozenset(site.a.endpoint.tensorpipe_channels))


class Team:
    """The actors of a contestant."""

    def __init__(self, one: Contestant, place: Place, shape: Shape) -> None:
        """Create the actors; returns before they have started."""
        self.one, self.shape, self.place = one, shape, place
        self.failed: str | None = None
        """Why the actors are unusable."""
        self.ready: Sequence[Ready] = ()
        self.via: str | None = None
        """The lane that carried the tensors of the last turn, if that is known."""
        self._group: rtr.Group | None = None
        self._link: Link | None = None
        """If the driver holds it."""
        self._problem: str | None = None
        """Why the actors could not connect; empty if they could."""
        self._around: AbstractContextManager[Any] = ExitStack()
        self._by_torchrpc = one.options.get("tensor_transport") == rtr.rdt.TRANSPORT
        if self._by_torchrpc:
            rtr.rdt.enable()  # affects actors that are created afterwards
        self._actors = [self._start(rank) for rank in range(shape.members)]
        self._starting = [actor.ready.remote() for actor in self._actors]

    def _start(self, rank: int) -> Any:
        one, place, gpus = self.one, self.place, self.place.gpus
        kind = actors.GroupMember if one.link == "group" else actors.Member
        # The recommended environment, also for the contestants that are not ours, which benefit from it too.
        env = {**({} if rank in one.bare_ends else rtr.runtime_env()["env_vars"]), **one.env}
        if one.options.get("alone") and gpus:  # the one actor needs both GPUs
            env["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
            env["CUDA_VISIBLE_DEVICES"] = ",".join(dict.fromkeys(gpu for gpu in gpus if gpu is not None))
        elif gpus and (gpu := gpus[0 if one.one_gpu else rank % len(gpus)]) is not None:
            env["CUDA_VISIBLE_DEVICES"] = gpu
        options: dict[str, Any] = {
            "num_cpus": 0,
            "num_gpus": _GPU_SHARE if gpus else 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(place.nodes[rank % len(place.nodes)], soft=False),
            "runtime_env": {"env_vars": env},
        }
        if self.shape.threads > 1:
            options["max_concurrency"] = self.shape.threads
        by_ref: Any = {"enable_tensor_transport": True} if one.options.get("tensor_transport") else {"max_restarts": 0}
        return ray.remote(**by_ref)(kind).options(**options).remote(bool(gpus))

    def starts(self, timeout_s: float) -> bool:
        """Wait so long for the actors to start; returns whether they still do. Sets ``failed`` if they cannot."""
        _, late = ray.wait(self._starting, num_returns=len(self._starting), timeout=timeout_s)
        if not late and not self.ready:
            try:
                self.ready = get(self._starting, 0)
            except Failed as failure:
                self.end(str(failure))
        return bool(late)

    def open(self, timeout_s: float = START_S) -> None:
        """Connect the actors, once. Raises Failed, again each time."""
        if self._problem is None:
            self._problem = ""
            try:
                self._open(timeout_s)
            except Failed as failure:
                self._problem = str(failure)
        if self._problem:
            raise Failed(self._problem)

    def _open(self, timeout_s: float) -> None:
        one, link = self.one, LINKS[self.one.link]
        uuids = [ready.gpu for ready in self.ready if ready.gpu]
        if len(uuids) > 1 and not one.one_gpu and len(set(self.place.gpus)) > 1 and uuids[0] == uuids[1]:
            raise Failed(f"both actors got the same GPU ({uuids[0]})")
        if one.link == "group" or self._by_torchrpc:
            self._group = self._form(timeout_s)
        if (transport := one.options.get("tensor_transport")) in ("gloo", "nccl"):
            _collective_group(self._actors, transport, timeout_s)
        if link.in_driver:
            self._link = link(0, self._actors, False, dict(one.options))
            return
        common = self._actors, dict(one.options)
        meeting = get(self._actors[0].open.remote(one.link, 0, *common, None), timeout_s)
        others = enumerate(self._actors[1:], 1)
        get([actor.open.remote(one.link, rank, *common, meeting) for rank, actor in others], timeout_s)
        if not one.own_turn:
            self._call("resume", timeout_s)

    def _form(self, timeout_s: float) -> rtr.Group:
        one, settings = self.one, dict(self.one.config)
        if "channels" in settings:
            # torch builds without CUDA lack its channels, and members without a GPU must not open them.
            usable = {name for name in self.place.channels if self.place.gpus or "cuda" not in name}
            settings["channels"] = tuple(name for name in settings["channels"] if name in usable)
        members = dict(zip("abcdefghijkl", self._actors, strict=False))
        try:
            config = rtr.GroupConfig(rpc_timeout_s=TIMEOUT_S, **settings)
            name = f"bench-{os.getpid()}-{next(_numbers)}"
            group = rtr.init_group(members, name=name, config=config, timeout=timeout_s)
        except (rtr.RayTorchRpcError, RayTaskError, RayActorError) as error:
            raise Failed(one_line(error)) from error
        chosen = group.routes().route("a", "b").lanes("cpu")
        if one.over and not (chosen and one.over in chosen[0].how):
            group.shutdown(timeout=1)
            how = chosen[0].how if chosen else "no lane"
            raise Failed(f"this pair uses {how}, and no setting forces {one.over}")
        return group

    def _call(self, method: str, timeout_s: float, *args: Any) -> list[Any]:
        """Call a method of all actors at once. Raises Failed."""
        return list(get([getattr(actor, method).remote(*args) for actor in self._actors], timeout_s))

    def resume(self) -> None:
        """Begin the turns of a contestant that has its own. Raises Failed."""
        if self.one.around is not None:
            self._around = self.one.around(self._group)
            self._around.__enter__()
        self._call("resume", TIMEOUT_S)

    def pause(self) -> None:
        """End them: what polls while it is idle would disturb the others. Raises Failed."""
        self._call("pause", TIMEOUT_S)
        self._around.__exit__(None, None, None)

    # --- measurements --------------------------------------------------------------------------------------------

    def turn(self, device: Device, pattern: Pattern, size: int, window_s: float, timeout_s: float) -> float:
        """Measure once, for about ``window_s``; returns the figure in the unit of the pattern. Raises Failed."""
        if pattern.is_idle:
            return self._idle(window_s * _IDLE_TIMES)
        work, window = None, Window(window_s)
        if LINKS[self.one.link].two_sided:
            fewest = max(3, min(_EXCHANGES, _EXCHANGED_BYTES // size))
            window = Window(0.0, fewest=fewest, lead=max(2, fewest // 4))
        before = self._carried() if size else {}
        if pattern.busy:
            window_s *= _BUSY_TIMES
            window = Window(window_s, end=time.monotonic() + _BEGIN_S + window_s * (1 + actors.LEAD_IN) + _SPARE_S)
            work = self._actors[-1].work.remote(pattern.busy, window.end)
            time.sleep(_BEGIN_S)
        samples = self._measure(device, pattern, size, window, timeout_s)
        if work is not None:
            get(work, timeout_s)
        grown = {lane: sent - before.get(lane, 0) for lane, sent in self._carried().items()} if size else {}
        self.via = max(grown, key=lambda lane: grown[lane], default=None)
        if self.via is not None and self.one.carries and self.via not in self.one.carries:
            raise Skipped(f"uses {self.via} at this size")
        if pattern.unit == "ms":
            return median(seconds for sample in samples for seconds in sample.seconds) * 1e3
        peers = pattern.members - 1 if pattern.is_together else 1
        return sum(len(sample.seconds) / sample.elapsed_s for sample in samples) * peers

    def _measure(self, device: Device, pattern: Pattern, size: int, window: Window, timeout_s: float) -> list[Samples]:
        """What each caller measures in that window. Raises Failed."""
        method, last = "take_beside" if pattern.is_beside else "take", self.shape.members - 1
        if self._link is not None:
            payload = self._link.payload(device, size, pattern.tensors, Member(False).produce)
            try:
                return [self._link.run(actors.measure, [last], method, payload, pattern, window)]
            except Failed:
                raise
            except Exception as error:  # an alpha or beta API: any exception is the contestant's reason
                raise Stuck(one_line(error)) from error
        callers = range(last + 1) if pattern.is_together else range(max(1, last))
        if len(callers) > 1:
            window = window._replace(start=time.monotonic() + _BEGIN_S)
        asked = []
        for rank in callers:
            peers = [peer for peer in callers if peer != rank] if pattern.is_together else [last]
            asked.append(self._actors[rank].measure.remote(device, pattern, size, peers, window, method))
        if not LINKS[self.one.link].two_sided:
            return list(get(asked, timeout_s))
        served = self._actors[1].serve.remote(device, size, window.lead + window.fewest)
        try:
            return list(get([*asked, served], timeout_s)[:-1])
        except Failed as failure:  # the other end is still waiting
            raise Stuck(str(failure)) from failure

    def _carried(self) -> Mapping[str, int]:
        """Bytes per lane, from the group's statistics."""
        if self.one.link != "group" or self._group is None:
            return {}
        return {counted.lane: counted.bytes_out for counted in self._group.stats() if counted.caller == "a"}

    def _idle(self, window_s: float) -> float:
        time.sleep(window_s / 4)
        began, before = time.monotonic(), self._call("cpu_s", TIMEOUT_S)
        time.sleep(window_s)
        used = [after - start for start, after in zip(before, self._call("cpu_s", TIMEOUT_S), strict=True)]
        return 100.0 * float(median(used)) / (time.monotonic() - began)

    def drop(self) -> None:
        """Free the memory of the last size; never raises."""
        with contextlib.suppress(Failed):
            self._call("drop", TIMEOUT_S)

    def end(self, why: str) -> None:
        """Kill the actors; never raises."""
        self.failed = self.failed or why
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
        raise Stuck(f"Ray did not create the collective group within {timeout_s:.0f} s") from None
    except Exception as error:  # an alpha API: any exception is the contestant's reason
        raise Failed(one_line(error)) from error
