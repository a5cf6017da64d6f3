"""ObjectRefs by the group's lanes: what members, and others, get of what an actor made, and how long it is kept."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
import torch

import raytorchrpc as rtr
from tests.polling import suspend
from tests.ray.actors import Latch
from tests.ray.conftest import Spawn
from tests.ray.ref_actors import AsyncRefPeer, RefPeer, Stranger, total_in_task

LIMIT_S = 60  # what only a hang takes: a task may have to wait for a new worker of Ray, many seconds on a busy machine


def get(ref: Any, timeout: float = LIMIT_S) -> Any:
    return ray.get(ref, timeout=timeout)


def ready(ref: Any) -> Any:
    """The ref, once it may go inside a container."""
    rtr.rdt.wait(ref, timeout=LIMIT_S)
    return ref


def eventually(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not what():
        assert time.monotonic() < deadline, "it did not come to that"


@pytest.fixture(scope="module")
def actors(spawn_for_module: Spawn) -> dict[str, Any]:
    return {
        "a": spawn_for_module(RefPeer),
        "b": spawn_for_module(RefPeer),
        "c": spawn_for_module(RefPeer),
        "s": spawn_for_module(AsyncRefPeer),
        "t": spawn_for_module(RefPeer, max_concurrency=4),
    }


@pytest.fixture(scope="module")
def stranger(spawn_for_module: Spawn) -> Any:
    return spawn_for_module(Stranger)


@pytest.fixture(scope="module")
def members(actors: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with rtr.init_group(actors):
        yield actors


@pytest.fixture(autouse=True)
def nothing_is_kept(actors: dict[str, Any]) -> Iterator[None]:
    """After each test every source has let go of what it made."""
    yield
    gc.collect()
    for name in "abct":
        eventually(lambda name=name: get(actors[name].held.remote()) == 0)
    eventually(lambda: rtr.rdt.held() == 0)


# --- before any group ------------------------------------------------------------------------------------------


class TestWithoutAGroup:
    def test_actors_get_each_others_tensors(self, actors: dict[str, Any]) -> None:
        assert get(actors["b"].total.remote(actors["a"].ones.remote(100_000))) == 100_000

    def test_the_driver_gets_them(self, actors: dict[str, Any]) -> None:
        assert torch.equal(get(actors["a"].ones.remote(70_000)), torch.ones(70_000))
        assert torch.equal(get(actors["s"].ones.remote(7)), torch.ones(7))

    def test_a_group_that_is_formed_after_the_object_was_made(self, actors: dict[str, Any]) -> None:
        ref = ready(actors["a"].ones.remote(100_000))
        with rtr.init_group({"a": actors["a"], "b": actors["b"]}, name="later") as group:
            assert get(actors["b"].total.remote(ref)) == 100_000
            assert pulled(group) == {("b", "a")}
        assert get(actors["b"].total.remote(ref)) == 100_000  # and ended before it is wanted again


def pulled(group: rtr.Group) -> set[tuple[str, str]]:
    """Who called whom in the group."""
    return {(row.caller, row.peer) for row in group.stats() if row.calls}


# --- between members -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", [1, 5000, 3_000_000])
def test_a_member_gets_what_another_made(members: dict[str, Any], numel: int) -> None:
    pairs = ("ab", "as", "sa", "st", "ta")
    made = [members[receiver].total.remote(members[source].ones.remote(numel)) for source, receiver in pairs]
    assert get(made) == [numel] * len(pairs)


def test_it_goes_by_the_group(members: dict[str, Any]) -> None:
    def carried() -> int:
        rows = rtr.get_group().stats()
        return sum(row.bytes_in for row in rows if (row.caller, row.peer, row.lane) == ("b", "c", "shm"))

    before = carried()
    assert get(members["b"].total.remote(members["c"].ones.remote(1_000_000))) == 1_000_000
    assert carried() - before >= 4_000_000


def total_of(tensors: Any) -> float:
    return float(sum(tensor.sum() for tensor in (tensors.values() if isinstance(tensors, dict) else tensors)))


def twelve(members: dict[str, Any]) -> list[Any]:
    return [members[name].ones.remote(50_000) for name in "acst" for _ in range(3)]


def from_two(members: dict[str, Any]) -> dict[str, Any]:
    return {"x": ready(members["a"].ones.remote(5)), "y": ready(members["s"].ones.remote(100_000))}


def large(members: dict[str, Any]) -> list[Any]:
    return [ready(members["a"].ones.remote(100_000))]


#: What a user may write, and the sum it gets.
WAYS: dict[str, tuple[Callable[[dict[str, Any]], Any], float]] = {
    "several refs of one task": (lambda m: m["b"].total.remote(*twelve(m)), 600_000),
    "several refs at one get": (lambda m: m["b"].get.remote(total_of, list(map(ready, twelve(m)))), 600_000),
    "refs in a dict": (lambda m: m["b"].get.remote(total_of, from_two(m)), 100_005),
    "a ref in a list, by a coroutine": (lambda m: m["s"].get.remote(large(m)), 100_000),
    # By who borrows it, inside a container: as an argument of its own Ray takes it from its owner only.
    "a ref that is passed on": (lambda m: m["b"].pass_on.remote(large(m), m["s"]), 100_000),
    "an actor that uses another": (lambda m: m["b"].use.remote(m["a"], 100_000), 100_000),
    "an async actor that uses another": (lambda m: m["s"].use.remote(m["a"], 100_000), 100_000),
    "what a member puts": (lambda m: m["b"].total.remote(*get(m["a"].put.remote(100_000))), 100_000),
    "a direct call": (lambda m: m["b"].run.remote(lambda: float(rtr.rpc_sync("a").ones(100_000).sum())), 100_000),
}


@pytest.mark.parametrize("way", WAYS)
def test_whichever_way_it_is_written(members: dict[str, Any], way: str) -> None:
    act, expected = WAYS[way]
    assert get(act(members)) == expected


@pytest.mark.parametrize("source", ["a", "s"])
def test_a_source_that_is_busy_still_serves(
    members: dict[str, Any], stranger: Any, source: str, latch: Callable[[], Latch]
) -> None:
    ref = ready(members[source].ones.remote(100_000))
    door = latch()
    busy = members[source].busy.remote(door)
    held = door.await_arrival()
    try:
        assert get(members["b"].total.remote(ref)) == 100_000
        assert get(stranger.get.remote([ref])) == 100_000
    finally:
        door.release(held)
    get(busy)


# --- everybody else --------------------------------------------------------------------------------------------


def test_a_task_and_an_actor_outside(members: dict[str, Any], stranger: Any) -> None:
    for ref in (ready(members["a"].ones.remote(1_000_000)), *get(members["a"].put.remote(1_000_000))):
        assert get(total_in_task.remote([ref])) == 1_000_000
        assert get(stranger.get.remote([ref, ref])) == 2_000_000
        assert torch.equal(ray.get(ref), torch.ones(1_000_000))


def test_a_driver_that_takes_part(spawn: Spawn) -> None:
    pair = {"a": spawn(RefPeer), "b": spawn(RefPeer)}
    with rtr.init_group(pair, name="with driver", include_driver=True) as group:
        assert get(pair["a"].ones.remote(1_000_000)).sum() == 1_000_000
        put = ray.put(torch.ones(1_000_000), _tensor_transport="TORCHRPC")
        assert get(pair["b"].total.remote(put)) == 1_000_000
        assert {("driver", "a"), ("b", "driver")} <= pulled(group)


# --- what tensors there are ------------------------------------------------------------------------------------


def plain(value: dict[str, Any]) -> dict[str, Any]:
    """Only what Ray itself can carry: it fails at some dtypes."""
    found = {}
    for name, tensor in value.items():
        data = tensor.detach().resolve_conj().contiguous()
        found[name] = (
            str(tensor.dtype),
            data.clone() if data.is_complex() or not data.dim() else data.view(torch.uint8).clone(),
        )
    return found


def twice() -> Any:
    tensor = torch.arange(10)
    return {"one": tensor, "same": tensor, "view": tensor[2:], "text": "beside", "none": []}


def test_one_tensor_twice_in_an_object_and_things_beside_it(members: dict[str, Any]) -> None:
    ref = members["a"].make.remote(twice)
    seen = get(members["b"].look.remote(lambda v: (v["one"] is v["same"], v["view"].tolist(), v["text"]), ref))
    assert seen == (True, list(range(2, 10)), "beside")


# --- targets ---------------------------------------------------------------------------------------------------


def into_buffers(refs: list[Any]) -> tuple[bool, float]:
    buffers = [torch.zeros(5), torch.zeros(300_000)]
    ray.experimental.set_target_for_ref(refs[0], buffers)
    received = ray.get(refs[0])
    same = all(one is other for one, other in zip(received, buffers, strict=True))
    return same, float(sum(buffer.sum() for buffer in buffers))


def pair() -> list[torch.Tensor]:
    return [torch.ones(5), torch.ones(300_000, requires_grad=True)]


def test_the_receivers_own_buffers_are_filled(members: dict[str, Any]) -> None:
    ref = ready(members["a"].make.remote(pair))
    assert get(members["b"].run.remote(into_buffers, [ref])) == (True, 300_005)
    assert into_buffers([ref]) == (True, 300_005)
    got = ray.get(ref)
    del ref
    eventually(lambda: get(members["a"].held.remote()) == 0)
    assert sum(tensor.sum() for tensor in got) == 300_005, "what a consumer got is its own"


# --- how long tensors are kept ---------------------------------------------------------------------------------


def test_a_source_keeps_its_tensors_as_long_as_there_are_refs(members: dict[str, Any]) -> None:
    ref = members["a"].state.remote()
    other = ready(ref)
    assert get(members["b"].total.remote(ref)) == 0
    assert get(members["a"].held.remote()) == 1
    with pytest.raises(TimeoutError, match="not freed"):
        get(members["a"].overwrite_when_freed.remote(1.0, 0.2))
    del ref, other
    get(members["a"].overwrite_when_freed.remote(2.0, LIMIT_S))
    assert get(members["b"].total.remote(members["a"].state.remote())) == 20_000


# --- what goes wrong -------------------------------------------------------------------------------------------


def test_a_method_that_fails(members: dict[str, Any]) -> None:
    def fail() -> None:
        raise ZeroDivisionError("on purpose")

    with pytest.raises(ZeroDivisionError, match="on purpose"):
        get(members["b"].total.remote(members["a"].make.remote(fail)))
    assert get(members["b"].total.remote(members["a"].ones.remote(3))) == 3


def test_a_source_that_stands_still(members: dict[str, Any]) -> None:
    refs = [ready(members["c"].ones.remote(100_000)) for _ in range(2)]
    pid = get(members["c"].pid.remote())
    suspend(pid)
    try:
        with pytest.raises(ray.exceptions.GetTimeoutError):
            ray.get(refs[0], timeout=0.5)
        waiting = members["b"].run.remote(get_soon, [refs[1]])
        assert get(waiting) == "GetTimeoutError"
    finally:
        os.kill(pid, signal.SIGCONT)
    assert get(members["b"].total.remote(*refs)) == 200_000
    assert get(members["c"].pid.remote()) == pid


def get_soon(refs: list[Any]) -> str:
    try:
        ray.get(refs, timeout=0.5)
    except ray.exceptions.GetTimeoutError as error:
        return type(error).__name__
    return "it came"


@pytest.mark.slow
def test_a_source_that_is_dead(spawn: Spawn) -> None:
    mortal, b, c = (spawn(RefPeer) for _ in range(3))
    with rtr.init_group({"mortal": mortal, "b": b, "c": c}, name="of a mortal"):
        refs = [ready(mortal.ones.remote(100_000)) for _ in range(3)]
        os.kill(get(mortal.pid.remote()), signal.SIGKILL)
        with pytest.raises(ray.exceptions.ActorDiedError):
            get(mortal.pid.remote())
        begun = time.monotonic()
        told = "did not arrive from member 'mortal' of group 'of a mortal': it is gone, or cannot be reached"
        with pytest.raises(rtr.TransferFailed, match=told) as raised:
            get(b.total.remote(refs[0]))
        assert refs[0].hex() in str(raised.value)
        with pytest.raises(rtr.TransferFailed, match=told):
            get(refs[1])
        with pytest.raises(rtr.TransferFailed, match=told):
            get(b.get.remote(total_of, [refs[2]]))
        assert time.monotonic() - begun < 40, "not told at once"
        assert get(b.total.remote(c.ones.remote(100_000))) == 100_000
