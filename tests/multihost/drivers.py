"""A driver on one of the hosts, with members on all of them: ``python -m tests.multihost.drivers``.

It answers each line of stdin, a list of a task's name and its arguments in JSON, with a line on stdout. Times are of
``time.monotonic``, which all hosts of one machine share.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import socket
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import ray
import torch
from ray.exceptions import ActorUnavailableError, RayTaskError

import raytorchrpc as rtr
from tests import insides
from tests.polling import wait_until
from tests.ray import children

TIMEOUT_S = 60.0


#: Weights of 64 MB.
SHAPE = (4096, 4096)


class Member:
    """Ray restarts it where it was, or elsewhere if that host is gone."""

    def __init__(self) -> None:
        self._entered = threading.Semaphore(0)
        self._born = time.monotonic()

    @rtr.method(concurrent=True)
    def double(self, value: Any) -> Any:
        return value * 2

    @rtr.method(concurrent=True)
    def about(self) -> tuple[str, str, int, int, float]:
        """(host, name, rank, pid, when it was ready)."""
        me = rtr.current_member()
        return os.uname().nodename, me.name, me.rank, os.getpid(), self._born

    @rtr.method(concurrent=True)
    def hold(self) -> None:
        """Stay until the process ends."""
        self._entered.release()
        threading.Event().wait(TIMEOUT_S)

    @rtr.method(concurrent=True)
    def held(self) -> bool:
        """Returns once somebody more is in ``hold``."""
        return self._entered.acquire(timeout=TIMEOUT_S)

    @rtr.method(concurrent=True)
    def door(self) -> tuple[str, int]:
        """Where torchrpc listens."""
        (where,) = insides.agent_addresses()
        return where

    @rtr.method(concurrent=True)
    def torchrpc_ports(self) -> list[int]:
        """All that its agent listens on."""
        ports = []
        for fd in insides.agent_listeners():
            with socket.socket(fileno=os.dup(fd)) as listener:
                ports.append(listener.getsockname()[1])
        return ports

    def have_child_join(self, name: str) -> None:
        """A new process of this host joins the group."""
        children.start(name)
        children.do(name, children.join, name)

    def ask(self, target: Any, method: str, args: tuple[Any, ...], timeout: float) -> Any:
        return getattr(rtr.rpc_sync(target, timeout=timeout), method)(*args)

    def send(self, target: Any, count: int, timeout: float) -> bool:
        tensor = torch.arange(count, dtype=torch.int32)
        return torch.equal(rtr.rpc_sync(target, timeout=timeout).double(tensor), tensor * 2)

    def endure(self, target: Any, timeout: float) -> tuple[str, float]:
        """What a call ends with that the target never answers, and when."""
        try:
            rtr.rpc_sync(target, timeout=timeout).hold()
        except rtr.RayTorchRpcError as error:
            return type(error).__name__, time.monotonic()
        return "", time.monotonic()

    def refused(self, target: Any) -> tuple[str, str]:
        """How torch's RRefs are."""
        try:
            rtr.remote(target).double(1)
        except rtr.RayTorchRpcError as error:
            return type(error).__name__, str(error)
        return "", ""

    def view(self) -> list[tuple[str, int, int]]:
        return [(member.name, member.rank, member.incarnation) for member in rtr.get_group().members]

    def publish_weights(self, publishers: list[str], version: int) -> int:
        """This member's rows of a version, of which every element is its number."""
        number, rows = publishers.index(rtr.current_member().name), SHAPE[0] // len(publishers)
        shard = rtr.Shard(torch.full((rows, SHAPE[1]), float(version)), SHAPE, (number * rows, 0))
        return rtr.WeightStore(f"of {len(publishers)}", publishers=publishers).publish({"matrix": shard}, version)

    def pull_weights(self, publishers: list[str], half: int | None) -> list[float]:
        """The version, what came of it: all, or half of the columns; and how long it took."""
        columns = SHAPE[1] if half is None else SHAPE[1] // 2
        tensor = torch.zeros(SHAPE[0], columns)
        shard = rtr.Shard(tensor, SHAPE, (0, columns * (half or 0)))
        began = time.monotonic()
        version = rtr.WeightStore(f"of {len(publishers)}", publishers=publishers).pull({"matrix": shard})
        return [version, *tensor.unique().tolist(), time.monotonic() - began]


