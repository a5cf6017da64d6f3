"""Values as programs use them, whichever lane brings them, and memory of one's own."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy
import pytest
import ray
import torch

import raytorchrpc as rtr
from tests.insides import in_actor
from tests.ray.call_actors import LARGE, Store
from tests.ray.conftest import Spawn
from tests.ray.test_tensor_lanes import used

MIB = 1 << 20
#: Which lanes a group may use, by the one that then carries a large CPU tensor.
LANES = {"shm": None, "torchrpc": ("torchrpc",), "torchrpc beside socket": ("socket", "torchrpc")}


class Buffer(Store):
    """Keeps what it gets, and gives it back."""

    @rtr.method
    def echo(self, value: Any) -> Any:
        return value

    @rtr.method(keep=True)
    def store_own(self, *values: Any, **more: Any) -> list[bool]:
        """Whether each tensor is the only one on its memory."""
        assert all(value.flags.writeable for value in values if isinstance(value, numpy.ndarray))
        self.kept += [*values, *more.values()]
        tensors = [value for value in self.kept if isinstance(value, torch.Tensor)]
        return [tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors]


@pytest.fixture(scope="module")
def actors(spawn_for_module: Spawn) -> list[Any]:
    return [spawn_for_module(Buffer) for _ in range(2)]


@pytest.fixture(params=LANES)
def sender(request: pytest.FixtureRequest, actors: list[Any]) -> Iterator[Any]:
    """A member ``a`` whose tensors to ``b`` go by the lane in the parameter."""
    config = rtr.GroupConfig(lanes=LANES[request.param])
    with rtr.init_group(dict(zip("ab", actors, strict=True)), config=config):
        yield actors[0]


def use_like_any(target: str) -> None:
    """What programs do with tensors, whatever lane brings them and whatever comes with them."""
    text, small = ["secret" * 200_000], torch.arange(10.0)
    for others in ([], text, [torch.ones(20_000)], [torch.ones(400_000) for _ in range(3)]):
        kept = rtr.rpc_sync(target, timeout=60).echo([small, *others, torch.ones(60_000)])
        saved = pickle.dumps(kept[0])
        assert len(saved) < 1000 and b"secret" not in saved
        weight = torch.ones(1, requires_grad=True)
        loss = (weight * kept[0]).sum()
        kept[-1].mul_(2)  # not what the loss needs
        loss.backward()
        assert kept[0].resize_(20)[9] == 9 and kept[-1].resize_(100_000)[59_999] == 2
        kept[-1].untyped_storage().resize_(0)
    mask = torch.arange(3.0).expand(1000, 1000, 3)
    for arrived in (rtr.rpc_sync(target).echo(mask), rtr.rpc_sync(target).echo({"mask": [mask]})["mask"][0]):
        assert (arrived.shape, arrived.stride(), arrived.untyped_storage().nbytes()) == (mask.shape, mask.stride(), 12)
        assert torch.equal(arrived[999, 999], mask[0, 0])
    large = {"text": ["x" * (1 << 20)] * 3, "number": 7}
    assert rtr.rpc_sync(target).echo(large) == large
    with pytest.raises(rtr.ConfigurationError, match="it has 0 tensors, and into= 1"):
        rtr.rpc_sync(target, into=[torch.zeros(1)]).echo(large)


def test_what_arrives_is_used_like_what_ray_brings(sender: Any) -> None:
    in_actor(sender, partial(use_like_any, "b"))


# --- memory of one's own -------------------------------------------------------------------------------------------


def test_a_method_that_keeps_gets_memory_of_its_own(actors: list[Any]) -> None:
    def send() -> int:
        large, array = torch.arange(float(LARGE)), numpy.arange(float(LARGE))
        for _ in range(3):
            small = [torch.full((100 + number,), number) for number in range(20)]
            lonely = rtr.rpc_sync("b").store_own(large, large.view(2, -1).T, array, small=small[3], another=small[4])
            assert all(lonely)
            large += 1
        return used()

    with rtr.init_group(dict(zip("ab", actors, strict=True)), config=rtr.GroupConfig(shm_bytes=64 * MIB)):
        assert in_actor(actors[0], send) == 0, "the arena is not empty, though everything was copied out"
        kept = ray.get(actors[1].take_kept.remote(), timeout=60)
    for turn in range(3):
        large, turned, array, three, four = kept[5 * turn : 5 * turn + 5]
        assert torch.equal(large, torch.arange(float(LARGE)) + turn)
        assert torch.equal(turned.T.reshape(-1), large)
        assert (array == numpy.arange(float(LARGE))).all()
        assert (three == 3).all() and (four == 4).all()
