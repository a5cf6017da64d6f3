"""Prefetches between members of one process: what arrives beside a model, and how the model takes it."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

import raytorchrpc as rtr
from raytorchrpc.errors import PeerLost
from tests.polling import wait_until
from tests.unit.members import LEASE, TENSORS, Members, spied
from tests.unit.patterns.weight_values import values

LONG = 20.0


class Net(torch.nn.Module):
    """Two parameters, a buffer, and one tensor under two names."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 3)
        self.tied = torch.nn.Linear(3, 3, bias=False)
        self.tied.weight = self.first.weight
        self.register_buffer("steps", torch.tensor(0))
        self.fill(value)

    def fill(self, value: float) -> None:
        with torch.no_grad():
            for tensor in self.state_dict().values():
                tensor.fill_(value)

    def forward(self, x: torch.Tensor) -> Any:
        return self.tied(self.first(x))


def holds(model: torch.nn.Module | dict[str, torch.Tensor], value: float) -> bool:
    return set(values(model)) == {value}


def publish(members: Members, *given: float, track: bool = False, keep: int = 1) -> int:
    with members.acting("home"):
        store = rtr.WeightStore("w", track=track, keep=keep)
        return [store.publish(Net(value)) for value in given][-1]


def addresses(model: torch.nn.Module) -> list[int]:
    return [tensor.data_ptr() for tensor in model.state_dict().values()]


def test_the_model_changes_at_swap_and_its_tensors_stay_where_they_are(members: Members) -> None:
    model, twins = Net(-1.0), set()
    parameters = list(model.parameters())
    for value in (1.0, 2.0, 3.0, 4.0):
        version = publish(members, value)
        with members.acting("a"):
            store = store_of(members)
            before, place = values(model), addresses(model)
            handle = store.prefetch(model)
            assert handle.wait() == version and handle.done()
            assert (values(model), addresses(model)) == (before, place)
            assert handle.swap() == version
        assert holds(model, value) and addresses(model) == place
        twins.add(tuple(tensor.data_ptr() for tensor in store._twins.of(model).tensors.values()))
    assert len(twins) == 1, "a model has one twin, whatever the number of prefetches"
    assert list(map(id, model.parameters())) == list(map(id, parameters))
    assert model.tied.weight is model.first.weight


def store_of(members: Members) -> rtr.WeightStore:
    """One handle for each test: it keeps the twin."""
    store = getattr(members, "store", None)
    if store is None:
        store = members.store = rtr.WeightStore.find("w")  # type: ignore[attr-defined]
    return store


def test_a_backward_pass_through_weights_that_were_swapped_is_refused(members: Members) -> None:
    publish(members, 1.0)
    model = Net(2.0)
    loss = model(torch.ones(2, 3)).square().sum()
    with members.acting("a"):
        store_of(members).prefetch(model).swap()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def untied(model: Net) -> None:
    model.tied.weight = torch.nn.Parameter(torch.zeros(3, 3))


def one_memory(model: Net) -> None:
    model.tied.weight = torch.nn.Parameter(model.first.weight.data)


def turned(model: Net) -> None:
    model.first.weight.data = torch.zeros(3, 3).t()


def moved(model: Net) -> None:
    model.first.bias.data = torch.zeros(3)


def filled(model: Net) -> None:
    model.fill(7.0)


def transposed(model: Net) -> None:
    """In the same memory."""
    model.first.weight.data = model.first.weight.data.t()


@pytest.mark.parametrize("change", [untied, one_memory, turned, moved, transposed])
def test_a_model_may_change_between_prefetches(members: Members, change: Any) -> None:
    model = Net(-1.0)
    for value in (1.0, 2.0, 3.0):
        publish(members, value)
        with members.acting("a"):
            store_of(members).prefetch(model).swap()
        assert holds(model, value)
        if value == 1.0:
            change(model)
            stride = model.first.weight.stride()
    is_one = model.tied.weight.data_ptr() == model.first.weight.data_ptr()
    assert is_one == (change is not untied) and model.first.weight.stride() == stride
    model.first.weight.data.fill_(7.0)
    assert (model.tied.weight[0, 0].item() == 7.0) == is_one and model.first.bias[0].item() == 3.0


