"""Calls as a user makes them: what may be sent, what comes back, how a call is waited for."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

import raytorchrpc as rtr
from tests import insides
from tests.programs import run_program
from tests.ray.actors import Latch
from tests.ray.call_actors import LARGE, AsyncCaller, Store
from tests.ray.conftest import Spawn

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass
class Members:
    """Sync members a, b and c, an async one, and the group."""

    a: Any
    b: Any
    c: Any
    asynchronous: Any
    group: rtr.Group

    def in_a(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run it in a's process, as a method of a that is not decorated."""
        return ray.get(self.a.run.remote(function, *args), timeout=60)

    def in_async(self, function: Callable[..., Any], *args: Any) -> Any:
        return ray.get(self.asynchronous.run.remote(function, *args), timeout=60)


@pytest.fixture(scope="module")
def members(spawn_for_module: Spawn) -> Iterator[Members]:
    a, b, c = (spawn_for_module(Store) for _ in range(3))
    asynchronous = spawn_for_module(AsyncCaller)
    with rtr.init_group({"a": a, "b": b, "c": c, "async": asynchronous}) as group:
        yield Members(a, b, c, asynchronous, group)


def double(target: Any, value: Any, timeout: float | None = None) -> Any:
    return rtr.rpc_sync(target, timeout=timeout).double(value)


def give(target: Any, what: Callable[[], Any]) -> Any:
    """What ``what`` returns, run by the target's method."""
    return rtr.rpc_sync(target).give(what)


# --- targets and verbs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["a", "b", "async"])
def test_the_three_verbs(members: Members, target: str) -> None:
    def use_all() -> list[Any]:
        future = rtr.rpc_async(target).double(21)
        rref = rtr.remote(target).double(21)
        return [rtr.rpc_sync(target).double(21), rtr.rpc_sync(target).double(x=21), future.wait(), rref.to_here()]

    assert members.in_a(use_all) == [42] * 4


# --- values ----------------------------------------------------------------------------------------------------


def test_handles_of_actors_travel_in_arguments_and_results(members: Members) -> None:
    def check(c: Any) -> None:
        assert give("b", lambda: ray.get(c.run.remote(os.getpid))) == ray.get(c.run.remote(os.getpid))
        assert give("b", lambda: rtr.rpc_sync(c).who()[0]) == "c"
        assert ray.get(give("b", lambda: c).run.remote(lambda: 7)) == 7

    members.in_a(check, members.c)


def test_a_reference_of_ray_is_refused_wherever_it_is(members: Members) -> None:
    """Ray would free its object too early or never."""

    def check() -> None:
        ref, b = ray.put(21), rtr.rpc_sync("b")
        queue, topic = rtr.Queue("refs", home="b"), rtr.Topic("refs", home="b")
        for send, place in (
            (lambda: b.double(ref), r"the 1st argument of b\.double \(ray\.ObjectRef\) cannot be pickled"),
            (lambda: rtr.rpc_async("b").double(x=ref), r"argument 'x' of b\.double \(ray\.ObjectRef\)"),
            (lambda: rtr.remote("b").double([ref]), r"b\.double \(list\) .* because of its \[0\] \(ray\.ObjectRef\)"),
            (lambda: b.give(lambda: ref), r"b\.give \(function\) .* because of its variable 'ref'"),
            (lambda: give("b", lambda: {"x": ray.put(1)}), r"the result of b\.give \(dict\) .* because of its \['x'\]"),
            (lambda: queue.put(ref), r"an item for queue 'refs' \(ray\.ObjectRef\)"),
            (lambda: queue.put_many([1, [ref]]), r"an item for queue 'refs' \(list\) .* because of its \[1\]\[0\]"),
            (lambda: topic.publish({"x": ref}), r"an item for topic 'refs' \(dict\) .* because of its \['x'\]"),
        ):
            with pytest.raises(rtr.SerializationError, match=f"{place}.*: Ray counts an ObjectRef only .*ray.get"):
                send()
        with pytest.raises(RuntimeError, match="SerializationError: Ray counts an ObjectRef only"):
            rtr.remote("b").give(lambda: [ray.put(1)]).to_here()
        assert queue.qsize() == 0 and b.double(ray.get(ref)) == 42

    members.in_a(check)


