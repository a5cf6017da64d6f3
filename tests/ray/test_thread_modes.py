"""Modes of torch that belong to a thread: a direct call has those that the actor has set for itself."""

from __future__ import annotations

from typing import Any

import pytest
import ray
import torch

import raytorchrpc as rtr
from tests.ray.actors import Peer
from tests.ray.call_actors import Moded
from tests.ray.conftest import Spawn


@pytest.fixture
def moded(spawn: Spawn) -> Any:
    return spawn(Moded)


OFF = False, "meta", True


def test_direct_calls_have_the_modes_of_rays_thread(moded: Any, spawn: Spawn) -> None:
    with rtr.init_group({"moded": moded, "plain": spawn(Moded)}, include_driver=True):
        assert ray.get(moded.modes.remote()) == OFF
        for _ in range(2):
            assert rtr.rpc_sync("moded").modes() == OFF
            assert list(rtr.rpc_sync("moded").items()) == [OFF] * 2
            assert rtr.remote("moded").modes().to_here() == OFF
            rtr.rpc_sync("moded").leave_others()
        assert ray.get(moded.ask.remote("plain", "moded")) == OFF, "while a method waits in other modes"
        ray.get(moded.train.remote())
        assert ray.get(moded.modes.remote()) == rtr.rpc_sync("moded").modes() == (True, "meta", True)
        assert ray.get(moded.run.remote(torch.is_grad_enabled)), "what a direct call leaves is not left to Ray's thread"


def test_what_a_direct_call_sets_is_gone_after_it(spawn: Spawn) -> None:
    def leave() -> bool:
        torch.set_grad_enabled(False)
        torch.set_default_device("meta")
        return torch.is_grad_enabled()

    def modes() -> tuple[bool, str]:
        return torch.is_grad_enabled(), torch.ones(1).device.type

    with rtr.init_group({"a": spawn(Peer), "threaded": spawn(Peer, max_concurrency=2)}, include_driver=True):
        for name in ("a", "threaded"):
            for _ in range(4):
                assert not rtr.rpc_sync(name).give(leave)
                assert rtr.rpc_sync(name).give(modes) == (True, "cpu")
