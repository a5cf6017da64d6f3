"""A sync actor is a monitor: one of its methods runs at any instant, and others run only while it waits for us."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
import torch

import raytorchrpc as rtr
from tests import insides
from tests.polling import wait_until
from tests.ray.actors import Latch
from tests.ray.conftest import Spawn
from tests.ray.monitored import Learner

MakeLatch = Callable[[], Latch]


@pytest.fixture(scope="module")
def members(spawn_for_module: Spawn) -> Iterator[dict[str, Any]]:
    handles = {name: spawn_for_module(Learner) for name in ("learner", "one", "two")}
    with rtr.init_group(handles, config=rtr.GroupConfig(rpc_timeout_s=30)):
        yield handles


def inside(handle: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Begin it in the actor's process, as a method that is not decorated."""
    return handle.run.remote(function, *args)


def get(ref: Any) -> Any:
    return ray.get(ref, timeout=60)


def call(method: str, times: int, *args: Any) -> None:
    for _ in range(times):
        getattr(rtr.rpc_sync("learner"), method)(*args)


def read_stream(times: int) -> None:
    assert len(list(rtr.rpc_sync("learner").stream(times))) == times


def test_no_update_is_lost(members: dict[str, Any]) -> None:
    learner, one, two = members.values()
    before = get(learner.total.remote())
    generated = learner.generate.options(num_returns="streaming").remote(20)
    refs = [
        learner.plain.remote(40),
        inside(one, call, "add", 20),
        inside(two, call, "inherited", 20),
        inside(one, call, "add_twice", 5),
        inside(two, call, "pass_on", 5, "one", 3),  # comes back once
        inside(two, read_stream, 20),
        *[learner.add.remote() for _ in range(10)],
        *[learner.inherited.remote() for _ in range(5)],
        *[learner.overridden.remote() for _ in range(5)],
        learner.__ray_call__.remote(lambda self: self.plain(10)),
    ]
    get(refs)
    assert len(list(generated)) == 20
    assert get(learner.total.remote()) - before == 40 + 20 + 20 + 10 + 5 * 4 + 20 + 10 + 5 + 5 + 10 + 20


def test_a_loop_over_a_queue_serves_calls_between_its_steps(members: dict[str, Any]) -> None:
    learner, one, two = members.values()
    before = get(learner.total.remote())
    queue: rtr.Queue[int] = rtr.Queue("steps", home="two", maxsize=1000)
    get(inside(two, queue.put_many, list(range(50))))
    working = learner.work_on.remote(queue, 60)
    get(inside(one, call, "add", 30))  # before the queue has what the loop still waits for
    assert ray.wait([working], timeout=0)[0] == []
    get(inside(two, queue.put_many, list(range(10))))
    get(working)
    assert get(learner.total.remote()) - before == 90


#: Operations that block until the latch opens or, without "latch" in them, until ``END`` runs in another member.
WAITS: dict[str, Callable[[Latch], Any]] = {
    "rpc_sync": lambda latch: rtr.rpc_sync("two").hold(latch),
    "Future.wait": lambda latch: rtr.rpc_async("two").hold(latch).wait(),
    "wait": lambda latch: rtr.wait([rtr.rpc_async("two").hold(latch)]),
    "next": lambda latch: next(rtr.rpc_sync("two").hold_and_yield(latch)),
    "allow_calls": lambda latch: _wait_in_something_else(latch),
    "Queue.get": lambda _: rtr.Queue("empty", home="two").get(),
    "Subscription.get": lambda _: next(iter(rtr.Topic("news", home="two").subscribe())),
    "WeightStore.pull": lambda _: rtr.WeightStore("pulled", home="one").pull({"w": torch.zeros(2)}),
}
END: dict[str, Callable[[], Any]] = {
    "Queue.get": lambda: rtr.Queue("empty", home="two").put(1),
    "Subscription.get": lambda: _publish_to_the_subscriber(),
    "WeightStore.pull": lambda: rtr.WeightStore("pulled", home="one").publish({"w": torch.ones(2)}),
}


def _wait_in_something_else(latch: Latch) -> None:
    with rtr.allow_calls():
        latch.pass_through()


