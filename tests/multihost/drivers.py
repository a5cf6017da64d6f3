"""What drivers do on the first of two hosts: ``python -m tests.multihost.drivers NAME`` runs one of them.

They import themselves by their full name, so that Ray's workers on both hosts find the actors.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import raytorchrpc as rtr

TIMEOUT_S = 60.0

_answers = sys.stdout


@ray.remote(num_cpus=0, max_restarts=0, max_concurrency=2)
class Peer:
    """A member on one of the hosts."""

    def __init__(self) -> None:
        self._entered = threading.Event()

    @rtr.method
    def double(self, value: Any) -> Any:
        return value * 2

    @rtr.method
    def where(self) -> tuple[str, str]:
        return os.uname().nodename, rtr.current_member().name

    @rtr.method(concurrent=True)
    def hold(self) -> None:
        """Stay until the process ends."""
        self._entered.set()
        threading.Event().wait(TIMEOUT_S)

    @rtr.method(concurrent=True)
    def held(self) -> bool:
        """Returns once somebody is in ``hold``."""
        return self._entered.wait(TIMEOUT_S)

    @rtr.method(concurrent=True)
    def die(self) -> None:
        os._exit(1)

    def run(self, function: Any, *args: Any) -> Any:
        return function(*args)


@contextmanager
def group(**config: Any) -> Iterator[tuple[rtr.Group, Any]]:
    """Member a here, member b on the other host, and a's handle."""
    here = ray.get_runtime_context().get_node_id()
    there = next(node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here)
    actors = {
        name: Peer.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()
        for name, node in (("a", here), ("b", there))
    }
    with rtr.init_group(actors, config=rtr.GroupConfig(rpc_timeout_s=TIMEOUT_S, **config)) as formed:
        yield formed, actors["a"]


def within(actor: Any, function: Any, *args: Any) -> Any:
    return ray.get(actor.run.remote(function, *args), timeout=TIMEOUT_S)


# --- what the tests ask for ---------------------------------------------------------------------------------------


def usual() -> None:
    """A group of defaults; each line of stdin is a task, each line of stdout what came of it."""
    _serve({})


def by_nng() -> None:
    """Likewise, with nng alone."""
    _serve({"lanes": ("nng",)})


def encrypted() -> None:
    """Likewise, with TLS."""
    _serve({"tls": True})


def _serve(config: dict[str, Any]) -> None:
    with group(**config) as (formed, a):
        pair = formed.routes().route("a", "b")
        lanes = {traffic: [(lane.lane, lane.how) for lane in pair.lanes(traffic)] for traffic in ("calls", "cpu")}
        _say({"members": len(formed), "lanes": lanes})
        for line in sys.stdin:
            name, *args = json.loads(line)
            if name == "stats":
                _say({f"{row.lane}": row.bytes_out for row in formed.stats() if row.caller == "a"})
            else:
                _say(within(a, _TASKS[name], *args))


def _say(what: Any) -> None:
    print(json.dumps(what), file=_answers, flush=True)


def _call() -> tuple[Any, ...]:
    return rtr.rpc_sync("b").double(21), *rtr.rpc_sync("b").where()


def _tensor(count: int) -> bool:
    tensor = torch.arange(count, dtype=torch.int32)
    return torch.equal(rtr.rpc_sync("b").double(tensor), tensor * 2)


def _double(value: Any) -> Any:
    return rtr.rpc_sync("b").double(value)


def _remote() -> tuple[str, str]:
    """How torch's RRefs are refused."""
    try:
        rtr.remote("b").double(1)
    except rtr.RayTorchRpcError as error:
        return type(error).__name__, str(error)
    return "", ""


def _lose_process() -> tuple[str, str, float]:
    return _lost(lambda: rtr.rpc_async("b").die())


def _lose_host() -> tuple[str, str, float]:
    return _lost(lambda: _say("pull"))


def _lost(end: Any) -> tuple[str, str, float]:
    """How a call that the peer is in ends, how the next one does, and the seconds from ``end()`` to there."""
    pending = rtr.rpc_async("b").hold()
    assert rtr.rpc_sync("b").held()
    start = time.monotonic()
    end()
    first = type(pending.exception(TIMEOUT_S)).__name__
    try:
        rtr.rpc_sync("b").double(1)
    except rtr.RayTorchRpcError as error:
        return first, type(error).__name__, time.monotonic() - start
    return first, "", time.monotonic() - start


_TASKS = {"call": _call, "double": _double, "remote": _remote, "tensor": _tensor, "lose": _lose_process}


def power_off() -> None:
    """This process is a member itself; the test ends the other host when told to."""
    here = ray.get_runtime_context().get_node_id()
    there = next(node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here)
    b = Peer.options(scheduling_strategy=NodeAffinitySchedulingStrategy(there, soft=False)).remote()
    config = rtr.GroupConfig(rpc_timeout_s=TIMEOUT_S)
    with rtr.init_group({"b": b}, include_driver=True, config=config):
        _say(_lose_host())


def main(name: str) -> None:
    global _answers
    # Ray writes to stdout when an actor dies.
    _answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    ray.init("auto", log_to_driver=False, logging_level="ERROR")
    globals()[name]()


if __name__ == "__main__":
    importlib.import_module("tests.multihost.drivers").main(sys.argv[1])