def test_a_model_is_described_again_only_if_its_twin_would_be_another(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(members, 1.0)
    described, model = spied(monkeypatch, "raytorchrpc.patterns.weights.prefetch.specs_of"), Net()
    with members.acting("a"):
        for change, times in ((filled, 1), (moved, 1), (transposed, 2)):
            change(model)
            for _ in range(2):
                store_of(members).prefetch(model).swap()
                assert len(described) == times


def flat(model: Net) -> None:
    model.first.bias.data = torch.zeros(9)[3:6]


def borrowed(model: Net) -> None:
    model.first.bias.data = torch.from_numpy(numpy.zeros(3, numpy.float32))


def shared(model: Net) -> None:
    model.first.bias.data = torch.zeros(3).share_memory_()


def aliased(model: Net) -> None:
    model.register_buffer("alias", model.first.bias.data, persistent=False)


@pytest.mark.parametrize("prepare", [flat, borrowed, shared, aliased])
def test_tensors_may_lie_anywhere(members: Members, prepare: Callable[[Net], None]) -> None:
    """Also in views, and in memory that others use; and a model may be given as a mapping."""
    publish(members, 1.0)
    model = Net()
    prepare(model)
    for given in (model, dict(model.state_dict())):
        model.fill(-1.0)
        place = addresses(model)
        with members.acting("a"):
            assert store_of(members).prefetch(given).swap() == 1
        assert holds(model, 1.0) and addresses(model) == place


def copies_bias(model: Net) -> None:
    def replace(module: Any, state: dict[str, torch.Tensor], prefix: str, metadata: Any) -> None:
        state["first.bias"] = state["first.bias"].clone()

    model.register_state_dict_post_hook(replace)


def expands_bias(model: Net) -> None:
    model.first.bias.data = torch.zeros(1).expand(3)


@pytest.mark.parametrize(
    ("change", "reason"),
    [(copies_bias, "'first.bias' .* is a copy that state_dict"), (expands_bias, "'first.bias' .* is expanded")],
)
@pytest.mark.parametrize("is_late", [False, True])
def test_what_cannot_be_written_is_named_before_anything_is(
    members: Members, change: Callable[[Net], None], reason: str, is_late: bool
) -> None:
    """Also if the model has changed since its prefetch."""
    publish(members, 1.0)
    model = Net(-1.0)
    if not is_late:
        change(model)
    with members.acting("a"):
        handle = store_of(members).prefetch(model)
        handle.wait()
        if is_late:
            change(model)
        with pytest.raises(rtr.ConfigurationError, match=reason):
            handle.swap()
        assert model.first.weight[0, 0].item() == -1.0


def test_code_of_a_model_runs_on_the_programs_thread(members: Members) -> None:
    """FSDP's hooks exchange data with other ranks."""
    publish(members, 1.0)
    model, ran = Net(-1.0), set[int]()
    model.register_state_dict_post_hook(lambda *args: ran.add(threading.get_ident()))
    with members.acting("a"):
        for _ in range(3):
            store_of(members).prefetch(model).swap()
    assert holds(model, 1.0) and ran == {threading.get_ident()}


def test_a_model_that_has_changed_since_is_refused(members: Members) -> None:
    publish(members, 1.0)
    model = Net(-1.0)
    with members.acting("a"):
        handle = store_of(members).prefetch(model)
        model.first.bias = torch.nn.Parameter(torch.full((3,), -1.0, dtype=torch.float64))
        with pytest.raises(rtr.ConfigurationError, match=r"has changed since its prefetch.*'first.bias'"):
            handle.swap()
        assert holds(model, -1.0)
        handle.cancel()
        # The twin had the version, and is another now.
        assert store_of(members).prefetch(model, convert=True).swap() == 1 and holds(model, 1.0)


def test_each_prefetch_is_swapped_once_and_one_at_a_time(members: Members) -> None:
    publish(members, 1.0)
    model = Net()
    with members.acting("a"):
        handle = store_of(members).prefetch(model)
        with pytest.raises(rtr.ConfigurationError, match="neither swapped nor cancelled"):
            store_of(members).prefetch(model)
        assert handle.swap() == 1
        handle.cancel()  # too late
        with pytest.raises(rtr.ConfigurationError, match="was swapped already"):
            handle.swap()
        assert holds(model, 1.0) and handle.wait() == 1
        dropped = store_of(members).prefetch(model)
        assert dropped.wait() == 1
        del dropped
        assert store_of(members).prefetch(model).swap() == 1


def test_a_cancelled_prefetch_leaves_the_model_and_ends_its_lease(members: Members) -> None:
    publish(members, 1.0)
    model, lane = Net(-1.0), members.lanes["a"]
    with members.acting("a"):
        store = store_of(members)
        lane.holds = lambda method: method == TENSORS
        handle = store.prefetch(model)
        assert wait_until(lambda: len(lane.held) == 1, LONG) and not handle.done()
        with pytest.raises(rtr.RpcTimeout, match=r"have not arrived within 0\.01 s"):
            handle.wait(0.01)
        handle.cancel()
        for _ in range(2):
            with pytest.raises(rtr.ConfigurationError, match="was cancelled"):
                handle.swap()
        following = store.prefetch(model)
        with pytest.raises(rtr.RpcTimeout):
            following.wait(0.05)
        pool = members.served("weight store", "w").pool
        assert pool.readers == 1
        lane.release()
        assert following.wait() == 1 and holds(model, -1.0)
        assert wait_until(lambda: pool.readers == 0, LONG)
        assert following.swap() == 1 and holds(model, 1.0)


def test_a_pull_that_fails_raises_its_error_and_leaves_the_model(members: Members) -> None:
    publish(members, 1.0)
    model, lane = Net(-1.0), members.lanes["a"]

    def fails(method: str) -> bool:
        if method == TENSORS:
            raise PeerLost("home", "the test broke the connection", may_have_run=False)
        return False

    with members.acting("a"):
        lane.holds = fails
        handle = store_of(members).prefetch(model)
        for ask in (handle.wait, handle.swap):
            with pytest.raises(PeerLost, match=r"the test broke the connection \(it is the home of weight store"):
                ask()
        assert handle.done() and holds(model, -1.0)
        lane.holds = lambda method: False
        with pytest.raises(rtr.NotFound, match="version 9"):
            store_of(members).prefetch(model, version=9).wait()
        model.head = torch.nn.Linear(2, 2)
        with pytest.raises(rtr.ConfigurationError, match=r"'head\.\w+' of the model was not published"):
            store_of(members).prefetch(model).swap()
        del model.head
        with pytest.raises(rtr.ConfigurationError, match="must be a module or tensors by name"):
            store_of(members).prefetch([])  # type: ignore[arg-type]
        assert holds(model, -1.0)
        assert store_of(members).prefetch(model).swap() == 1 and holds(model, 1.0)


def test_a_coroutine_awaits_it(members: Members) -> None:
    publish(members, 1.0)
    model, lane = Net(-1.0), members.lanes["a"]

    async def follow(store: rtr.WeightStore) -> None:
        for blocks, remedy in (
            (store.pull, "await store.apull"),
            (lambda m: store.prefetch(m).wait(), "await prefetch"),
        ):
            with pytest.raises(rtr.RayTorchRpcError, match=f"would block this thread's event loop: use `{remedy}"):
                blocks(Net(-1.0))
        assert await store.prefetch(model) == 1
        lane.holds = lambda method: method == LEASE
        handle = store.prefetch(model)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(handle, 0.05)
        lane.release()
        assert await handle == 1 and handle.swap() == 1
        cancelled = store.prefetch(model)
        cancelled.cancel()
        with pytest.raises(rtr.ConfigurationError, match="was cancelled"):
            await cancelled

    with members.acting("a"):
        asyncio.run(follow(store_of(members)))
    assert holds(model, 1.0)


def publish_tracked(members: Members, weight: float, bias: float) -> int:
    model = Net(weight)
    with torch.no_grad():
        model.first.bias.fill_(bias)
    with members.acting("home"):
        return rtr.WeightStore("w", track=True).publish(model)


def test_a_prefetch_brings_what_the_twin_lacks(members: Members) -> None:
    """The test writes to the twin, which shows what is brought. The model may be trained meanwhile."""
    model = Net()
    publish_tracked(members, 1.0, 1.0)
    with members.acting("a"):
        store = store_of(members)
        assert store.prefetch(model).swap() == 1
        store._twins.of(model).tensors["first.weight"].fill_(-1.0)
    publish_tracked(members, 1.0, 2.0)
    with members.acting("a"):
        model.fill(9.0)
        assert store.prefetch(model).swap() == 2
        assert (model.first.weight.unique().item(), model.first.bias.unique().item()) == (-1.0, 2.0)
        model.fill(9.0)
        assert store.prefetch(model).swap() == 2 and model.first.bias.unique().item() == 2.0, "it has the version"


@pytest.mark.parametrize("track", [False, True])
def test_what_the_twin_holds_counts_for_the_same_options_only(members: Members, track: bool) -> None:
    """A twin that holds a version by another mapping, or other names of it, lacks it."""
    with members.acting("home"):
        home = rtr.WeightStore("w", track=track)
        home.publish({"weight": torch.full((3, 3), 1.0), "bias": torch.full((3,), 2.0), "other": torch.full((3,), 3.0)})
    model = torch.nn.Linear(3, 3)
    model.register_buffer("other", torch.zeros(3))
    swapped = {"bias": "other", "other": "bias"}
    with members.acting("a"):
        store = store_of(members)
        assert store.prefetch(model).swap() == 1
        assert (model.bias[0].item(), model.other[0].item()) == (2.0, 3.0)
        assert store.prefetch(model, mapping=swapped).swap() == 1
        assert (model.bias[0].item(), model.other[0].item()) == (3.0, 2.0)
        assert store.pull(model) == 1
    with members.acting("home"):
        home.publish({"weight": torch.full((3, 3), 1.0), "bias": torch.full((3,), 2.0), "other": torch.full((3,), 9.0)})
    with members.acting("a"):
        assert store.prefetch(model, since=1, mapping=swapped).swap() == 2
        assert (model.bias[0].item(), model.other[0].item()) == (9.0, 2.0)
        assert store.pull(model, since=2) == 2, "no pull without mapping has returned this version"
        assert (model.bias[0].item(), model.other[0].item()) == (2.0, 9.0)
        model.more = torch.nn.Parameter(torch.zeros(3))
        assert store.prefetch(model, strict=False).swap() == 2
        with pytest.raises(rtr.ConfigurationError, match="'more' of the model was not published"):
            store.prefetch(model).swap()


def test_a_twin_that_holds_fp8_is_filled_again_without_scales(members: Members) -> None:
    with members.acting("home"):
        rtr.WeightStore("w").publish({"weight": torch.full((4, 4), 6.0)})
    model = {"weight": torch.zeros(4, 4, dtype=torch.float8_e4m3fn), "weight_scale_inv": torch.zeros(1, 1)}
    with members.acting("a"):
        store = store_of(members)
        assert store.prefetch(model, convert=rtr.BlockFp8()).swap() == 1
        assert model["weight"].float().unique().item() == 448.0
        assert store.prefetch(model, convert=True, strict=False).swap() == 1
        assert model["weight"].float().unique().item() == 6.0


def test_since_the_newest_brings_nothing(members: Members) -> None:
    publish(members, 1.0)
    model = Net(-1.0)
    with members.acting("a"):
        store = store_of(members)
        assert store.prefetch(model, since=1).swap() == 1, "this process has not pulled it yet"
        assert holds(model, 1.0)
        place = addresses(model)
        for version in (None, 1):
            handle = store.prefetch(model, version, since=1)
            assert handle.wait() == 1
            assert store.prefetch(model, since=1).swap() == 1, "what brought nothing needs no swap"
            assert handle.swap() == 1 and addresses(model) == place


def test_a_failed_prefetch_leaves_no_version_in_the_twin(members: Members) -> None:
    publish_tracked(members, 1.0, 1.0)
    model, lane = Net(), members.lanes["a"]

    def fails(method: str) -> bool:
        if method == TENSORS:
            raise PeerLost("home", "the test broke the connection", may_have_run=False)
        return False

    with members.acting("a"):
        store = store_of(members)
        handle = store.prefetch(model)
        handle.swap()
    publish_tracked(members, 1.0, 2.0)
    with members.acting("a"):
        lane.holds = fails
        with pytest.raises(PeerLost):
            store.prefetch(model).wait()
        lane.holds = lambda method: False
        assert store.pull(Net(), version=None) == 2
        store._twins.of(model).tensors["first.weight"].fill_(-1.0)
        assert store.prefetch(model).swap() == 2
    assert model.first.weight.unique().item() == 1.0


def test_what_was_not_published_is_not_written(members: Members) -> None:
    publish(members, 1.0)
    model = Net(-1.0)
    model.head = torch.nn.Linear(2, 2)
    model.fill(-1.0)
    head = model.head.weight.data_ptr()
    with members.acting("a"):
        for _ in range(2):
            assert store_of(members).prefetch(model, strict=False).swap() == 1
            assert model.head.weight.data_ptr() == head and holds(model.head, -1.0)
            del_head = {name: tensor for name, tensor in model.state_dict().items() if "head" not in name}
            assert holds(del_head, 1.0)


def test_models_of_every_kind(members: Members) -> None:
    publish(members, 1.0)
    with torch.inference_mode():
        frozen = Net(-1.0)
    half = Net(-1.0).bfloat16()
    turned = Net(-1.0)
    turned.first.weight.data = torch.full((3, 3), -1.0).t().contiguous().t()
    with members.acting("a"):
        for model in (frozen, half, turned):
            strides = [tensor.stride() for tensor in model.state_dict().values()]
            for _ in range(3):
                assert store_of(members).prefetch(model, convert=True).swap() == 1
                assert holds(model, 1.0)
                model.state_dict() if model is frozen else model.fill(-1.0)
            assert [tensor.stride() for tensor in model.state_dict().values()] == strides
    assert half.first.weight.dtype is torch.bfloat16


def test_a_twin_ends_with_its_model(members: Members) -> None:
    publish(members, 1.0)
    with members.acting("a"):
        store = store_of(members)
        for make in (Net, lambda: dict(Net().state_dict())):
            model = make()
            handle = store.prefetch(model)
            assert handle.swap() == 1
            twin = weakref.ref(store._twins.of(model))
            del handle
            gc.collect()
            assert twin() is not None
            del model
            assert wait_until(lambda it=twin: gc.collect() >= 0 and it() is None, LONG)  # type: ignore[misc]
