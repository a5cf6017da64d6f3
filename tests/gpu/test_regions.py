"""Regions of GPU memory: rows that another process on the same GPU, or another one, copies out of it in place."""

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
from tests.gpu.ends import ends
from tests.polling import wait_until

pytestmark = pytest.mark.gpu

ROWS, LONG = 96, 30.0
_kept: dict[str, Any] = {}


@pytest.fixture
def actors() -> Iterator[dict[str, Any]]:
    with ends("owner", "reader") as made:
        group = rtr.init_group(made)
        yield made
        group.shutdown()


def run(actor: Any, function: Any, *args: Any) -> Any:
    return ray.get(actor.run.remote(function, *args), timeout=120)


def filled(device: str = "cuda") -> dict[str, torch.Tensor]:
    made = {f"layer {n}": torch.arange(ROWS * 3000, device=device).view(ROWS, 2, 1500) * (n + 1) for n in range(5)}
    return {**made, "scales": torch.arange(ROWS, device=device, dtype=torch.float32).view(ROWS, 1)}


def expose(device: str = "cuda") -> None:
    _kept["cache"] = filled(device)
    _kept["region"] = rtr.Region("cache", _kept["cache"])


def lease(rows: list[int], value: int) -> Any:
    """Of what is written by then, behind work that keeps the GPU busy."""
    torch.cuda._sleep(50_000_000)
    _kept["cache"]["layer 1"].fill_(value)
    _kept["lease"] = _kept["region"].lease(rows, timeout=LONG)
    return _kept["lease"]


def ended() -> Any:
    return _kept["lease"].ended


def read_scattered(device: str, count: int) -> None:
    rows, at = torch.randperm(ROWS)[:60], torch.randperm(ROWS)[:60]
    for _ in range(count):  # the second time by the kernel, if it is compiled by then
        into = {name: torch.full_like(tensor, 7) for name, tensor in filled(device).items()}
        rtr.read("owner", "cache", rows=rows, at=at, into=into).wait(LONG)
        for name, tensor in filled(device).items():
            wanted = torch.full_like(tensor, 7)
            wanted[at.to(device)] = tensor[rows.to(device)]
            assert torch.equal(into[name], wanted), name
        time.sleep(1)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_scattered_rows_arrive_on_a_gpu(actors: dict[str, Any], device: str) -> None:
    run(actors["owner"], expose)
    run(actors["reader"], read_scattered, device, 3)
    if "other" in actors:
        run(actors["other"], read_scattered, device, 2)


def read_leased(given: Any, value: int) -> None:
    into = {"layer 1": torch.zeros(3, 2, 1500, dtype=torch.int64, device="cuda")}
    rtr.read("owner", "cache", into=into, lease=given).wait(LONG)
    assert bool((into["layer 1"] == value).all())


def test_a_lease_follows_what_the_gpu_writes(actors: dict[str, Any]) -> None:
    run(actors["owner"], expose)
    for value in range(5):
        given = run(actors["owner"], lease, [1, 5, 90], value)
        run(actors["reader"], read_leased, given, value)
        assert run(actors["owner"], ended) == "read"


def read_in_order() -> None:
    """What the reader's stream has queued on the target precedes the read, and the read what comes after ``wait``."""
    into = torch.zeros(ROWS, 2, 1500, dtype=torch.int64, device="cuda")
    for _ in range(5):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            into.fill_(-1)
            read = rtr.read("owner", "cache", into={"layer 0": into})
        read.wait(LONG)
        assert torch.equal(into, filled()["layer 0"])


def test_a_read_follows_what_its_caller_has_queued(actors: dict[str, Any]) -> None:
    run(actors["owner"], expose)
    run(actors["reader"], read_in_order)


def new_life() -> None:
    _kept.pop("region").close()
    _kept["cache"] = {"layer 0": torch.full((ROWS, 2, 1500), 3, device="cuda", dtype=torch.int64)}
    _kept["region"] = rtr.Region("cache", _kept["cache"])


def read_value() -> int:
    into = torch.zeros(ROWS, 2, 1500, dtype=torch.int64, device="cuda")
    rtr.read("owner", "cache", into={"layer 0": into}).wait(LONG)
    return int(into.max())


def test_another_region_of_the_name_is_read_where_it_is(actors: dict[str, Any]) -> None:
    run(actors["owner"], expose)
    run(actors["reader"], read_value)
    run(actors["owner"], new_life)
    assert run(actors["reader"], read_value) == 3


def read_until_lost() -> str:
    into = torch.zeros(ROWS, 2, 1500, dtype=torch.int64, device="cuda")
    until = time.monotonic() + LONG
    while time.monotonic() < until:
        try:
            rtr.read("owner", "cache", into={"layer 0": into}).wait(LONG)
            assert torch.equal(into, filled()["layer 0"])
        except rtr.PeerLost as lost:
            return str(lost)
    return "not lost"


def test_an_owner_that_is_killed_is_lost(actors: dict[str, Any]) -> None:
    run(actors["owner"], expose)
    run(actors["reader"], read_value)
    pid, reads = run(actors["owner"], os.getpid), actors["reader"].run.remote(read_until_lost)
    time.sleep(0.5)
    os.kill(pid, signal.SIGKILL)
    assert "owner" in ray.get(reads, timeout=60)


def read_and_die(given: Any) -> None:
    into = {name: torch.zeros_like(tensor) for name, tensor in filled().items()}
    rtr.read("owner", "cache", into=into, rows=[1, 5, 90], at=[0, 1, 2], lease=given)
    os.kill(os.getpid(), signal.SIGKILL)


def lease_for(reader: str) -> Any:
    _kept["lease"] = _kept["region"].lease([1, 5, 90], timeout=600, reader=reader)
    return _kept["lease"]


def test_the_lease_of_a_reader_that_is_killed_ends(actors: dict[str, Any]) -> None:
    run(actors["owner"], expose)
    given = run(actors["owner"], lease_for, "reader")
    actors["reader"].run.remote(read_and_die, given)
    assert wait_until(lambda: run(actors["owner"], ended) is not None, LONG)
