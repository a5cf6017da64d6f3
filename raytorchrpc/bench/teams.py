"""The driver's side: the actors of a row, or of rows that share them, from their start to their end."""

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
from raytorchrpc.bench.actors import Member, Meter, Ready, Sample, Window
from raytorchrpc.bench.cases import Case, Row, Shape
from raytorchrpc.bench.links import LINKS, TIMEOUT_S, Failed, Link, Stuck, get, one_line
from raytorchrpc.bench.results import Device
from raytorchrpc.bench.site import Site
from raytorchrpc.process import threads

#: Ray's share of a GPU for each actor. All teams run at once, each actor with its own CUDA context.
_GPU_SHARE = 0.01
#: Seconds until all callers of a case begin together, and until the callee's other method has started.
_START_S = 0.05
#: How many times longer a measurement is if the callee is busy, and if nothing is called.
_BUSY_TIMES, _IDLE_TIMES = 2, 10
#: Seconds that a busy callee goes on for, so that a caller that starts late still finds it busy.
_SPARE_S = 0.15
#: Samples of a row whose receiver must know their number in advance, and the bytes they may have together.
_EXCHANGES, _EXCHANGED_BYTES = 200, 4_000_000_000

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


class Turn(NamedTuple):
    """What one repeat of one case of a pattern gave."""

    value: float
    """In the unit of the case."""
    samples: list[float]
    """Milliseconds of each call or round; empty for rates."""
    switches: tuple[float | None, float | None] = (None, None)
    """Per call, of the caller and of the callee."""
    cpu_ms: tuple[float | None, float | None] = (None, None)


