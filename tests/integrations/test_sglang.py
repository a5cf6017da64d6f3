"""Versions of a store get into the ranks of an engine that does as SGLang's does; the sources of SGLang are real."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.exceptions import RayActorError

import raytorchrpc as rtr
from raytorchrpc.integrations import sglang
from tests.integrations.sglang_engine import QKV, Engine, Holder, Publisher, checkpoint

pytestmark = pytest.mark.usefixtures("cluster")
#: No call lasts longer, unless it says so.
get = partial(ray.get, timeout=120)
HIDDEN, LAYERS = 64, 2


@contextmanager
def group_of(**options: Any) -> Iterator[tuple[Any, Any]]:
    """A publisher with a version, and a holder of an engine that is connected to it."""
    publisher = ray.remote(Publisher).options(num_cpus=0).remote(HIDDEN, LAYERS)
    holder = ray.remote(Holder).options(num_cpus=0).remote(**options)
    try:
        with rtr.init_group({"publisher": publisher, "holder": holder}, timeout=120):
            get(publisher.publish.remote(1))
            get(holder.connect.remote())
            yield publisher, holder
    finally:
        ray.kill(publisher)
        ray.kill(holder)


def parts(seed: int, rank: int, ranks: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """What a rank of the model has of a checkpoint."""
    whole = {name: its.to(dtype).float() for name, its in checkpoint(HIDDEN, LAYERS, seed).items()}
    size = HIDDEN // ranks
    mine = slice(rank * size, (rank + 1) * size)
    found = {}
    for layer in (f"layers.{number}" for number in range(LAYERS)):
        found[f"{layer}.qkv_proj"] = torch.cat([whole[f"{layer}.{name}.weight"][mine] for name in QKV])
        found[f"{layer}.o_proj"] = whole[f"{layer}.o_proj.weight"][:, mine]
        found[f"{layer}.norm"] = whole[f"{layer}.norm.weight"]
    return {**found, "derived": found["layers.0.norm"] + 1}


def has(holder: Any, seed: int, dtype: torch.dtype = torch.float32) -> bool:
    """Whether every rank has its part of a checkpoint, and what the model derives of it."""
    states = get(holder.states.remote())
    return all(
        torch.equal(its, state[name])
        for rank, state in enumerate(states)
        for name, its in parts(seed, rank, len(states), dtype).items()
    )


@pytest.mark.parametrize("options", [{"sessions": False}, {"tp_size": 2}, {"tp_size": 2, "computes": True}], ids=str)
def test_each_rank_has_its_part_after_each_update(options: dict[str, Any]) -> None:
    with group_of(**options) as (publisher, holder):
        assert get(holder.bring.remote()) == 1
        assert has(holder, 1)
        assert get(holder.bring.remote(get(publisher.publish.remote(2)))) == 2
        assert has(holder, 2)
        assert len(rtr.get_group().members) == 2 + options.get("tp_size", 1), "the ranks have joined"
        get(publisher.publish.remote(3, dtype="bfloat16"))
        get(holder.bring.remote())
        assert has(holder, 3, torch.bfloat16), "converted to the dtype of the model"
        get(holder.connect.remote(into="load_weights"))
        get(holder.bring.remote())
        assert has(holder, 3, torch.bfloat16)


def test_only_the_bytes_of_a_rank_are_brought() -> None:
    with group_of(tp_size=2) as (_, holder):
        get(holder.bring.remote())
        rows = [row for row in rtr.get_group().stats().weights if row.member.startswith("holder.")]
        norms = LAYERS * HIDDEN * 4
        whole = LAYERS * (4 * HIDDEN * HIDDEN + HIDDEN) * 4
        assert [row.bytes_in for row in rows] == [(whole - norms) // 2 + norms] * 2


def test_other_names_are_refused_and_the_engine_goes_on() -> None:
    with group_of(tp_size=2) as (publisher, holder):
        get(holder.bring.remote())
        get(publisher.publish.remote(2, rename="policy."))
        with pytest.raises(
            rtr.ConfigurationError, match=r"'policy' do not fill 'layers.0.qkv_proj'.*and 1 more of SGLang"
        ):
            get(holder.bring.remote())
        assert has(holder, 1), "nothing was written"
        with pytest.raises(rtr.NotFound, match="version 99"):
            get(holder.bring.remote(99))
        get(publisher.publish.remote(3))
        get(holder.bring.remote())
        assert has(holder, 3)


def test_prefixes_are_dropped_as_soon_as_sglang_lets_it() -> None:
    """SGLang 0.5.17 ends its engine if the request of an update asks for it too early."""
    with group_of() as (_, holder):
        get(holder.refuse_flushes.remote(3))
        get(holder.bring.remote())
        assert get(holder.flushes.remote()) == 1
        get(holder.refuse_flushes.remote(1 << 20))
        get(holder.bring.remote(flush_cache=False))
        with pytest.raises(rtr.RayTorchRpcError, match=r"has not dropped what .* with flush_cache=False"):
            get(holder.bring.remote())


def test_an_update_that_fails_midway_is_repeated() -> None:
    with group_of(tp_size=2) as (publisher, holder):
        get(holder.bring.remote())
        get(publisher.publish.remote(2))
        get(holder.tell.remote("fail_in_next_pull"))
        get(holder.bring.remote())
        assert has(holder, 2)


def test_an_engine_whose_rank_dies_in_an_update_leaves_the_others_alone() -> None:
    with group_of(tp_size=2) as (publisher, holder):
        other = ray.remote(Holder).options(num_cpus=0).remote()
        try:
            rtr.get_group().add({"other": other})
            get(other.connect.remote())
            get(holder.tell.remote("die_in_next_update"))
            with pytest.raises(RayActorError):
                get(holder.bring.remote(), timeout=60)
            get(publisher.publish.remote(2))
            get(other.bring.remote(), timeout=60)
            assert has(other, 2)
        finally:
            ray.kill(other)


def test_wrong_use_is_told_the_remedy() -> None:
    with group_of(custom_weight_loader=["os.path.join"]) as (_, holder):
        with pytest.raises(rtr.ConfigurationError, match="into='fast' has to be 'auto' or 'load_weights'"):
            get(holder.connect.remote(into="fast"))
        get(holder.connect.remote("no such store", timeout=2))
        with pytest.raises(rtr.NotFound, match="no such store"):
            get(holder.bring.remote())
    with pytest.raises(rtr.NotAMember):
        sglang.Updates(None).bring()


def test_a_loader_never_raises_into_sglang(caplog: pytest.LogCaptureFixture) -> None:
    """SGLang would end the engine."""
    sglang.load(torch.nn.Linear(2, 2), [("no request", torch.empty(0))])
    assert "could not update the model" in caplog.text and "could not report" in caplog.text


# --- what the engine of these tests has from SGLang -----------------------------------------------------------------


def source_of(module: str) -> Path:
    spec = find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0], *module.split(".")).with_suffix(".py")


def functions_of(module: str, owner: str | None) -> dict[str, ast.FunctionDef]:
    """The functions of a class of SGLang, or of a module; SGLang is read, as importing it takes a GPU's packages."""
    tree = ast.parse(source_of(module).read_text())
    body = tree.body
    if owner is not None:
        (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner)
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(
    "name", ["begin_weight_update", "update_weights_from_tensor", "end_weight_update", "flush_cache"]
)
@pytest.mark.parametrize("where", ["engine.Engine", "http_server_engine.HttpServerEngineAdapter"])
def test_the_engine_has_the_signatures_of_sglang(where: str, name: str) -> None:
    module, owner = where.split(".")
    theirs = [argument.arg for argument in functions_of(f"srt.entrypoints.{module}", owner)[name].args.args]
    assert theirs == list(inspect.signature(getattr(Engine, name)).parameters)


UPDATER = "srt.model_executor.model_runner_components.weight_updater"


def test_sglang_calls_a_custom_loader_with_the_model_and_the_tensors() -> None:
    updater = functions_of(UPDATER, "WeightUpdater")["update_weights_from_tensor"]
    calls = [ast.unparse(node) for node in ast.walk(updater) if isinstance(node, ast.Call)]
    assert "custom_loader(self.get_model(), named_tensors)" in calls
    assert list(inspect.signature(sglang.load).parameters) == ["model", "named_tensors"]
    assert "custom_weight_loader" in source_of("srt.arg_groups.fields.model").read_text()


def test_sglang_only_moves_the_tensor_that_comes_with_a_request() -> None:
    unwrap = functions_of(UPDATER, None)["_unwrap_tensor"]
    returned = [ast.unparse(node) for node in ast.walk(unwrap) if isinstance(node, ast.Return)]
    assert returned == ["return tensor.to(device)"]
