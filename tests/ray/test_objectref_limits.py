"""Ray's documented limits of Direct Transport, one by one: whether each holds for ObjectRefs by the group's lanes.

``docs/objectrefs.md`` has them as a table that names these tests.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import ray
import torch
from ray.exceptions import RayActorError, RayTaskError

import raytorchrpc as rtr
from tests.insides import has_ended
from tests.polling import wait_until
from tests.ray.actors import Latch
from tests.ray.conftest import Spawn
from tests.ray.limit_actors import AsyncMaker, Maker, Undecorated

#: What users do is in test_objectrefs; these show, one by one, what Ray's page of limits says.
pytestmark = pytest.mark.slow

#: Seconds until a test gives up waiting.
PATIENCE_S = 60
#: What Ray waits for a transfer, in the actors of the tests that run into that limit (milliseconds).
SHORT_MS = 500


@pytest.fixture(scope="module")
def group(spawn_for_module: Spawn) -> Iterator[dict[str, Any]]:
    """Actors that every test may use and none may break, by name; all but ``stranger`` are members."""
    actors = {name: spawn_for_module(Maker) for name in ("a", "b", "c")}
    actors |= {name: spawn_for_module(AsyncMaker) for name in ("loop", "loop2")}
    actors["threaded"] = spawn_for_module(Maker, max_concurrency=4)
    with rtr.init_group(actors, name="limits"):
        yield actors | {"stranger": spawn_for_module(Maker)}


def get(ref: Any) -> Any:
    return ray.get(ref, timeout=PATIENCE_S)


def kill(actor: Any, **options: Any) -> None:
    """Returns when its process has ended: Ray kills it a moment after it says so."""
    pid = get(actor.pid.remote())
    ray.kill(actor, **options)
    assert wait_until(lambda: has_ended(pid), PATIENCE_S)


def made(ref: ray.ObjectRef[Any]) -> ray.ObjectRef[Any]:
    """The ref, once it may go inside an argument."""
    rtr.rdt.wait(ref, timeout=PATIENCE_S)
    return ref


def ones() -> torch.Tensor:
    return torch.ones(1000)


def receiving(cls: type) -> Any:
    return ray.remote(enable_tensor_transport=True)(cls)


def total(value: torch.Tensor) -> float:
    return float(value.sum())


# --- for every transport -----------------------------------------------------------------------------------------


def test_what_is_no_tensor_goes_by_the_object_store(group: dict[str, Any]) -> None:
    def mixture() -> dict[str, Any]:
        return {"tensor": torch.ones(1000), "array": numpy.ones(1000), "text": "with them"}

    def changed(value: dict[str, Any]) -> tuple[float, bool, str]:
        value["tensor"].add_(1)
        return total(value["tensor"]), value["array"].flags.writeable, value["text"]

    ref = group["a"].make.remote(mixture)
    assert get(group["b"].look.remote(ref, changed)) == (2000, False, "with them")


def test_a_task_cannot_take_a_ref_as_its_argument(group: dict[str, Any]) -> None:
    task = ray.remote(num_cpus=0, max_retries=0)(total)
    with pytest.raises(RayTaskError, match="could not be computed"):
        get(task.remote(group["a"].make.remote(ones)))


def test_a_task_gets_what_is_in_a_list(group: dict[str, Any]) -> None:
    @ray.remote(num_cpus=0)
    def task(refs: list[Any]) -> float:
        return total(ray.get(refs[0]))

    assert get(task.remote([made(group["a"].make.remote(ones))])) == 1000


def test_a_task_cannot_return_by_a_transport(cluster: None) -> None:
    with pytest.raises(ValueError, match="Invalid option keyword tensor_transport"):
        ray.remote(ones).options(tensor_transport="TORCHRPC")


def test_a_tensor_on_another_device_is_refused(group: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not on meta"):
        get(group["b"].look.remote(group["a"].make.remote(lambda: torch.ones(3, device="meta")), total))


def test_a_tensor_that_its_actor_changes_arrives_changed(group: dict[str, Any]) -> None:
    ref = made(group["a"].make.remote(ones))
    get(group["a"].run.remote(lambda maker: maker.last.add_(1) is None))
    assert get(group["b"].look.remote(ref, total)) == 2000


def test_what_arrives_is_the_receivers_own(group: dict[str, Any]) -> None:
    def change(value: torch.Tensor) -> float:
        return total(value.add_(1))

    ref = group["a"].make.remote(torch.ones, 100_000)
    assert get(group["b"].look.remote(ref, change)) == 200_000
    assert get(group["c"].look.remote(ref, change)) == 200_000
    assert get(group["a"].run.remote(lambda maker: total(maker.last))) == 100_000


def test_its_own_actor_gets_the_tensor_itself(group: dict[str, Any]) -> None:
    ref = group["a"].make.remote(ones)
    assert get(group["a"].run.remote(lambda maker, value: value is maker.last, ref))


def test_a_ref_cannot_be_awaited(group: dict[str, Any]) -> None:
    ref = made(group["a"].make.remote(ones))
    with pytest.raises(RayTaskError, match=r"ray::AsyncMaker\.wait_for"):
        get(group["loop"].wait_for.remote([ref]))


def test_one_return_value_alone(group: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="only support 1 return value"):
        group["a"].make.options(num_returns=2).remote(ones)


def test_a_ref_in_a_list_is_not_sent_before_its_object_exists(
    group: dict[str, Any], latch: Callable[[], Latch], spawn: Spawn
) -> None:
    closed = latch()
    slow = spawn(Maker)
    ref = slow.make.remote(lambda: closed.pass_through() or torch.ones(1000))
    with pytest.raises(NotImplementedError, match="metadata is not available"):
        group["b"].look.remote([ref], total)
    closed.open()
    assert get(group["b"].look.remote([made(ref)], lambda refs: total(ray.get(refs[0])))) == 1000


def test_who_receives_has_to_be_made_for_it(
    latch: Callable[[], Latch], spawn: Spawn, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", logger="raytorchrpc")
    environ = {"env_vars": {"RAY_rdt_fetch_fail_timeout_milliseconds": str(SHORT_MS)}}
    slow, plain, made_for_it = (
        spawn(Maker),
        *(spawn(cls, runtime_env=environ) for cls in (Undecorated, receiving(Undecorated))),
    )

    def late(sink: Any) -> Any:
        """Only when the sink's task is submitted does the object come to exist."""
        closed = latch()
        answer = sink.look.remote(slow.make.remote(lambda: closed.pass_through() or torch.ones(1000)), total)
        closed.open()
        return get(answer)

    assert late(made_for_it) == 1000
    assert "enable_tensor_transport=True" not in caplog.text
    with pytest.raises(TimeoutError, match="not found in RDT object store"):
        late(plain)
    assert wait_until(lambda: "enable_tensor_transport=True" in caplog.text, PATIENCE_S)


