"""The driver's side: pairs of actors that are started, joined, called and ended."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import raytorchrpc as rtr
from raytorchrpc.bench.actors import BenchActor, Ready
from raytorchrpc.bench.rows import Device, Row
from raytorchrpc.bench.site import Site
from raytorchrpc.bench.transports import TIMEOUT_S, TRANSPORTS, Digest

#: Ray's share of a GPU for each actor. All pairs run at once, each with its own CUDA context.
_GPU_SHARE = 0.01
#: Most seconds per byte assumed for a transport of which only one size has been measured.
_SLOWEST_BYTE = 1e-8


class Placement(NamedTuple):
    """The nodes and GPUs of the two ends.

    Ray chooses the GPU of an actor that requests a fraction, and fills one GPU before it uses the next. So the actors
    request a fraction, and their runtime environment sets CUDA_VISIBLE_DEVICES, which Ray does not override. The UUIDs
    show whether both ends got different GPUs.
    """

    node_ids: tuple[str, str]
    gpus: tuple[str | None, str | None]
    """Values of CUDA_VISIBLE_DEVICES; None leaves the choice to Ray."""


class Failed(Exception):
    """A row cannot continue; the message is the reason, in one line."""


class Stuck(Failed):
    """A row cannot continue and its pair is unusable: an actor may still be busy, or has died."""


@dataclass(eq=False)
class Pair:
    """Two actors (one with the option ``alone``) and the rows whose samples they take."""

    name: str
    cuda: bool
    a: Any
    b: Any
    group: rtr.Group | None = None
    failed: str | None = None
    ready: Sequence[Ready] = ()
    """What the actors reported once they had started."""
    opened: dict[str, str | None] = field(default_factory=dict)
    """Rows whose transport was opened, with the failure if there was one."""
    starting: list[Any] = field(default_factory=list)
    """References to the reports of the actors."""

    @property
    def ends(self) -> list[Any]:
        return [self.a] if self.a is self.b else [self.a, self.b]

    def call(self, method: str, timeout_s: float, *args: Any) -> None:
        """Call a method of both actors at once. Raises Failed."""
        get([getattr(end, method).remote(*args) for end in self.ends], timeout_s)

    def await_start(self, deadline: float) -> None:
        """Block until both actors have started, or set ``failed`` at the deadline, which is by time.monotonic()."""
        left = max(0.0, deadline - time.monotonic())
        _, late = ray.wait(self.starting, num_returns=len(self.starting), timeout=left)
        try:
            self.ready = get(self.starting, 0)
        except Failed as failure:
            self.failed = "Ray did not start its actors in time" if late else str(failure)

    def end(self, why: str) -> None:
        """Kill the actors; never raises."""
        for end in self.ends if ray.is_initialized() else ():  # ray.kill would start Ray
            with contextlib.suppress(Exception):
                ray.kill(end)
        if self.group is not None:
            with contextlib.suppress(Exception):
                self.group.shutdown(timeout=1)  # the members are dead; this frees the local state
            self.group = None
        self.failed = self.failed or why


def start(name: str, row: Row, cuda: bool, placement: Placement) -> Pair:
    """Create the two actors that take the samples of this row; returns before they have started."""
    alone = bool(row.options.get("alone"))
    gpus = (placement.gpus[0], placement.gpus[0]) if row.one_gpu else placement.gpus
    if row.options.get("tensor_transport") == rtr.rdt.TRANSPORT:
        rtr.rdt.enable()  # affects actors that are created afterwards
    settings: Any = {"enable_tensor_transport": True} if row.transport == "rdt" else {"max_restarts": 0}
    ends: list[Any] = []
    for rank in range(1 if alone else 2):
        # The recommended environment, also for the rows for comparison, which benefit from it too.
        env = rtr.runtime_env()["env_vars"] | row.env
        if alone:  # the one actor needs both GPUs
            env["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
            env["CUDA_VISIBLE_DEVICES"] = ",".join(dict.fromkeys(gpu for gpu in gpus if gpu is not None))
        elif cuda and gpus[rank] is not None:
            env["CUDA_VISIBLE_DEVICES"] = str(gpus[rank])
        options: dict[str, Any] = {
            "num_cpus": 0,
            "num_gpus": _GPU_SHARE if cuda else 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(placement.node_ids[rank], soft=False),
            "runtime_env": {"env_vars": env},
        }
        ends.append(ray.remote(**settings)(BenchActor).options(**options).remote(cuda))
    return Pair(name, cuda, ends[0], ends[-1], starting=[end.ready.remote() for end in ends])


def get(refs: Any, timeout_s: float) -> Any:
    """``ray.get`` with every failure reported as one line. Raises Failed."""
    try:
        return ray.get(refs, timeout=max(0.0, timeout_s))
    except GetTimeoutError:
        raise Stuck(f"no answer within {timeout_s:.0f} s") from None
    except RayTaskError as error:
        raise Failed(one_line(error.cause if error.cause is not None else error)) from error
    except RayActorError as error:
        raise Stuck("an actor died: " + one_line(error)) from error


def one_line(error: BaseException) -> str:
    """An exception's type and its first line, shortened."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    kind = type(error).__name__.removeprefix("RayTaskError(").removesuffix(")")
    return f"{kind}: {text}"[:240].rstrip(": ")