def test_an_actor_whose_handle_was_sent_outlives_the_senders_handle(members: Members) -> None:
    def send() -> None:
        peer = ray.remote(num_cpus=0)(Store).remote()
        assert ray.get(peer.double.remote(1)) == 2
        rtr.rpc_sync("b").keep([peer])

    def use() -> Any:
        ((peer,),) = insides.actor().take_kept()
        return ray.get(peer.double.remote(21), timeout=30)

    members.in_a(send)
    assert ray.get(members.b.run.remote(use), timeout=60) == 42


# --- the driver's __main__ -------------------------------------------------------------------------------------

SCRIPT = """
import dataclasses, os
import ray, torch
import raytorchrpc as rtr

@dataclasses.dataclass
class Sample:
    x: torch.Tensor
    def total(self): return float(self.x.sum()) + OFFSET

OFFSET = 100

def helper(sample): return sample.total() + 1

class Broken(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first}, {second}")
        self.second = second

@ray.remote
class Worker:
    def __init__(self): self.kept = None
    @rtr.method
    def keep(self, sample, function):
        self.kept = sample
        assert isinstance(sample, Sample), type(sample)
        return function(sample), Sample(sample.x * 2)
    @rtr.method
    def fail(self): raise Broken(1, 2)
    @rtr.method(concurrent=True)
    def beside(self, value=Sample): return value is Sample
    def drive(self, other):
        total, back = rtr.rpc_sync(other).keep(Sample(torch.ones(4)), helper)
        assert total == 105 and isinstance(back, Sample) and back.total() == 108
        assert rtr.rpc_sync(other).keep(Sample(torch.ones(1)), lambda s: s.total() * OFFSET)[0] == 10100
        assert rtr.rpc_sync(other).beside(Sample)
        try:
            rtr.rpc_sync(other).fail()
        except Broken as error:
            assert error.second == 2 and "in fail" in str(error.__cause__)
        return "actors agree"

if __name__ == "__main__":
    ray.init(
        address=os.environ["TEST_RAY_ADDRESS"], log_to_driver=False, configure_logging=False,
    )
    workers = [Worker.options(num_cpus=0).remote() for _ in range(2)]
    with rtr.init_group(workers, include_driver=True):
        print(ray.get(workers[0].drive.remote(workers[1])))
        total, back = rtr.rpc_sync(workers[0]).keep(Sample(torch.ones(2)), helper)
        assert total == 103 and isinstance(back, Sample)
        try:
            rtr.rpc_sync(workers[0]).fail()
        except Broken as error:
            print("driver caught", error)
"""