def test_a_ref_as_a_keyword_argument_never_arrives(group: dict[str, Any], spawn: Spawn) -> None:
    environ = {"env_vars": {"RAY_rdt_fetch_fail_timeout_milliseconds": str(SHORT_MS)}}
    impatient = spawn(Maker, runtime_env=environ)
    with pytest.raises(TimeoutError, match="not found in RDT object store"):
        get(impatient.look.remote(value=group["a"].make.remote(ones), how=total))
    assert get(impatient.look.remote(group["a"].make.remote(ones), how=total)) == 1000


def test_an_object_that_its_actor_took_along_is_not_made_again(group: dict[str, Any], spawn: Spawn) -> None:
    source = spawn(Maker, max_restarts=1, max_task_retries=1)
    ref = made(source.make.remote(ones))
    kill(source, no_restart=False)
    with pytest.raises(rtr.TransferFailed):
        get(group["b"].look.remote(ref, total))


# --- for two-sided transports ------------------------------------------------------------------------------------


def test_any_process_may_make_and_pass_on(group: dict[str, Any]) -> None:
    def orchestrate(_: Maker, source: Any, sink: Any) -> float:
        answer: float = ray.get(sink.look.remote(source.make.remote(ones), total), timeout=PATIENCE_S)
        return answer

    assert get(group["c"].run.remote(orchestrate, group["a"], group["b"])) == 1000
    assert get(group["stranger"].run.remote(orchestrate, group["a"], group["b"])) == 1000


def test_who_did_not_make_the_call_hands_on_in_a_list_alone(group: dict[str, Any]) -> None:
    def hand_on(_: Maker, refs: list[Any], sink: Any) -> None:
        ray.get(sink.look.remote(refs[0], total), timeout=PATIENCE_S)

    with pytest.raises(RayTaskError, match="could not be computed"):
        get(group["b"].run.remote(hand_on, [made(group["a"].make.remote(ones))], group["c"]))