def open_row(pair: Pair, row: Row, site: Site, timeout_s: float) -> None:
    """Open a row's transport between the two ends, once. Raises Failed."""
    if row.name not in pair.opened:
        try:
            _open(pair, row, site, timeout_s)
            pair.opened[row.name] = None
        except Failed as failure:
            pair.opened[row.name] = str(failure)
    if (problem := pair.opened[row.name]) is not None:
        raise Failed(problem)


def _open(pair: Pair, row: Row, site: Site, timeout_s: float) -> None:
    uuids = [ready.gpu for ready in pair.ready]
    if pair.cuda and len(uuids) == 2 and site.distinct_gpus and not row.one_gpu and uuids[0] == uuids[1]:
        raise Failed(f"both actors got the same GPU ({uuids[0]})")
    tensor_transport = row.options.get("tensor_transport")
    if pair.group is None and (row.transport == "group" or tensor_transport == rtr.rdt.TRANSPORT):
        pair.group = _form(pair, row, site, timeout_s)
    if tensor_transport in ("gloo", "nccl"):
        collective_group([pair.a, pair.b], tensor_transport, timeout_s)
    if row.transport == "rdt":
        return
    meeting = None
    for rank, end in enumerate(pair.ends):
        peer = pair.ends[-1 - rank]
        meeting = get(end.open.remote(row.name, row.transport, rank, peer, dict(row.options), meeting), timeout_s)
    if not row.own_turn:
        pair.call("resume", timeout_s, row.name)


def _form(pair: Pair, row: Row, site: Site, timeout_s: float) -> rtr.Group:
    settings = dict(row.config)
    if "channels" in settings:
        # torch builds without CUDA lack its channels, and members without a GPU must not open them.
        has = set(site.a.endpoint.tensorpipe_channels)
        settings["channels"] = tuple(c for c in settings["channels"] if c in has and (pair.cuda or "cuda" not in c))
    members, name = {"a": pair.a, "b": pair.b}, f"bench-{pair.name}-{os.getpid()}"
    try:
        config = rtr.GroupConfig(rpc_timeout_s=TIMEOUT_S, **settings)
        group = rtr.init_group(members, name=name, config=config, timeout=timeout_s)
    except (rtr.RayTorchRpcError, RayTaskError, RayActorError) as error:
        raise Failed(one_line(error)) from error
    chosen = group.routes().route("a", "b").lanes("cpu")
    if row.over and not (chosen and row.over in chosen[0].how):
        group.shutdown(timeout=1)
        raise Failed(f"this pair uses {chosen[0].how if chosen else 'no lane'}, and no setting forces {row.over}")
    return group


def collective_group(actors: Sequence[Any], backend: str, timeout_s: float) -> None:
    """Create the collective group that Ray's two-sided transports need. Raises Failed."""
    from ray.experimental.collective import create_collective_group

    failures: list[Exception] = []

    def create() -> None:
        try:
            create_collective_group(list(actors), backend=backend)
        except Exception as error:  # an alpha API: any exception is the row's reason
            failures.append(error)

    # create_collective_group has no timeout.
    creating = threading.Thread(target=create, name="bench-rdt", daemon=True)
    creating.start()
    creating.join(timeout_s)
    if creating.is_alive():
        raise Stuck(f"Ray did not create the collective group within {timeout_s:.0f} s")
    if failures:
        raise Failed(one_line(failures[0])) from failures[0]


