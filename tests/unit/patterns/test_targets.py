"""What pulls into one model know from one to the next."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch

import raytorchrpc as rtr
from raytorchrpc.patterns.weights.model_buffers import BuffersByModel
from raytorchrpc.patterns.weights.model_tensors import KnownModel


def test_what_was_worked_out_is_kept_for_the_last_two_memories() -> None:
    tensor, other = torch.zeros(4), torch.zeros(4)
    model: dict[str, Any] = {"w": tensor, "shard": rtr.Shard(other, (8,), (4,))}
    model_before = KnownModel(model)

    def known() -> Any:
        found = model_before.find(model)
        assert found is not None and found.tensors["w"] is tensor and found.tensors["shard"] is other
        return found.known

    memories = [tensor.data, torch.ones(4), torch.ones(8)[::2]]
    first = known()
    first["copies"] = 1
    tensor.data = memories[1]
    second = known()
    assert not second
    tensor.data = memories[0]
    assert known() is first
    tensor.data = memories[2]
    assert not known() and known() is not second
    tensor.data = memories[0]
    assert known() is not second and known().get("copies") == 1


def test_another_model_is_not_taken_for_the_one_before() -> None:
    tensor = torch.zeros(4)
    model_before = KnownModel({"w": tensor})
    assert model_before.find({"w": tensor}) is not None
    assert model_before.find({"w": torch.zeros(4)}) is None
    assert model_before.find({"other": tensor}) is None
    assert model_before.find({"w": rtr.Shard(tensor, (8,), (4,))}) is None
    tensor.data = torch.zeros(5)
    assert model_before.find({"w": tensor}) is None
    gone = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert gone() is None, "it keeps none of the tensors"


def test_a_prefetch_knows_the_model_of_the_one_before() -> None:
    models, model = BuffersByModel(), torch.nn.Linear(3, 3)
    buffers, tensors = models.of(model, "w")
    again = models.of(model, "w")
    assert again[0] is buffers and again[1].specs is tensors.specs
    model.weight.data = torch.zeros(3, 3)
    assert models.of(model, "w")[1].specs is tensors.specs, "other memory of the same kind"
    model.weight.data = torch.zeros(3, 3).t()
    changed = models.of(model, "w")[1]
    assert changed.specs != tensors.specs and models.of(model, "w")[1].specs is changed.specs