def _publish_to_the_subscriber() -> None:
    topic = rtr.Topic("news", home="two")
    assert wait_until(lambda: topic.stats()["subscribers"] == 1, 20)
    topic.publish(1)


@pytest.mark.parametrize("what", WAITS)
def test_others_run_while_a_method_waits_in_an_operation_of_the_package(
    members: dict[str, Any], latch: MakeLatch, what: str
) -> None:
    learner, one, _ = members.values()
    gate = latch()
    waiting = learner.waits.remote(WAITS[what], gate)
    get(inside(one, lambda: rtr.rpc_sync("learner").await_beginning()))
    get(inside(one, call, "add", 3))  # would not come back before the wait is over
    if what in END:
        get(inside(one, END[what]))
    else:
        gate.release(gate.await_arrival())
    assert get(waiting) == 3


def test_what_waits_in_something_else_keeps_others_out(members: dict[str, Any], latch: MakeLatch) -> None:
    learner, one, two = members.values()
    gate = latch()
    staying = learner.stays.remote(gate)
    held = gate.await_arrival()
    adding = inside(one, call, "inherited", 1)  # the next test sees that waits for an ``add`` are logged, once
    assert get(inside(two, lambda: rtr.rpc_sync("learner").await_beginning())) is None  # but what is concurrent runs
    assert ray.wait([adding], timeout=0.2)[0] == []
    gate.release(held)
    get([staying, adding])


def test_a_call_that_waits_long_names_what_it_waits_for(members: dict[str, Any], latch: MakeLatch) -> None:
    learner, one, two = members.values()
    gate = latch()

    def call_in_vain() -> tuple[str, float]:
        began = time.monotonic()
        error = rtr.rpc_async("learner", timeout=4.5).add().exception()
        assert isinstance(error, rtr.RpcTimeout)
        return str(error), time.monotonic() - began

    before = get(learner.total.remote())
    get(inside(learner, watch_log))
    get(inside(learner, insides.refuse_early, 1.5))  # a refusal that comes after the caller's deadline tells it nothing
    staying = learner.stays.remote(gate)
    held = gate.await_arrival()
    others = inside(two, call, "add", 1)
    text, seconds = get(inside(one, call_in_vain))
    assert "learner.add" in text and "Learner.stays" in text and "did not run" in text
    assert seconds > 2.5
    gate.release(held)
    get([staying, others])
    assert get(learner.total.remote()) == before + 1  # what was refused did not run later
    lines = get(inside(learner, taken_log))
    assert len(lines) == 1, lines
    assert "learner.add waits for Learner.stays" in lines[0]
    assert "allow_calls" in lines[0] and "concurrent=True" in lines[0]


def watch_log() -> None:
    import logging

    class Keep(logging.Handler):
        lines: list[str] = []  # noqa: RUF012

        def emit(self, record: logging.LogRecord) -> None:
            self.lines.append(record.getMessage())

    logging.getLogger("raytorchrpc").addHandler(Keep())


def taken_log() -> list[str]:
    import logging

    keep: Any = logging.getLogger("raytorchrpc").handlers.pop()
    return list(keep.lines)


def test_a_restarted_actor_is_a_monitor_before_it_is_a_member(spawn: Spawn, latch: MakeLatch) -> None:
    """Ray runs its method again at once; the actor joins, and calls come, while it runs."""
    gate = latch()
    actor, caller = spawn(Learner, max_restarts=1, max_task_retries=1), spawn(Learner)
    with rtr.init_group({"learner": actor, "caller": caller}, name="restarted"):
        staying = actor.stays.remote(gate)
        held = gate.await_arrival()
        get(inside(caller, lambda: rtr.rpc_sync("learner").await_beginning()))
        ray.kill(actor, no_restart=False)
        get(inside(caller, lambda: rtr.rpc_sync("learner", retry=5).await_beginning()))  # of the new process
        held_again = gate.await_arrival()
        adding = inside(caller, lambda: rtr.rpc_sync("learner").add())
        assert ray.wait([adding], timeout=0.3)[0] == []
        gate.release(held)
        gate.release(held_again)
        get(staying)
        assert get(adding) == 1