class Tasks:
    """What the driver can be asked to do."""

    def __init__(self) -> None:
        self._actors: dict[str, Any] = {}
        self._group: rtr.Group | None = None
        self._news: queue.Queue[Any] = queue.Queue()
        self._enduring: dict[str, Any] = {}
        self._threads = ThreadPoolExecutor()

    def form(
        self, places: dict[str, str], config: dict[str, Any] | None = None, include_driver: bool = False
    ) -> list[str]:
        """Members by name, each on a host by its name; "away" is any host but Ray's head. This process may be one:
        "driver".
        """
        given = rtr.GroupConfig(rpc_timeout_s=TIMEOUT_S, **(config or {}))
        self._group = rtr.init_group(self._spawn(places), config=given, include_driver=include_driver)
        self._group.on_change(
            lambda change: self._news.put([change.kind, change.members, change.cause, time.monotonic()])
        )
        assert wait_until(lambda: insides.watches_everybody(self._group), TIMEOUT_S)  # before hosts fail
        return [member.name for member in self._group.members]

    def _spawn(self, places: dict[str, str]) -> dict[str, Any]:
        cls = ray.remote(num_cpus=0, max_restarts=-1, max_concurrency=8)(Member)
        made = {name: cls.options(resources={place: 0.001}).remote() for name, place in places.items()}
        self._actors.update(made)
        return made

    def add(self, places: dict[str, str]) -> list[int]:
        return [member.rank for member in self._group.add(self._spawn(places))]

    def remove(self, names: list[str]) -> None:
        self._group.remove(names)

    def end(self) -> float:
        """Of the group and its actors; returns the seconds that ``shutdown`` took."""
        began = time.monotonic()
        if self._group is not None:
            self._group.shutdown()
        took = time.monotonic() - began
        for actor in self._actors.values():
            ray.kill(actor)
        self.__init__()
        return took

    def members(self) -> dict[str, tuple[int, int, int]]:
        """(rank, incarnation, pid) by name."""
        return {member.name: (member.rank, member.incarnation, member.pid) for member in self._group.members}

    def news(self, timeout: float) -> Any:
        """The next change, or None if there is none in time."""
        try:
            return self._news.get(timeout=timeout)
        except queue.Empty:
            return None

    def wait_ready(self, timeout: float) -> None:
        self._group.wait_ready(timeout)

    def ask(self, caller: str, target: str, method: str, *args: Any) -> Any:
        return self._have(caller, "ask", target, method, args, TIMEOUT_S)

    def attempt(self, caller: str, target: str, timeout: float) -> str:
        """The error that a call ends with, or ""."""
        try:
            self._have(caller, "ask", target, "double", (1,), timeout)
        except RayTaskError as error:
            return f"{type(error.cause).__name__}: {error.cause}"
        return ""

    def send(self, caller: str, target: str, count: int) -> bool:
        """Whether so many numbers come back doubled."""
        return self._have(caller, "send", target, count, TIMEOUT_S)

    def endure(self, caller: str, target: str, timeout: float = TIMEOUT_S) -> None:
        """Have a call under way that only a fault, or its deadline, ends; returns when the target is in it."""
        self._enduring[f"{caller} {target}"] = self._begin(caller, "endure", target, timeout)
        assert self.ask(caller, target, "held")

    def ended(self, caller: str, target: str) -> tuple[str, float]:
        """How that call ended, and when."""
        return self._get(self._enduring.pop(f"{caller} {target}"))

    def view(self, name: str) -> list[tuple[str, int, int]]:
        return self._have(name, "view")

    def run(self, name: str, method: str, *args: Any) -> Any:
        """A method of that actor."""
        return self._have(name, method, *args)

    def caught_up(self, name: str, timeout: float) -> None:
        """Block until that member knows what the driver knows of the group."""
        known = [(member.name, member.rank, member.incarnation) for member in self._group.members]
        until = time.monotonic() + timeout
        while self.view(name) != known:
            assert time.monotonic() < until, f"{name} does not know the group as it is"

    def lanes(self, caller: str, target: str, traffic: str) -> list[tuple[str, str]]:
        """Each lane from here to there, and how it goes."""
        return [(lane.lane, lane.how) for lane in self._group.routes().route(caller, target).lanes(traffic)]

    def sent(self, caller: str) -> dict[str, int]:
        """Bytes, by lane."""
        return {str(row.lane): row.bytes_out for row in self._group.stats() if row.caller == caller}

    def each(self, names: list[str], method: str, *args: Any) -> list[Any]:
        """The results of a method of these actors, at the same time. "half" is 0 or 1, in turn."""
        runs = [
            getattr(self._actors[name], method).remote(*(place % 2 if arg == "half" else arg for arg in args))
            for place, name in enumerate(names)
        ]
        return self._get(runs)

    def state(self, name: str) -> str:
        """What Ray says of an actor."""
        return insides.actor_state(self._actors[name]).state

    def _have(self, name: str, method: str, *args: Any) -> Any:
        """By Ray, which takes a while to find its own way again after a network was cut."""
        until = time.monotonic() + TIMEOUT_S
        while True:
            try:
                return self._get(self._begin(name, method, *args))
            except ActorUnavailableError:
                if time.monotonic() > until:
                    raise

    def _begin(self, name: str, method: str, *args: Any) -> Any:
        if name == "driver":
            return self._threads.submit(getattr(Member(), method), *args)
        return getattr(self._actors[name], method).remote(*args)

    def _get(self, result: Any) -> Any:
        return result.result(TIMEOUT_S) if isinstance(result, Future) else ray.get(result, timeout=TIMEOUT_S)


def serve() -> None:
    # Ray writes to stdout when an actor dies.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    ray.init("auto", log_to_driver=False, logging_level="ERROR")
    tasks = Tasks()
    for line in sys.stdin:
        name, *args = json.loads(line)
        print(json.dumps(getattr(tasks, name)(*args)), file=answers, flush=True)
    tasks.end()


if __name__ == "__main__":
    importlib.import_module("tests.multihost.drivers").serve()
