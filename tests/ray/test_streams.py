"""Streams and cancelled calls between actors: over the real lanes, with real event loops, and when an actor ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

import raytorchrpc as rtr
from tests import insides
from tests.polling import wait_until
from tests.ray.conftest import Spawn
from tests.ray.stream_actors import AsyncProducer, Producer

LONG = 20.0
#: Elements: in float32 above what travels in a message.
LARGE = 300_000


@pytest.fixture(scope="module")
def handles(spawn_for_module: Spawn) -> dict[str, Any]:
    return {
        "plain": spawn_for_module(Producer),
        "looping": spawn_for_module(AsyncProducer),
        "other": spawn_for_module(AsyncProducer),
    }


@pytest.fixture
def group(handles: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with rtr.init_group(handles, include_driver=True):
        yield handles
        for name in handles:
            rtr.rpc_sync(name).taken_log()


def log_of(name: str) -> list[str]:
    log: list[str] = []

    def look() -> bool:
        log.extend(rtr.rpc_sync(name).taken_log())
        return bool(log)

    assert wait_until(look, LONG)
    return log


STREAMS = [("plain", "tensors"), ("looping", "tensors"), ("looping", "plain_tensors")]


def test_items_arrive_as_they_were_when_they_were_yielded(group: dict[str, Any]) -> None:
    for name, method in STREAMS:
        for numel in (10, LARGE):
            numbers = []
            for item in getattr(rtr.rpc_sync(name), method)(12, numel):
                assert item["tensor"].shape == (numel,) and item["tensor"].eq(item["number"]).all()
                numbers.append(item["number"])
            assert numbers == list(range(12)), (name, method, numel)


def test_rays_own_streaming_works_as_before(group: dict[str, Any]) -> None:
    for name, method in STREAMS:
        refs = getattr(group[name], method).remote(3, 10)
        assert [ray.get(ref)["number"] for ref in refs] == [0, 1, 2], (name, method)
    assert rtr.rpc_sync("plain").double(2) == 4


def test_the_end_of_either_side_ends_the_stream(group: dict[str, Any], spawn: Spawn) -> None:
    reader, producer = spawn(AsyncProducer), spawn(Producer)
    rtr.get_group().add({"reader": reader, "producer": producer})
    assert rtr.rpc_sync("reader").read_one("plain") == 0
    ray.kill(reader)
    assert rtr.rpc_sync("plain", timeout=LONG).double(2) == 4, "it is free"
    assert log_of("plain") == ["closed"]
    stream = rtr.rpc_sync("producer").tensors(1_000_000, 10)  # more than are sent before it ends
    assert next(stream)["number"] == 0
    ray.kill(producer)
    with pytest.raises(rtr.PeerLost, match="producer"):
        list(stream)


# --- cancellation --------------------------------------------------------------------------------------------


def test_a_queued_call_is_dropped_and_a_running_one_left_alone(group: dict[str, Any]) -> None:
    running = rtr.rpc_async("plain").wait()
    assert rtr.rpc_sync("plain").begun()
    in_flight = insides.in_flight
    queued = rtr.rpc_async("plain").note(torch.ones(LARGE))
    assert in_flight()["plain"][1] > 4 * LARGE
    assert queued.cancel() and running.cancel()
    assert wait_until(lambda: in_flight()["plain"] == (0, 0), LONG)
    for future in (running, queued):
        with pytest.raises(rtr.CancelledError):
            future.result()
    last = rtr.rpc_async("plain").note("last")
    rtr.rpc_sync("plain").release()
    last.wait()
    assert log_of("plain") == ["waited", "last"]