def test_classes_and_functions_of_the_drivers_main(cluster: None, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environment = {**os.environ, "TEST_RAY_ADDRESS": ray.get_runtime_context().gcs_address, "PYTHONPATH": str(ROOT)}
    ran = run_program(str(script), cwd=tmp_path, env=environment)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.splitlines() == ["actors agree", "driver caught 1, 2"]


# --- results that the actor keeps ------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["tensor", "view", "array", "from numpy"])
def test_a_result_of_the_actors_own_state_is_what_it_was_then(members: Members, what: str) -> None:
    def check() -> None:
        for size in (1000, LARGE) * 5:
            futures = []
            for _ in range(6):
                futures.append(rtr.rpc_async("c").get(what, size))
                rtr.rpc_async("c").add_one(what, size)
            for future in futures:
                result = future.wait()["state"]
                assert float(result.min()) == float(result.max()), "it changed while it was sent"

    members.in_a(check)


# --- futures ---------------------------------------------------------------------------------------------------


def test_a_future_before_and_after(members: Members, latch: Callable[[], Latch]) -> None:
    gate = latch()

    def begin() -> None:
        future = rtr.rpc_async("b").hold(gate)
        held = gate.await_arrival()
        assert not future.done()
        assert "b.hold" in repr(future) and "pending" in repr(future)
        for ask in (future.result, future.exception):
            start = time.monotonic()
            with pytest.raises(rtr.RpcTimeout, match=r"b\.hold has not answered within 0\.1 s"):
                ask(timeout=0.1)
            assert time.monotonic() - start < 20
        gate.release(held)
        assert future.wait() == future.result() == future.result(timeout=0) == "released"
        assert future.exception() is None
        assert future.done() and "done" in repr(future)

    members.in_a(begin)


def test_callbacks_get_the_future_may_block_and_may_call(members: Members) -> None:
    def check() -> None:
        done: list[Any] = []
        told = threading.Event()

        def callback(future: rtr.Future[int]) -> None:
            done.append(future.result(timeout=0) + rtr.rpc_sync("c").double(1))
            if len(done) == 3:
                told.set()

        def fails(future: Any) -> None:
            raise ValueError("a callback's own mistake")

        future = rtr.rpc_async("b").double(20)
        future.add_done_callback(fails)
        future.add_done_callback(callback)
        future.wait()
        future.add_done_callback(callback)
        rtr.rpc_async("b").double(20).add_done_callback(callback)
        assert told.wait(20)
        assert done == [42] * 3

    members.in_a(check)


@pytest.mark.parametrize("large", [False, True])
def test_awaiting_from_an_async_actor_leaves_its_loop_free(
    members: Members, latch: Callable[[], Latch], large: bool
) -> None:
    first, second = latch(), latch()

    async def check() -> None:
        loop = asyncio.get_running_loop()
        futures = [rtr.rpc_async(name).hold(gate) for name, gate in (("a", first), ("b", second))]
        both = asyncio.gather(*(_awaited(future) for future in futures))
        # The loop serves this actor's own methods meanwhile.
        assert await rtr.rpc_async("async").double(2) == 4
        await loop.run_in_executor(None, first.open)
        await loop.run_in_executor(None, second.open)
        assert await both == ["released"] * 2
        if large:
            tensor = await rtr.rpc_async("b").double(torch.ones(LARGE))
            assert float(tensor.sum()) == 2 * LARGE
        done = rtr.rpc_async("b").double(3)
        assert await done == await done == 6  # again, and when it is done already

    members.in_async(check)


async def _awaited(future: Any) -> Any:
    return await future


def test_awaiting_raises_what_the_method_raised(members: Members, latch: Callable[[], Latch]) -> None:
    gate = latch()

    async def check() -> None:
        with pytest.raises(ZeroDivisionError):
            await rtr.rpc_async("b").give(lambda: 1 / 0)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_awaited(rtr.rpc_async("b").hold(gate)), 0.05)

    members.in_async(check)
    gate.open_for_all()


# --- results that stay -----------------------------------------------------------------------------------------


def test_rrefs_to_results_can_be_fetched_passed_on_and_used(members: Members) -> None:
    def check() -> None:
        rref = rtr.remote("b").double(torch.ones(5))
        assert rref.owner_name() == rtr.get_group().members[1].rpc_name
        assert float(rref.to_here().sum()) == 10
        assert float(give("c", lambda: rref.to_here().sum())) == 10  # by way of a third
        assert give("b", lambda: rref.is_owner() and float(rref.local_value().sum())) == 10
        assert rref.rpc_sync().size() == (5,)
        nested = rtr.rpc_sync("b").double([rref])
        assert float(nested[0].to_here().sum()) == 10
        assert give("b", lambda: {"rref": rref})["rref"].to_here().shape == (5,)

    members.in_a(check)


# --- deadlines -------------------------------------------------------------------------------------------------


# --- errors ----------------------------------------------------------------------------------------------------
