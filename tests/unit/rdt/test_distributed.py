"""DTensors in ObjectRefs, without Ray's processes: objects that Ray pickled before it knew of DTensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from raytorchrpc.errors import SerializationError
from raytorchrpc.rdt import distributed


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if the program imported DTensors only now."""
    reducers = ray.cloudpickle.CloudPickler.dispatch
    monkeypatch.setattr(distributed, "_covered", set())
    before = reducers.pop(DTensor, None)
    yield
    reducers.pop(DTensor, None)
    if before is not None:
        reducers[DTensor] = before


@pytest.fixture
def tensor() -> Iterator[DTensor]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DTensor.from_local(torch.ones(3), dist.init_device_mesh("cpu", (1,)), [Shard(0)])
    dist.destroy_process_group()


@pytest.mark.usefixtures("unknown")
def test_a_shard_that_ray_took_out_too_early_is_refused(tensor: DTensor) -> None:
    with torch.no_grad():
        taken = tensor.to_local()
    with pytest.raises(SerializationError, match=r"call raytorchrpc\.rdt\.enable\(\) after you import torch"):
        distributed.check([torch.ones(3), taken])
    distributed.check([taken])  # from now on Ray takes it out as it should


@pytest.mark.usefixtures("unknown")
def test_other_tensors_pass(tensor: DTensor) -> None:
    distributed.check([torch.ones(3)])


@pytest.mark.usefixtures("unknown")
def test_a_reducer_of_the_users_own_is_kept(tensor: DTensor) -> None:
    ray.cloudpickle.CloudPickler.dispatch[DTensor] = lambda tensor: (str, ("the user's",))
    distributed.reduce_for_transports()
    assert ray.cloudpickle.loads(ray.cloudpickle.dumps(tensor)) == "the user's"


@pytest.mark.usefixtures("unknown")
def test_outside_of_transports_pickles_stay_torchs_own(tensor: DTensor) -> None:
    assert distributed.reduce_for_transports()
    assert not distributed.reduce_for_transports()
    found = ray.cloudpickle.loads(ray.cloudpickle.dumps(tensor))
    assert type(found) is DTensor and found.device_mesh == tensor.device_mesh
