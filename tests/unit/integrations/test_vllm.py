"""The parts of the vLLM integration that need no vLLM; tests/integrations has the others."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import raytorchrpc as rtr
from raytorchrpc.integrations.vllm import UpdateStatus, check_version
from raytorchrpc.integrations.vllm.recording import Recorder

ROOT = Path(__file__).parents[3]

#: A vLLM that is there, but for what the plugin must not import.
PLUGIN = """
import json, sys, time, types
registered = []
class Factory:
    def register_engine(self, *args):
        if args in registered:
            raise ValueError("registered already")
        registered.append(args)
name = "vllm.distributed.weight_transfer.factory"
for length in range(1, 5):
    part = ".".join(name.split(".")[:length])
    sys.modules[part] = factory = types.ModuleType(part)
factory.WeightTransferEngineFactory = factory.WeightTransferTrainerFactory = Factory()
before, began = set(sys.modules), time.thread_time()
import raytorchrpc_vllm
raytorchrpc_vllm.register()
raytorchrpc_vllm.register()
print(json.dumps([time.thread_time() - began, sorted(set(sys.modules) - before), registered]))
"""


def test_the_plugin_costs_next_to_nothing_where_nobody_uses_it() -> None:
    ran = subprocess.run([sys.executable, "-c", PLUGIN], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    seconds, imported, registered = json.loads(ran.stdout)
    assert [name for name in imported if name.partition(".")[0] not in sys.stdlib_module_names] == ["raytorchrpc_vllm"]
    assert seconds < 0.005
    assert [name for name, *_ in registered] == ["raytorchrpc", "raytorchrpc"]


def test_what_the_plugin_registers_is_there() -> None:
    ran = subprocess.run([sys.executable, "-c", PLUGIN], cwd=ROOT, capture_output=True, text=True, timeout=60)
    _, _, registered = json.loads(ran.stdout)
    for _, module, name in registered:
        source = (ROOT / f"{module.replace('.', '/')}.py").read_text()
        assert f"\nclass {name}(" in source


def test_the_engine_asks_for_no_vllm_to_read_a_status() -> None:
    program = "import sys, raytorchrpc.integrations.vllm; assert 'vllm' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)


# --- where loaders put tensors ----------------------------------------------------------------------------------------


def recorded(load: object, *parameters: torch.Tensor, **checkpoint: tuple[int, ...]) -> list[torch.Tensor]:
    """What the parameters have after the recorded copies, where the loader would have copied these tensors."""
    real = {name: torch.randn(shape) for name, shape in checkpoint.items()}
    meta = {name: tensor.to("meta") for name, tensor in real.items()}
    with Recorder(meta) as recorder:
        targets = [parameter.to("meta") for parameter in parameters]
        load(targets, meta)  # type: ignore[operator]
    filled = [torch.full_like(parameter, 7.0) for parameter in parameters]
    for to, copied in recorder.copies:
        (number,) = (n for n, its in enumerate(targets) if its.untyped_storage() is to.untyped_storage())
        box = tuple(slice(o, o + n) for o, n in zip(copied.offset, copied.to.shape, strict=True))
        assert copied.global_shape == real[copied.source].shape
        copied.to.of(filled[number]).copy_(real[copied.source][box])
    for to, view in recorder.zeros:
        (number,) = (n for n, its in enumerate(targets) if its.untyped_storage() is to.untyped_storage())
        view.of(filled[number]).zero_()
    expected = [torch.full_like(parameter, 7.0) for parameter in parameters]
    load(expected, real)  # type: ignore[operator]
    assert all(torch.equal(one, other) for one, other in zip(filled, expected, strict=True))
    return filled


def test_parts_of_a_fused_parameter_are_found() -> None:
    def load(to: list[torch.Tensor], checkpoint: dict[str, torch.Tensor]) -> None:
        to[0].data[:4].copy_(checkpoint["q"])
        to[0].data.narrow(0, 4, 2).copy_(checkpoint["k"].narrow(0, 2, 2))

    recorded(load, torch.empty(6, 3), q=(4, 3), k=(6, 3))


def test_columns_of_a_rank_and_a_padded_vocabulary_are_found() -> None:
    def load(to: list[torch.Tensor], checkpoint: dict[str, torch.Tensor]) -> None:
        to[0].data.copy_(checkpoint["w"].narrow(1, 4, 4))
        to[1][:5].data.copy_(checkpoint["embed"])
        to[1][5:].data.fill_(0)

    recorded(load, torch.empty(3, 4), torch.empty(8, 2), w=(3, 8), embed=(5, 2))


def test_one_expert_of_a_stacked_tensor_is_found() -> None:
    def load(to: list[torch.Tensor], checkpoint: dict[str, torch.Tensor]) -> None:
        for expert in range(3):
            to[0].data[expert].copy_(checkpoint["experts"][expert, 2:])
        to[1].copy_(checkpoint["scale"])

    recorded(load, torch.empty(3, 2, 5), torch.empty(()), experts=(3, 4, 5), scale=())


@pytest.mark.parametrize("change", ["transposes", "computes", "flattens"])
def test_a_loader_that_does_more_than_copy_has_no_plan(change: str) -> None:
    meta = {"w": torch.empty(4, 4, device="meta")}
    changed = {
        "transposes": lambda its: its.t(),
        "computes": lambda its: its * 2,
        "flattens": lambda its: its.view(-1)[2:10].view(4, 2),
    }[change]
    with pytest.raises(Exception, match=change[:7].replace("flatten", "reshape")), Recorder(meta):
        source = changed(meta["w"])
        torch.empty(source.shape, device="meta").copy_(source)


def test_a_quantised_model_is_refused_with_the_remedy() -> None:
    meta = {"w": torch.empty(4, 4, dtype=torch.bfloat16, device="meta")}
    with (
        pytest.raises(rtr.ConfigurationError, match=r"'w' is torch.bfloat16.*quantised.*with their scales"),
        Recorder(meta),
    ):
        torch.empty(4, 4, dtype=torch.float8_e4m3fn, device="meta").copy_(meta["w"])


# --- what a user reads ------------------------------------------------------------------------------------------------


def test_a_status_says_which_way_and_why() -> None:
    status = UpdateStatus("layers", "X processes Y after loading", {"parameters": 10**6, "layers": 230 * 10**6})
    assert str(status) == "in its parameters (1.0 MB) and layer by layer (230.0 MB): X processes Y after loading"


@pytest.mark.parametrize(
    ("version", "known"), [("0.32.0", True), ("0.32.1rc2", True), ("0.31.2", False), ("0.33.0", False)]
)
def test_another_release_of_vllm_is_reported(version: str, known: bool, caplog: pytest.LogCaptureFixture) -> None:
    check_version(version, logging.getLogger("raytorchrpc"))
    messages = [record.getMessage() for record in caplog.records]
    assert not messages if known else f"vllm {version} is installed" in messages[0]