class Team:
    """The actors of a row, or of rows that share them."""

    def __init__(self, row: Row, place: Place, shape: Shape) -> None:
        """Create the actors; returns before they have started."""
        self.name, self.shape, self.place = row.name, shape, place
        self.failed: str | None = None
        self.ready: Sequence[Ready] = ()
        self._group: rtr.Group | None = None
        self._links: dict[str, Link] = {}
        """Those that the driver holds, by row."""
        self._opened: dict[str, str | None] = {}
        """Rows whose links were opened, with the failure if there was one."""
        self._around: AbstractContextManager[Any] = ExitStack()
        if row.options.get("tensor_transport") == rtr.rdt.TRANSPORT:
            rtr.rdt.enable()  # affects actors that are created afterwards
        self._actors = [self._start(row, rank) for rank in range(shape.members)]
        self._starting = [actor.ready.remote() for actor in self._actors]

    def _start(self, row: Row, rank: int) -> Any:
        place, gpus = self.place, self.place.gpus
        concurrency = self.shape.callee if rank == self.shape.members - 1 else self.shape.callers
        sync, coroutine = (
            (actors.GroupMember, actors.AsyncGroupMember)
            if row.transport == "group"
            else (actors.Member, actors.AsyncMember)
        )
        # The recommended environment, also for the rows for comparison, which benefit from it too.
        env = {**({} if rank in row.bare_ends else rtr.runtime_env()["env_vars"]), **row.env}
        if row.options.get("alone") and gpus:  # the one actor needs both GPUs
            env["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
            env["CUDA_VISIBLE_DEVICES"] = ",".join(dict.fromkeys(gpu for gpu in gpus if gpu is not None))
        elif gpus and (gpu := gpus[0 if row.one_gpu else rank % len(gpus)]) is not None:
            env["CUDA_VISIBLE_DEVICES"] = gpu
        options: dict[str, Any] = {
            "num_cpus": 0,
            "num_gpus": _GPU_SHARE if gpus else 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(place.nodes[rank % len(place.nodes)], soft=False),
            "runtime_env": {"env_vars": env},
        }
        if concurrency > 1:
            options["max_concurrency"] = concurrency
        by_ref: Any = {"enable_tensor_transport": True} if row.options.get("tensor_transport") else {"max_restarts": 0}
        return ray.remote(**by_ref)(sync if concurrency else coroutine).options(**options).remote(bool(gpus))

    def starts(self, timeout_s: float) -> bool:
        """Wait so long for the actors to start; returns whether they still do. Sets ``failed`` if they cannot."""
        _, late = ray.wait(self._starting, num_returns=len(self._starting), timeout=timeout_s)
        if not late and not self.ready:
            try:
                self.ready = get(self._starting, 0)
            except Failed as failure:
                self.failed = str(failure)
        return bool(late)

    def open(self, row: Row, timeout_s: float) -> None:
        """Connect the actors for a row, once. Raises Failed."""
        if row.name not in self._opened:
            try:
                self._open(row, timeout_s)
                self._opened[row.name] = None
            except Failed as failure:
                self._opened[row.name] = str(failure)
        if (problem := self._opened[row.name]) is not None:
            raise Failed(problem)

    def _open(self, row: Row, timeout_s: float) -> None:
        uuids = [ready.gpu for ready in self.ready if ready.gpu]
        if len(uuids) > 1 and not row.one_gpu and len(set(self.place.gpus)) > 1 and uuids[0] == uuids[1]:
            raise Failed(f"both actors got the same GPU ({uuids[0]})")
        transport = row.options.get("tensor_transport")
        if self._group is None and (row.transport == "group" or transport == rtr.rdt.TRANSPORT):
            self._group = self._form(row, timeout_s)
        if transport in ("gloo", "nccl"):
            _collective_group(self._actors, transport, timeout_s)
        if LINKS[row.transport].in_driver:
            self._links[row.name] = LINKS[row.transport](0, self._actors, False, dict(row.options))
            return
        common = self._actors, dict(row.options)
        meeting = get(self._actors[0].open.remote(row.name, row.transport, 0, *common, None), timeout_s)
        others = enumerate(self._actors[1:], 1)
        get([a.open.remote(row.name, row.transport, rank, *common, meeting) for rank, a in others], timeout_s)
        if not row.own_turn:
            self._call("resume", timeout_s, row.name)

    def _form(self, row: Row, timeout_s: float) -> rtr.Group:
        settings = dict(row.config)
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
        if row.over and not (chosen and row.over in chosen[0].how):
            group.shutdown(timeout=1)
            how = chosen[0].how if chosen else "no lane"
            raise Failed(f"this pair uses {how}, and no setting forces {row.over}")
        return group

    def _call(self, method: str, timeout_s: float, *args: Any) -> None:
        """Call a method of all actors at once. Raises Failed."""
        get([getattr(actor, method).remote(*args) for actor in self._actors], timeout_s)

    def resume(self, row: Row, timeout_s: float) -> None:
        """Begin a turn of a row that has its own. Raises Failed."""
        if row.around is not None:
            self._around = row.around(self._group)
            self._around.__enter__()
        self._attend(row, "resume", timeout_s)

    def pause(self, row: Row, timeout_s: float) -> None:
        """End a turn: what polls while it is idle would disturb the other rows. Raises Failed."""
        self._attend(row, "pause", timeout_s)
        self._around.__exit__(None, None, None)

    def _attend(self, row: Row, method: str, timeout_s: float) -> None:
        if row.name not in self._links:
            self._call(method, timeout_s, row.name)
            return
        try:
            getattr(self._links[row.name], method)()
        except Exception as error:  # a beta API: any exception is the row's reason
            raise Stuck(one_line(error)) from error

    # --- measurements --------------------------------------------------------------------------------------------

    def measure(
        self, row: Row, device: Device, case: Case, window: Window, timeout_s: float, *, check: bool = False
    ) -> list[Sample]:
        """What each caller of the case measures in that window. Raises Failed.

        ``check``: the callee keeps a digest of what arrived.
        """
        method = "take_checked" if check else "take_beside" if case.beside else "take"
        callee = self.ready[-1].pid if case.pattern else None  # of sizes, no usage is measured
        last = self.shape.members - 1
        if (link := self._links.get(row.name)) is not None:
            payload = link.payload(device, case, Member(False).produce)
            try:
                return [actors.measure(lambda *args: [link.calls(last, method, *args)], case, payload, window, callee)]
            except Failed:
                raise
            except Exception as error:  # an alpha or beta API
                raise (Stuck if case.pattern else Failed)(one_line(error)) from error
        callers = range(last + 1) if case.together else range(max(1, last))
        if len(callers) > 1:
            window = window._replace(start=time.monotonic() + _START_S)
        asked = []
        for rank in callers:
            peers = [peer for peer in callers if peer != rank] if case.together else [last]
            asked.append(self._actors[rank].measure.remote(row.name, device, case, peers, window, callee, method))
        if not LINKS[row.transport].two_sided:
            return list(get(asked, timeout_s))
        served = self._actors[1].serve.remote(row.name, device, case, window.lead + window.fewest)
        try:
            return list(get([*asked, served], timeout_s)[:-1])
        except Failed as failure:  # the other end is still waiting
            raise Stuck(str(failure)) from failure

    def check(self, row: Row, device: Device, case: Case, timeout_s: float) -> tuple[str | None, float]:
        """Take a sample and verify it; returns the lane that carried it, if known, and its seconds. Raises Failed."""
        deadline = time.monotonic() + timeout_s
        expected = get(self._actors[0].prepare.remote(device, case), timeout_s)
        before = self._carried(row)
        once = Window(0.0, fewest=1, lead=0)
        (sample,) = self.measure(row, device, case, once, deadline - time.monotonic(), check=True)
        receiver = self._actors[0 if LINKS[row.transport].local else -1]
        received = get(receiver.received.remote(row.name), deadline - time.monotonic())
        if received != expected and not row.options.get("empty"):
            raise Failed(f"the tensor arrived changed: {received}, not {expected}")
        grown = {lane: sent - before.get(lane, 0) for lane, sent in self._carried(row).items()}
        return max(grown, key=lambda lane: grown[lane], default=None), sample.seconds[0]

    def _carried(self, row: Row) -> Mapping[str, int]:
        """Bytes per lane, from the group's statistics."""
        if row.transport != "group" or self._group is None:
            return {}
        return {counted.lane: counted.bytes_out for counted in self._group.stats() if counted.caller == "a"}

    def drop(self, timeout_s: float) -> None:
        """Free the memory of the last size; never raises."""
        with contextlib.suppress(Failed):
            self._call("drop", timeout_s)

    def turn(self, row: Row, device: Device, case: Case, window_s: float, timeout_s: float) -> Turn:
        """Measure a case of a pattern once, for about ``window_s``. Raises Failed."""
        if case.pattern == "idle":
            return self._idle(window_s * _IDLE_TIMES)
        work, window = None, Window(window_s)
        if LINKS[row.transport].two_sided:
            fewest = max(5, min(_EXCHANGES, _EXCHANGED_BYTES // case.size))
            window = Window(0.0, fewest=fewest, lead=max(window.lead, fewest // 4))
        if case.busy:
            window_s *= _BUSY_TIMES
            window = Window(window_s, end=time.monotonic() + _START_S + window_s * (1 + actors.LEAD_IN) + _SPARE_S)
            work = self._actors[-1].work.remote(case.busy, window.end)
            time.sleep(_START_S)
        samples = self.measure(row, device, case, window, timeout_s)
        if work is not None:
            get(work, timeout_s)
        return summary(case, samples)

    def _idle(self, window_s: float) -> Turn:
        time.sleep(window_s / 4)
        begin, meters = time.monotonic(), [Meter(ready.pid) for ready in self.ready]
        time.sleep(window_s)
        cpu_s = median(meter.used().cpu_s for meter in meters)
        return Turn(100 * cpu_s / (time.monotonic() - begin), [])

    def end(self, why: str, *, wait: bool = False) -> None:
        """Kill the actors, and wait until their processes have ended if asked to; never raises."""
        self.failed = self.failed or why
        for link in self._links.values():
            with contextlib.suppress(Exception):
                link.pause()
        for actor in self._actors if ray.is_initialized() else ():  # ray.kill would start Ray
            with contextlib.suppress(Exception):
                ray.kill(actor)
        if self._group is not None:
            with contextlib.suppress(Exception):
                self._group.shutdown(timeout=1)  # the members are dead; this frees the local state
            self._group = None
        limit = time.monotonic() + 5
        while wait and any(os.path.exists(f"/proc/{r.pid}") for r in self.ready) and time.monotonic() < limit:
            time.sleep(0.02)


def summary(case: Case, samples: Sequence[Sample]) -> Turn:
    """The turn that the samples of all callers make. Costs are per call; of a callee that is busy they are unknown."""
    peers = case.members - 1 if case.together else 1
    calls = sum(len(sample.seconds) for sample in samples) * peers
    rate = sum(len(sample.seconds) / sample.elapsed_s for sample in samples) * peers
    seconds = [each for sample in samples for each in sample.seconds]
    sides = 2 if case.together else 1  # there every process calls and is called
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


def _collective_group(actors: Sequence[Any], backend: str, timeout_s: float) -> None:
    """Create the collective group that Ray's two-sided transports need. Raises Failed."""
    from ray.experimental.collective import create_collective_group

    # create_collective_group has no timeout.
    created: futures.Future[Any] = futures.Future()
    threads.start(threads.settle, created, create_collective_group, list(actors), backend, name="bench-rdt")
    try:
        created.result(timeout_s)
    except futures.TimeoutError:
        raise Stuck(f"Ray did not create the collective group within {timeout_s:.0f} s") from None
    except Exception as error:  # an alpha API: any exception is the row's reason
        raise Failed(one_line(error)) from error
