"""A home of queues, topics and weights that stands still, or has nothing to give: every timeout is kept."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import raytorchrpc as rtr
from tests import insides
from tests.insides import in_actor
from tests.polling import allowed, suspend

#: What an operation may take beyond its timeout here (seconds).
SLACK = 5.0


@pytest.fixture(scope="module")
def actors(peers: list[Any]) -> dict[str, Any]:
    return dict(zip(("home", "reader"), peers, strict=False))


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
