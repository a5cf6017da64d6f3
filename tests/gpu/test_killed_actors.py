"""Actors that are killed while a GPU still computes what they sent, or has still to read what they received."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

import raytorchrpc as rtr
from tests.insides import in_actor
from tests.polling import wait_until

pytestmark = pytest.mark.gpu

ELEMENTS = 3_000_000
#: Longer than any test waits (clock cycles).
_FOR_EVER = 200_000_000_000
#: Longest time in which a survivor learns of it (seconds).
_SOON_S = 15.0


class Member:
    def run(self, function: Any, *args: Any) -> Any:
        return function(*args)

    @rtr.method
    def ones(self, busy: bool) -> torch.Tensor:
        """The GPU does not get to compute it if it is busy."""
        if busy:
            torch.cuda._sleep(_FOR_EVER)
        return torch.ones(ELEMENTS, device="cuda")

    @rtr.method
    def total(self, tensor: torch.Tensor) -> float:
        return float(tensor.sum())

    @rtr.method
    def keep_busy(self) -> None:
        torch.cuda._sleep(_FOR_EVER)

    @rtr.method
    def take(self, tensor: torch.Tensor) -> None:
        """Its copy is only queued."""


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.gpu(2))], ids=["one GPU", "two GPUs"])
def ends(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """``victim`` is to be killed. ``other`` and ``survivor`` are on one GPU."""
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    try:
        names = ("survivor", "other", "victim")
        gpus = dict(zip(names, ("0", "0", str(request.param - 1)), strict=True))
        remote = ray.remote(Member)
        made = {
            name: remote.options(num_gpus=0.3, runtime_env={"env_vars": {"CUDA_VISIBLE_DEVICES": gpu}}).remote()
            for name, gpu in gpus.items()
        }
        for actor in made.values():
            in_actor(actor, lambda: torch.ones(1, device="cuda").sum().item())
        with rtr.init_group(made):
            yield made
    finally:
        ray.shutdown()


def kill(actor: Any) -> None:
    os.kill(in_actor(actor, os.getpid), signal.SIGKILL)


def call_other() -> float:
    """What the survivor still can do: a call each way."""
    total: float = rtr.rpc_sync("other").total(rtr.rpc_sync("other").ones(False))
    return total


def lose_result() -> str:
    with pytest.raises(rtr.PeerLost) as lost:
        rtr.rpc_sync("victim", timeout=60).ones(True)
    return lost.value.peer


def goes_on() -> bool:
    """Whether this process's stream does."""
    event = torch.cuda.Event()
    event.record()
    return wait_until(event.query, _SOON_S)


def test_a_result_that_was_not_computed_is_never_handed_over(ends: dict[str, Any]) -> None:
    assert in_actor(ends["survivor"], call_other) == ELEMENTS
    waiting = ends["survivor"].run.remote(lose_result)
    assert not ray.wait([waiting], timeout=1.0)[0], "it does not wait for the GPU"
    began = time.monotonic()
    kill(ends["victim"])
    assert ray.get(waiting, timeout=_SOON_S) == "victim"
    print(f"lost after {time.monotonic() - began:.2f} s")
    assert in_actor(ends["survivor"], call_other) == ELEMENTS


def send_late() -> None:
    torch.cuda._sleep(_FOR_EVER)
    rtr.rpc_async("survivor").total(torch.ones(ELEMENTS, device="cuda"))


def test_an_argument_that_was_not_computed_frees_the_callee(ends: dict[str, Any]) -> None:
    in_actor(ends["victim"], send_late)
    waiting = ends["survivor"].run.remote(call_other)
    kill(ends["victim"])
    assert ray.get(waiting, timeout=_SOON_S) == ELEMENTS
    assert in_actor(ends["other"], lambda: rtr.rpc_sync("survivor").total(torch.ones(5, device="cuda"))) == 5


def leave_to_victim() -> None:
    rtr.rpc_sync("victim").keep_busy()
    rtr.rpc_sync("victim").take(torch.ones(ELEMENTS, device="cuda"))


def test_the_callers_stream_goes_on_when_the_callee_has_not_copied(ends: dict[str, Any]) -> None:
    in_actor(ends["survivor"], leave_to_victim)
    kill(ends["victim"])
    assert in_actor(ends["survivor"], goes_on)
    assert in_actor(ends["survivor"], call_other) == ELEMENTS
