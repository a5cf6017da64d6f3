"""A reader, or a home, that stands still: nobody gets a mixture of weights, and every timeout is kept."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import ray
import torch

import raytorchrpc as rtr
from raytorchrpc.lanes.shm.lane import ShmLane
from raytorchrpc.patterns.weights import published
from raytorchrpc.patterns.weights.feeds import KIND as RELAYED
from raytorchrpc.patterns.weights.versions import KIND
from tests import insides
from tests.insides import in_actor
from tests.polling import allowed, stands_still, suspend, wait_until
from tests.ray.actors import Peer
from tests.ray.conftest import Spawn

#: Elements of each tensor: above what travels in a message.
LARGE = 1 << 19
#: What an operation may take beyond its timeout here (seconds).
SLACK = 5.0


@pytest.fixture(scope="module")
def actors(spawn_for_module: Spawn) -> dict[str, Any]:
    return {name: spawn_for_module(Peer) for name in ("home", "leader", "reader")}


@pytest.fixture(scope="module", autouse=True)
def group(actors: dict[str, Any]) -> Iterator[rtr.Group]:
    with rtr.init_group(actors) as group:
        yield group


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    suspend(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


# --- a reader ------------------------------------------------------------------------------------------------


def weights(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full((LARGE,), value) for name in ("a", "b", "c")}


def end_leases_soon() -> None:
    published.LINGER_S = 1.0


def pull_and_stop_in_the_middle(store: rtr.WeightStore) -> tuple[str, set[float]]:
    """As if somebody sent a SIGSTOP when one tensor of three is copied; what the pull raised, and what came."""
    model, move, copies = weights(0.0), ShmLane.move, []

    def stop_before_the_second(lane: ShmLane, target: int, source: int, size: int) -> None:
        copies.append(size)
        if len(copies) == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        move(lane, target, source, size)

    ShmLane.move = stop_before_the_second  # type: ignore[method-assign]
    try:
        store.pull(model, timeout=4)
    except rtr.RpcTimeout as error:
        return str(error), {float(tensor[0]) for tensor in model.values()}
    finally:
        ShmLane.move = move  # type: ignore[method-assign]
    return "", {float(tensor[0]) for tensor in model.values()}


@pytest.mark.parametrize("source", ["home", "leader"])
def test_a_pull_that_outlasts_its_lease_fails(actors: dict[str, Any], group: rtr.Group, source: str) -> None:
    """What it has not copied by then is of another version. From the home, or from the member that pulled first."""
    store, pids = rtr.WeightStore(f"from {source}", home="home"), {m.name: m.pid for m in group.members}

    def publish(value: int) -> None:
        store.publish(weights(float(value)), value)

    def pull() -> bool:
        model = weights(0.0)
        return all(bool((tensor == value).all()) for value in [store.pull(model)] for tensor in model.values())

    def nobody_reads(kind: str, name: str) -> bool:
        found = next(served for known, served in insides.served(kind).items() if known.startswith(name))
        return wait_until(lambda: found.pool.readers == 0, 60)

    here = group.members[0].node_id
    nodes = dict.fromkeys(("leader", "reader"), "two" if source == "leader" else here)
    try:
        for actor in actors.values():
            in_actor(actor, end_leases_soon)
            in_actor(actor, insides.pretend, nodes)
        in_actor(actors["home"], publish, 1)
        if source == "leader":
            assert in_actor(actors["leader"], pull)
        reads = actors["reader"].run.remote(pull_and_stop_in_the_middle, store)
        assert wait_until(lambda: stands_still(pids["reader"]), 20)
        assert in_actor(actors[source], nobody_reads, KIND if source == "home" else RELAYED, store.name), (
            "the lease ends"
        )
        for value in range(2, 6):
            in_actor(actors["home"], publish, value)
            assert in_actor(actors["leader"], pull)
        os.kill(pids["reader"], signal.SIGCONT)
        error, values = ray.get(reads, timeout=60)
        assert {1.0, 5.0} <= values, "it did read tensors of two versions"
        assert "was suspended" in error and "pull again" in error
        assert in_actor(actors["reader"], pull)
    finally:
        os.kill(pids["reader"], signal.SIGCONT)
        for actor in actors.values():
            in_actor(actor, insides.pretend, dict.fromkeys(nodes, here))


# --- a home ----------------------------------------------------------------------------------------------------


def timed(operations: Collection[Callable[[], Any]]) -> list[tuple[str, float]]:
    """Of each, all at once: what it raised, and how long that took."""
    with ThreadPoolExecutor(len(operations)) as threads:
        return list(threads.map(_timed, operations))


def _timed(operation: Callable[[], Any]) -> tuple[str, float]:
    began = time.monotonic()
    try:
        operation()
    except rtr.RayTorchRpcError as error:
        return type(error).__name__, time.monotonic() - began
    return "", time.monotonic() - began


def test_a_home_that_stands_still_costs_the_timeout_and_no_more(actors: dict[str, Any], group: rtr.Group) -> None:
    def begin() -> None:
        queue, topic, store = (make("it", home="home") for make in (rtr.Queue, rtr.Topic, rtr.WeightStore))
        queue.put(1)
        subscription = topic.subscribe()
        model = {"a": torch.zeros(3)}
        insides.saved.begun = {
            "pull": lambda: store.pull(model, timeout=0.5),
            "wait": lambda: store.wait(1, timeout=0.5),
            "get": lambda: queue.get(timeout=0.5),
            "put": lambda: queue.put(2, timeout=0.5),
            "put many": lambda: queue.put_many(range(3000), timeout=0.5),
            "publish": lambda: topic.publish(1, timeout=0.5),
            "subscription": lambda: subscription.get(timeout=0.5),
            "first use of a queue": lambda: rtr.Queue("unused", home="home").get(timeout=0.5),
            "first use of weights": lambda: rtr.WeightStore("unused", home="home").pull(model, timeout=0.5),
            "find": lambda: rtr.Queue.find("nowhere", timeout=0.5),
        }
        insides.saved.at_once = [queue.get_nowait, lambda: queue.put_nowait(3)]

    def go_on() -> tuple[dict[str, tuple[str, float]], list[tuple[str, float]]]:
        begun, at_once = insides.saved.begun, insides.saved.at_once
        return dict(zip(begun, timed(begun.values()), strict=True)), [_timed(one) for one in at_once]

    in_actor(actors["reader"], begin)
    with stopped(next(m.pid for m in group.members if m.name == "home")):
        outcomes, at_once = in_actor(actors["reader"], go_on)
    assert outcomes.pop("find")[0] == "NotFound", "it names who did not answer"
    assert {outcome for outcome, _ in outcomes.values()} == {"RpcTimeout"}
    assert all(0.4 < elapsed < 0.5 + allowed(SLACK) for _, elapsed in outcomes.values()), outcomes
    assert all(outcome == "RpcTimeout" and elapsed < 1 + allowed(SLACK) for outcome, elapsed in at_once), at_once


def test_a_home_that_lives_says_in_time_that_nothing_came(actors: dict[str, Any]) -> None:
    def wait_in_vain() -> list[tuple[str, float]]:
        queue, store = rtr.Queue("empty", home="home", maxsize=1), rtr.WeightStore("unpublished", home="home")
        subscription = rtr.Topic("silent", home="home").subscribe()
        full = rtr.Queue("full", home="home", maxsize=1)
        full.put(1)
        operations: list[Callable[[], Any]] = [
            lambda: queue.get(timeout=1),
            lambda: subscription.get(timeout=1),
            lambda: store.wait(1, timeout=1),
            lambda: store.pull({"a": torch.zeros(1)}, timeout=1),
            lambda: full.put(2, timeout=1),
            queue.get_nowait,
            lambda: full.put_nowait(2),
        ]
        with insides.late_answers():
            return timed(operations)

    outcomes = in_actor(actors["reader"], wait_in_vain)
    assert [outcome for outcome, _ in outcomes] == ["Empty"] * 4 + ["Full", "Empty", "Full"]
    assert all(0.9 < elapsed < 1 + allowed(SLACK) for _, elapsed in outcomes[:5]), outcomes


# --- a member, while others are added ------------------------------------------------------------------------


def test_it_finds_who_was_added_meanwhile(actors: dict[str, Any], group: rtr.Group, spawn: Spawn) -> None:
    late = spawn(Peer)
    assert in_actor(late, insides.group_name) is None  # it has started
    with stopped(in_actor(actors["reader"], os.getpid)):
        group.add({"late": late})
        answers = [actors["reader"].call.remote(target, "double", 21) for target in (late, "late")]
    assert ray.get(answers, timeout=60) == [42, 42]
    group.remove(["late"])