@dataclass(eq=False)
class Series:
    """The samples of one row with tensors on one device."""

    row: Row
    device: Device
    pair: Pair | None = None
    reason: str | None = None
    """Why it ended, or did not start."""
    took: dict[int, float] = field(default_factory=dict)
    """Seconds of the fastest recent sample, by bytes."""
    via: str | None = None
    """The lane that carried the last verified sample, if known."""

    @property
    def alive(self) -> bool:
        """True while samples can be taken."""
        return self.reason is None and self.pair is not None and self.pair.failed is None

    def actors(self) -> Pair:
        """The pair that takes the samples. Raises Failed if it cannot."""
        if self.pair is None or self.pair.failed is not None:
            raise Failed(self.pair.failed or "" if self.pair else "the row has no actors")
        return self.pair

    def expected(self, size: int) -> float | None:
        """Estimated seconds of a sample of that size, from smaller sizes; None before the first."""
        if size in self.took or not self.took:
            return self.took.get(size)
        *before, last = sorted(self.took)
        # A small tensor's time is overhead; a large one's is an upper bound per byte.
        slope = min(_SLOWEST_BYTE, self.took[last] / last)
        if before:
            slope = max(0.0, self.took[last] - self.took[before[-1]]) / (last - before[-1])
        return self.took[last] + slope * max(0, size - last)

    def send(self, size: int, count: int, timeout_s: float, *, check: bool = False) -> list[float]:
        """Take ``count`` samples; returns the seconds of each. Raises Failed."""
        if self.row.transport == "rdt":
            seconds = self._send_from_driver(size, count, timeout_s, check)
        else:
            seconds = self._send_from_actor(size, count, timeout_s, check)
        self.took[size] = min(seconds)
        return seconds

    def _send_from_actor(self, size: int, count: int, timeout_s: float, check: bool) -> list[float]:
        pair, name = self.actors(), self.row.name
        asked = [pair.a.send.remote(name, self.device, size, count, check)]
        if two_sided := TRANSPORTS[self.row.transport].two_sided:
            asked.append(pair.b.serve.remote(name, self.device, size, count))
        try:
            seconds: list[float] = get(asked, timeout_s)[0]
        except Failed as failure:
            if two_sided:  # the other end is still waiting
                raise Stuck(str(failure)) from failure
            raise
        return seconds

    def _send_from_driver(self, size: int, count: int, timeout_s: float, check: bool) -> list[float]:
        """Ray Direct Transport requires passing one actor's result to the other."""
        pair = self.actors()
        produce = pair.a.produce.options(tensor_transport=self.row.options["tensor_transport"])
        receive = pair.b.take_checked if check else pair.b.take
        deadline = time.monotonic() + timeout_s
        seconds = []
        for _ in range(count):
            start = time.perf_counter()
            try:
                ref = receive.remote(produce.remote(self.device, size))
            except Exception as error:  # an alpha API
                raise Failed(one_line(error)) from error
            get(ref, deadline - time.monotonic())
            seconds.append(time.perf_counter() - start)
        return seconds

    def check(self, size: int, timeout_s: float) -> str | None:
        """Take a sample and verify it; returns the lane that carried it, if known. Raises Failed."""
        pair = self.actors()
        deadline = time.monotonic() + timeout_s
        expected: Digest = get(pair.a.prepare.remote(self.device, size), timeout_s)
        before = self._carried()
        self.send(size, 1, deadline - time.monotonic(), check=True)
        local = self.row.transport in TRANSPORTS and TRANSPORTS[self.row.transport].local
        received = get((pair.a if local else pair.b).received.remote(self.row.name), deadline - time.monotonic())
        if received != expected:
            raise Failed(f"the tensor arrived changed: {received}, not {expected}")
        grown = {lane: sent - before.get(lane, 0) for lane, sent in self._carried().items()}
        return max(grown, key=lambda lane: grown[lane], default=None)

    def _carried(self) -> Mapping[str, int]:
        """Bytes per lane, from the group's statistics."""
        group = self.actors().group
        if self.row.transport != "group" or group is None:
            return {}
        return {row.lane: row.bytes_out for row in group.stats() if row.caller == "a"}

    def drop(self, timeout_s: float) -> None:
        self.actors().call("drop", timeout_s)
