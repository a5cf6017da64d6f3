"""Where the loaders of an engine's model put the tensors of a checkpoint."""

from __future__ import annotations

import pytest
import torch

import raytorchrpc as rtr
from raytorchrpc.integrations.recording import NoPlan, Parts, Recorder


def recorded(load: object, *parameters: torch.Tensor, **checkpoint: tuple[int, ...]) -> list[torch.Tensor]:
    """What the parameters have after the recorded copies, where the loader would have copied these tensors."""
    real = {name: torch.randn(shape) for name, shape in checkpoint.items()}
    meta = {name: tensor.to("meta") for name, tensor in real.items()}
    targets = [parameter.to("meta") for parameter in parameters]
    with Recorder(meta, targets) as recorder:
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
    with pytest.raises(NoPlan, match=change[:7].replace("flatten", "reshape")):
        source = changed(meta["w"])
        to = torch.empty(source.shape, device="meta")
        with Recorder(meta, [to]):
            to.copy_(changed(meta["w"]))


def test_a_quantised_model_is_refused_with_the_remedy() -> None:
    meta = {"w": torch.empty(4, 4, dtype=torch.bfloat16, device="meta")}
    to = torch.empty(4, 4, dtype=torch.float8_e4m3fn, device="meta")
    match = r"'w' is torch.bfloat16.*quantised.*with their scales"
    with pytest.raises(rtr.ConfigurationError, match=match), Recorder(meta, [to]):
        to.copy_(meta["w"])


def test_a_loader_that_copies_to_a_tensor_of_its_own_has_no_plan() -> None:
    meta = {"w": torch.empty(4, device="meta")}
    with pytest.raises(NoPlan, match="copies 'w' to a tensor of its own"), Recorder(meta, []):
        torch.empty(4).copy_(meta["w"])


def test_a_model_that_is_in_use_keeps_its_values_while_its_loaders_are_recorded() -> None:
    """As SGLang's: its tensors are real, and what a loader computes apart from them is computed."""
    weight, checkpoint = torch.ones(4), {"w": torch.empty(2, device="meta")}
    with Recorder(checkpoint, [weight]) as recorder:
        weight.zero_()
        weight[:2].copy_(checkpoint["w"])
        scratch = torch.ones(2).zero_() + 1
    assert weight.tolist() == [1] * 4
    assert scratch.tolist() == [1, 1]
    assert [(copied.source, copied.to.shape) for _, copied in recorder.copies] == [("w", (2,))]
    assert [view.shape for _, view in recorder.zeros] == [(4,)]


def test_one_tensor_may_fill_several_parts() -> None:
    class Store:
        def pull(self, model: dict[str, object], version: int, **options: object) -> None:
            self.pulled, self.options = model, options

    store = Store()
    Parts(["a", "b", "a", "a"]).pull(store, "wxyz", 1, 5.0)  # type: ignore[arg-type]
    assert store.pulled == {"a": "w", "b": "x", "a (2)": "y", "a (3)": "z"}
    assert store.options["mapping"] == {"a (2)": "a", "a (3)": "a"}