def test_actors_of_no_group_and_of_several(group: dict[str, Any], spawn: Spawn) -> None:
    far = spawn(Maker)
    with rtr.init_group([far], name="another"):
        assert get(far.look.remote(group["a"].make.remote(ones), total)) == 1000
        assert get(group["a"].look.remote(far.make.remote(ones), total)) == 1000
    assert get(group["stranger"].look.remote(group["a"].make.remote(ones), total)) == 1000
    assert get(group["a"].look.remote(group["stranger"].make.remote(ones), total)) == 1000


@pytest.mark.parametrize("source", ["loop", "threaded"])
def test_async_and_threaded_actors(group: dict[str, Any], source: str) -> None:
    refs = [group[source].make.remote(torch.ones, n) for n in range(1, 20)]
    answers = [group["threaded"].look.remote(ref, total) for ref in refs]
    # An async actor takes it in a list: as an argument of its own it may be one that Ray's machinery waits for in vain.
    answers += [group["loop2"].get.remote([made(ref)]) for ref in refs]
    assert ray.get(answers, timeout=PATIENCE_S) == 2 * list(range(1, 20))


def test_the_driver_gets(group: dict[str, Any]) -> None:
    ref = group["a"].make.remote(ones)
    assert total(get(ref)) == 1000
    assert total(ray.get(ref, _use_object_store=True, timeout=PATIENCE_S)) == 1000


# --- for NIXL ----------------------------------------------------------------------------------------------------


def test_two_objects_share_some_of_their_tensors(group: dict[str, Any]) -> None:
    first = made(group["a"].make.remote(lambda: [torch.full((1000,), float(i)) for i in range(3)]))
    shared = get(group["a"].run.remote(lambda maker: [ray.put(maker.last[1:], _tensor_transport="TORCHRPC")]))[0]

    def firsts(value: list[torch.Tensor]) -> list[float]:
        return [float(tensor[0]) for tensor in value]

    assert get(group["b"].look.remote(shared, firsts)) == [1, 2]
    del shared
    assert get(group["b"].look.remote(first, firsts)) == [0, 1, 2]


# --- for transports that are not Ray's own -----------------------------------------------------------------------


class Unimportable:
    """As a class of the driver's own program is to its actors."""

    __module__ = "__main__"

    @rtr.method(objectref=True)
    def make(self, what: Callable[..., Any]) -> Any:
        return what()

    def pid(self) -> int:
        return os.getpid()


def test_a_restarted_actor_makes_and_gets(group: dict[str, Any], spawn: Spawn) -> None:
    mortal = spawn(Unimportable, max_restarts=1, max_task_retries=-1)
    before = get(mortal.pid.remote())
    assert get(group["b"].look.remote(mortal.make.remote(lambda: torch.ones(1000)), total)) == 1000
    kill(mortal, no_restart=False)
    assert wait_until(lambda: get(mortal.pid.remote()) != before, PATIENCE_S)
    assert get(group["b"].look.remote(mortal.make.remote(lambda: torch.ones(1000)), total)) == 1000


def test_an_actor_that_was_there_before_the_transport(cluster: None, group: dict[str, Any], spawn: Spawn) -> None:
    # Ray itself brings transports to new actors; this one is made by an actor that has never heard of it.
    def spread(_: Maker) -> Any:
        return receiving(Undecorated).options(num_cpus=0).remote()

    early = get(group["stranger"].run.remote(spread))
    with rtr.init_group([early], name="later"):
        ref = early.make.options(tensor_transport="TORCHRPC").remote(lambda: torch.ones(1000))
        assert get(group["a"].look.remote(ref, total)) == 1000


def test_async_and_threaded_actors_that_another_process_calls(group: dict[str, Any]) -> None:
    def orchestrate(_: Maker, source: Any, sink: Any) -> list[float]:
        refs = [source.make.remote(torch.ones, n) for n in range(1, 20)]
        rtr.rdt.wait(*refs, timeout=PATIENCE_S)
        answers: list[float] = ray.get([sink.get.remote([ref]) for ref in refs], timeout=PATIENCE_S)
        return answers

    for source, sink in (("loop", "loop2"), ("threaded", "loop")):
        assert get(group["stranger"].run.remote(orchestrate, group[source], group[sink])) == list(range(1, 20))


# --- errors ------------------------------------------------------------------------------------------------------


def test_a_dead_receiver_leaves_its_source_alone(group: dict[str, Any], spawn: Spawn) -> None:
    sink = spawn(Maker)
    pid = get(group["a"].pid.remote())
    ref = made(group["a"].make.remote(ones))
    kill(sink)
    with pytest.raises(RayActorError):
        get(sink.look.remote(ref, total))
    assert get(group["b"].look.remote(ref, total)) == 1000
    assert get(group["a"].pid.remote()) == pid
