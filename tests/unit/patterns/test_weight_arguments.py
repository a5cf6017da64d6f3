"""What weight stores do with models and arguments that are not what they have to be."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import raytorchrpc as rtr
from tests.freed import FREED, freed
from tests.polling import wait_until
from tests.unit.members import Members

X, Y = torch.ones(3, 4), torch.arange(5)


def model(**others: Any) -> dict[str, Any]:
    return {"x": torch.zeros(3, 4), "y": torch.zeros(5, dtype=torch.int64), **others}


def holds(tensors: dict[str, Any]) -> bool:
    return bool(torch.equal(tensors["x"], X) and torch.equal(tensors["y"], Y))


def written(tensors: dict[str, Any]) -> list[str]:
    return [name for name, tensor in tensors.items() if tensor.any()]


@pytest.fixture
def published(members: Members) -> Members:
    with members.acting("home"):
        rtr.WeightStore("w").publish({"x": X, "y": Y})
    return members


def error_of(members: Members, reader: str, tensors: dict[str, Any], **options: Any) -> str:
    """What a pull raises. It writes nothing, keeps no lease, and the same handle pulls the next model."""
    pool = members.served("weight store", "w").pool
    with members.acting(reader):
        store = rtr.WeightStore.find("w")
        with pytest.raises(rtr.ConfigurationError) as error:
            store.pull(tensors, **options)
        assert written(tensors) == [] and wait_until(lambda: pool.readers == 0, 20)
        store.pull(fits := model())
        assert holds(fits)
    return str(error.value)


READERS = pytest.mark.parametrize("reader", ["home", "a"])


@READERS
@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (model(x=torch.zeros(4).expand(3, 4)), "'x' of the weights for 'w' is expanded"),
        (model(x=torch.zeros(3, 4, dtype=torch.complex64).conj().imag), "'x' of the weights for 'w' is a conjugated"),
        (model(x=torch.zeros(2, 4)), "'x' is (3, 4) as published, and (2, 4) in the model (for a part of it, pull a"),
        (model(x=torch.zeros(5, 4)), "in the model (to fill a part of that, pull into a view such as tensor[:3, :4])"),
        (model(x=torch.zeros(3, 4).double()), "float64 in the model (convert=True converts it)"),
        (model(y=torch.zeros(5)), "float32 in the model (only floating dtypes are converted)"),
        ({"x": torch.zeros(3, 4)}, "the model has no 'y', which was published. mapping= gives other names, and strict"),
        (model(z=torch.zeros(1)), "'z' of the model was not published. mapping= gives other names, and strict=False"),
        (
            {f"_orig_mod.{name}": tensor for name, tensor in model().items()},
            "The model's names begin with '_orig_mod.': pull into the module inside, such as model._orig_mod",
        ),
    ],
)
def test_a_model_that_does_not_fit_is_told_what_to_do(
    published: Members, reader: str, tensors: dict[str, Any], message: str
) -> None:
    assert message in error_of(published, reader, tensors)


@READERS
def test_tensors_that_a_pull_does_not_write_may_be_expanded(published: Members, reader: str) -> None:
    """The second pull finds other memory than the first."""
    mine = model(z=torch.zeros(1).expand(3))
    with published.acting(reader):
        store = rtr.WeightStore.find("w")
        for only in (None, ("x", "y")):
            for _ in range(2):
                assert store.pull(mine, strict=False, only=only) == 1
                assert mine["x"].all()
                mine["x"].data = torch.zeros(3, 4)


class Copies(torch.nn.Linear):
    """Saves copies of some parameters, and views of the others."""

    def __init__(self, *copied: str) -> None:
        super().__init__(2, 2)
        self.copied = copied

    def state_dict(self, *args: Any, **options: Any) -> Any:
        saved = super().state_dict(*args, **options)
        return {name: its.clone() if name in self.copied else its[:] for name, its in saved.items()}


def test_copies_that_a_module_makes_are_named(members: Members) -> None:
    """What is written to them does not reach the module."""
    model, partly = Copies("weight"), Copies("weight", "bias")
    with members.acting("home"):
        store, parts = rtr.WeightStore("w"), rtr.WeightStore("parts")
        store.publish({"weight": torch.ones(2, 2), "bias": torch.ones(2)})
        parts.publish({"bias": torch.ones(2)})
        for _ in range(2):
            with pytest.raises(rtr.ConfigurationError, match="'weight' of the weights for 'w' is a copy that"):
                store.pull(model)
        assert not bool((model.bias == 1).any()), "nothing is written"
        store.pull(model, only="bias")
        assert bool((model.bias == 1).all()), "views of its parameters are no copies"
        with torch.no_grad():
            model.bias.zero_()
        parts.pull(model, strict=False)
        assert bool((model.bias == 1).all()), "the copy is not written"
        with pytest.raises(rtr.ConfigurationError, match="'bias' of the weights for 'parts' is a copy"):
            parts.pull(partly, strict=False)


def compiled(layers: torch.nn.Sequential) -> torch.nn.Sequential:
    layers[1] = torch.compile(layers[1], backend="eager")
    return layers


@pytest.mark.parametrize(
    ("wrap", "publishes", "message"),
    [
        (torch.nn.DataParallel, True, "published names begin with 'module.': publish .* such as model.module$"),
        (torch.nn.DataParallel, False, "model's names begin with 'module.': pull into .* such as model.module$"),
        (compiled, True, "published names have '_orig_mod.' inside: publish {name.replace"),
        (compiled, False, "model's names have '_orig_mod.' inside: pull with mapping={name: name.replace"),
    ],
)
def test_names_that_a_wrapper_has_changed(members: Members, wrap: Any, publishes: bool, message: str) -> None:
    models = [torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)) for _ in range(2)]
    with members.acting("home"):
        store = rtr.WeightStore("w")
        store.publish(wrap(models[0]) if publishes else models[0])
        with pytest.raises(rtr.ConfigurationError, match=message):
            store.pull(models[1] if publishes else wrap(models[1]))
        if wrap is compiled and not publishes:
            store.pull(models[1], mapping={name: name.replace("_orig_mod.", "") for name in models[1].state_dict()})
            both = zip(models[0].parameters(), models[1].parameters(), strict=True)
            assert all(torch.equal(one, other) for one, other in both)


@READERS
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"version": "1"}, "version= has to be the number of a version, not '1'"),
        ({"version": True}, "version= has to be the number of a version, not True"),
        ({"since": 1.5}, "since= has to be the number of a version, not 1.5"),
        ({"convert": torch.bfloat16}, "convert=torch.bfloat16 has to be True, which converts to the dtype of each"),
        ({"mapping": 3}, "mapping=3 has to be a dict"),
        ({"mapping": {"x": 3}}, "mapping={'x': 3} has to give the published name, or a list"),
        ({"mapping": {"x": []}}, "mapping={'x': []} has to give the published name, or a list"),
        (
            {"mapping": {"x": ["x", "y"]}},
            "'x' is (3, 4) in the model, and made of (3, 4) + (5,), one after",
        ),
    ],
)
def test_an_argument_of_another_kind_is_named(
    published: Members, reader: str, options: dict[str, Any], message: str
) -> None:
    said = error_of(published, reader, model(), **options)
    assert message in said and "has no 'x'" not in said


def test_version_numbers_are_whole_numbers(members: Members) -> None:
    with members.acting("home"):
        store = rtr.WeightStore("w")
        wrong: Any
        for wrong in ("7", 7.0, True):
            with pytest.raises(rtr.ConfigurationError, match="version= has to be the number of a version, not"):
                store.publish(model(), wrong)
            with pytest.raises(rtr.ConfigurationError, match="version= has to be the number of a version, not"):
                store.wait(wrong, 0)
            for option in ("version", "since"):
                with pytest.raises(rtr.ConfigurationError, match=f"{option}= has to be the number of a version, not"):
                    store.prefetch(model(), **{option: wrong})
        assert store.publish(model(), torch.tensor(7)) == 7  # type: ignore[arg-type]
        assert type(store.version()) is int


def test_conjugated_and_negated_views_are_published_by_their_values(members: Members) -> None:
    view = torch.tensor([1 + 2j, 3 - 4j]).conj()
    with members.acting("home"):
        store = rtr.WeightStore("w")
        store.publish({"x": view, "y": view.imag})
        store.pull(mine := {"x": torch.zeros(2, dtype=torch.complex64), "y": torch.zeros(2)})
    assert mine["x"].tolist() == [1 - 2j, 3 + 4j] and mine["y"].tolist() == [-2.0, 4.0]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_named(members: Members) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with members.acting("home"), pytest.raises(rtr.ConfigurationError, match="'w' is not a dense tensor with memory"):
        rtr.WeightStore("w").publish({"x": nested})


@pytest.mark.parametrize("call", ["publish", "pull", "prefetch"])
def test_a_model_on_the_meta_device_is_told_what_to_do(members: Members, call: str) -> None:
    meta = torch.nn.Linear(2, 2, device="meta")
    with members.acting("home"), pytest.raises(rtr.ConfigurationError, match=r"with memory: to_empty\(\) gives"):
        store = rtr.WeightStore("w")
        store.publish(torch.nn.Linear(2, 2))
        getattr(store, call)(meta)


@pytest.mark.parametrize("call", ["pull", "prefetch"])
@pytest.mark.parametrize("wrong", [3, "x", rtr.Shard(3, (4,), (0,))])  # type: ignore[arg-type]
def test_what_is_no_tensor_is_named(published: Members, call: str, wrong: Any) -> None:
    with published.acting("a"), pytest.raises(rtr.ConfigurationError, match=r"'n' of the weights for 'w' is a .*not "):
        getattr(rtr.WeightStore.find("w"), call)(model(n=wrong))


@pytest.mark.parametrize("place", [((4.0,), (0,)), (None, None), (4, 0), ("4", "0")])
def test_a_place_in_a_global_tensor_is_whole_numbers(members: Members, place: Any) -> None:
    with members.acting("home"), pytest.raises(rtr.ConfigurationError, match="is a Shard with global_shape="):
        rtr.WeightStore("w", publishers=["home"]).publish({"x": rtr.Shard(torch.ones(2), *place)})


# --- storage that was freed, and parameters that have none yet -------------------------------------------------------


def published_as(kind: str, tensor: torch.Tensor) -> Any:
    if kind == "module":
        module = torch.nn.Module()
        module.x, module.w = torch.nn.Parameter(X), torch.nn.Parameter(tensor)
        return module
    if kind == "pairs":
        return iter([("x", X), ("w", tensor)])
    return {"x": X, "w": rtr.Shard(tensor, (2, 3), (0, 0)) if kind == "shards" else tensor}


@pytest.mark.parametrize("how", FREED)
@pytest.mark.parametrize("kind", ["dict", "module", "pairs", "shards", "track"])
def test_a_tensor_whose_storage_was_freed_is_not_published(members: Members, kind: str, how: str) -> None:
    """The store stays as it was, and the next version has the next number."""
    options: dict[str, Any] = {"publishers": ["home"]} if kind == "shards" else {"track": kind == "track"}
    with members.acting("home"):
        store = rtr.WeightStore("w", **options)
        assert store.publish(published_as(kind, torch.ones(2, 3))) == 1
        with pytest.raises(rtr.ConfigurationError, match="'w' of the weights for 'w' has no memory: its st"):
            store.publish(published_as(kind, FREED[how]()))
        store.pull(read := {"x": torch.zeros(3, 4), "w": torch.zeros(2, 3)})
        assert torch.equal(read["x"], X) and bool(read["w"].all())
        assert store.publish(published_as(kind, torch.ones(2, 3))) == store.version()


@READERS
@pytest.mark.parametrize("how", FREED)
def test_nothing_is_pulled_into_a_tensor_whose_storage_was_freed(members: Members, reader: str, how: str) -> None:
    with members.acting("home"):
        rtr.WeightStore("w").publish({"x": X, "w": torch.ones(2, 3)})
    mine = {"x": torch.zeros(3, 4), "w": FREED[how]()}
    with members.acting(reader):
        store = rtr.WeightStore.find("w")
        for _ in range(2):
            with pytest.raises(rtr.ConfigurationError, match="'w' of the weights for 'w' has no memory: its st"):
                store.pull(mine)
        with pytest.raises(rtr.ConfigurationError, match="'w' of the weights for 'w' has no memory: its st"):
            store.prefetch(mine).swap()
        assert not mine["x"].any()
        assert store.pull(mine, only="x") == 1 and torch.equal(mine["x"], X)


@READERS
def test_a_model_is_pulled_into_again_once_it_has_its_storage(published: Members, reader: str) -> None:
    """As FSDP gives it, perhaps where it was before; also less of it at the same address is seen."""
    module = torch.nn.Module()
    module.x, module.y = (torch.nn.Parameter(tensor, requires_grad=False) for tensor in model().values())
    with published.acting(reader):
        store = rtr.WeightStore.find("w")
        store.pull(module)
        for kept in (0, 47):
            freed(module.x, kept)
            with pytest.raises(rtr.ConfigurationError, match="'x' of the weights for 'w' has no memory"):
                store.pull(module)
            with pytest.raises(rtr.ConfigurationError, match=r"'x' of the weights for 'w' has no memory"):
                store.prefetch(module).swap()
        freed(module.x, 48)
        assert store.pull(module) == 1 and holds({"x": module.x, "y": module.y})


@pytest.mark.parametrize("call", ["publish", "pull", "prefetch"])
def test_a_lazy_module_is_told_what_to_do(members: Members, call: str) -> None:
    lazy = torch.nn.Sequential(torch.nn.LazyLinear(3))
    with members.acting("home"):
        store = rtr.WeightStore("w")
        store.publish(torch.nn.Sequential(torch.nn.Linear(2, 3)))
        with pytest.raises(rtr.ConfigurationError, match=r"'0.weight' of .* is not initialized.*call the module"):
            getattr(store, call)(lazy)
        lazy(torch.ones(1, 2))
        getattr(store, call)(lazy)


class Extra(torch.nn.Linear):
    """Has state beside its parameters and buffers."""

    def __init__(self, state: Any) -> None:
        super().__init__(2, 2, bias=False)
        self.register_buffer("steps", torch.zeros(1))
        self.state = state

    def get_extra_state(self) -> Any:
        return copy.deepcopy(self.state)

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def test_the_remedy_for_a_tensor_of_extra_state_brings_all(members: Members) -> None:
    source, target = Extra(torch.ones(3)), Extra(torch.zeros(3))
    with members.acting("home"):
        store = rtr.WeightStore("w")
        source.steps.fill_(7)
        store.publish(source)
        with pytest.raises(rtr.ConfigurationError) as error:
            store.pull(target)
        assert str(error.value).endswith("pull into state = model.state_dict(), then model.load_state_dict(state)")
        assert not target.steps.any()
        store.pull(state := target.state_dict())
        target.load_state_dict(state)
    assert torch.equal(target.weight, source.weight) and target.steps.item() == 7 and bool(target.state.all())


def test_the_remedy_for_other_extra_state_leaves_it_out(members: Members) -> None:
    model = Extra({"amax": 1.0})
    with members.acting("home"):
        store = rtr.WeightStore("w")
        for call in (store.publish, store.pull):
            with pytest.raises(rtr.ConfigurationError, match=r"'_extra_state' of .* is a dict, not a.*leave it out"):
                call(model)
            tensors = {name: its for name, its in model.state_dict().items() if torch.is_tensor(its)}
            assert call(tensors) == 1  # type: ignore[operator]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (lambda: torch.eye(2).to_sparse(), "to_dense"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 1, 0, torch.qint8), "dequantize"),
    ],
)
def test_a_tensor_that_is_not_dense_is_told_what_makes_one(members: Members, make: Any, remedy: str) -> None:
    with members.acting("home"), pytest.raises(rtr.ConfigurationError, match=rf"'x' of .* memory: {remedy}\(\) makes"):
        rtr.WeightStore("w").publish({"x": make()})
