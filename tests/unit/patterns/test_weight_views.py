"""Versions that are read where they were published, between members of one process that shared memory connects."""

from __future__ import annotations

import faulthandler
import gc
import os
import resource
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import raytorchrpc as rtr
from tests.polling import wait_until
from tests.unit.members import Members

LONG = 20.0
#: Of a tensor, so that a version does not fit into a message.
ELEMENTS = 100_000
READERS = pytest.mark.parametrize("reader", ["home", "a"])


@pytest.fixture
def sharing() -> Iterator[Members]:
    """Members that read one another's memory."""
    with Members(rtr.GroupConfig(rpc_timeout_s=LONG), by_socket=True, beside={"cpu": "shm"}) as made:
        yield made


def model(value: float) -> dict[str, torch.Tensor]:
    return {
        "layers.0": torch.full((ELEMENTS,), value),
        "layers.1": torch.full((10, 5), value, dtype=torch.bfloat16),
        "count": torch.tensor(int(value)),
        "none": torch.empty(0, 3),
    }


def publish(members: Members, value: float, given: Any = None, **settings: Any) -> int:
    with members.acting("home"):
        return rtr.WeightStore("w", **settings).publish(model(value) if given is None else given)


def readers_of(members: Members) -> int:
    return int(members.served("weight store", "w").pool.readers)


def is_all(tensor: torch.Tensor, value: float) -> bool:
    return bool((tensor == value).all())


@READERS
def test_a_view_has_every_tensor_without_a_copy(sharing: Members, reader: str) -> None:
    publish(sharing, 3.0)
    with sharing.acting(reader):
        store = rtr.WeightStore.find("w")
        with store.view() as view:
            assert view.version == 1 and view.copied_because is None and list(view) == list(model(0))
            for name, tensor in model(3.0).items():
                assert view[name].dtype is tensor.dtype and torch.equal(view[name], tensor)
            mine = torch.zeros(ELEMENTS)
            mine.copy_(view["layers.0"])
            assert is_all(mine, 3) and torch.nn.functional.linear(view["layers.1"], view["layers.1"]).shape == (10, 10)
        memory = sharing.served("weight store", "w")._versions[1].memory.tensors[0]
        view = store.view()
        memory.fill_(5.0)  # as nobody may: to see whose memory it is
        assert is_all(view["layers.0"], 5)


@READERS
def test_a_version_stays_as_long_as_one_of_its_tensors(sharing: Members, reader: str) -> None:
    publish(sharing, 1.0)
    with sharing.acting(reader):
        store = rtr.WeightStore.find("w")
        view = store.view()
        kept, part = view["layers.0"], view["layers.1"][2:4].t()
    for value in (2.0, 3.0, 4.0, 5.0):
        publish(sharing, value)
        assert is_all(kept, 1) and is_all(part, 1)
    assert readers_of(sharing) == 1
    view.release()
    del view, kept
    gc.collect()
    publish(sharing, 6.0)
    assert readers_of(sharing) == 1 and is_all(part, 1), "a part of one tensor is enough"
    del part
    gc.collect()
    assert wait_until(lambda: readers_of(sharing) == 0, LONG)
    with sharing.acting(reader):
        assert is_all(store.view()["layers.0"], 6)


@READERS
def test_a_view_has_no_time_limit(sharing: Members, reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unlike the lease of a pull, which ends after its timeout."""
    monkeypatch.setattr("raytorchrpc.patterns.weights.published.LINGER_S", 0.2)
    publish(sharing, 1.0)
    with sharing.acting(reader):
        view = rtr.WeightStore.find("w").view(timeout=1)
    pool = sharing.served("weight store", "w").pool
    short = pool.lease(sharing.served("weight store", "w")._versions[1], 9, 0.0)
    pool.lease(sharing.served("weight store", "w")._versions[1], 9, None)
    assert wait_until(lambda: short not in pool.leases_of(9), LONG)
    ends = pool.lease(sharing.served("weight store", "w")._versions[1], 9, time.monotonic() + 1.3)
    assert wait_until(lambda: ends not in pool.leases_of(9), LONG)
    for value in (2.0, 3.0, 4.0):
        publish(sharing, value)
    assert is_all(view["layers.0"], 1)


@READERS
def test_what_is_viewed_can_be_computed_with_and_not_written(sharing: Members, reader: str) -> None:
    publish(sharing, 1.0)
    with sharing.acting(reader):
        view = rtr.WeightStore.find("w").view()
        with pytest.raises(TypeError):
            view["layers.0"] = torch.zeros(1)  # type: ignore[index]
        own = torch.ones(ELEMENTS, requires_grad=True)
        (own * view["layers.0"]).sum().backward()
        assert own.grad is not None and is_all(own.grad, 1)
        child = os.fork()
        if not child:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            faulthandler.disable()
            view["layers.0"][5] = 3.0
            os._exit(0)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV
        assert is_all(view["layers.0"], 1)


@READERS
def test_some_tensors_of_a_version(sharing: Members, reader: str) -> None:
    for value in (1.0, 2.0):
        publish(sharing, value, keep=2)
    with sharing.acting(reader):
        store = rtr.WeightStore.find("w")
        view = store.view(1, only="layers.*")
        assert list(view) == ["layers.0", "layers.1"] and is_all(view["layers.0"], 1)
        with pytest.raises(rtr.ConfigurationError, match=r"only=\['layer'\] matches none of the 4 names"):
            store.view(only=["layers.*", "layer"])
        with pytest.raises(rtr.NotFound, match=r"version 3 .*\(there: 1, 2\)"):
            store.view(3)
    gc.collect()
    assert wait_until(lambda: readers_of(sharing) == 1, LONG), "what was refused keeps no version"


def test_memory_that_is_viewed_counts_as_mapped(sharing: Members) -> None:
    publish(sharing, 1.0)
    with sharing.acting("a") as a:
        store = rtr.WeightStore.find("w")
        assert store.stats().mapped == 0
        view = store.view()
        size = sum(tensor.nbytes for tensor in view.values())
        assert size <= store.stats().mapped <= 2 * size
        assert [row.store for row in a.weights.rows("a")] == ["w"], "a member that only views has a row in the metrics"
    with sharing.acting("home"):
        rtr.WeightStore("w").view()
        assert rtr.WeightStore("w").stats().mapped == 0, "its own memory"


@READERS
def test_after_its_release_a_view_has_nothing(sharing: Members, reader: str) -> None:
    publish(sharing, 1.0)
    with sharing.acting(reader):
        view = rtr.WeightStore.find("w").view()
    assert repr(view) == "<raytorchrpc.WeightView of 'w': version 1, 4 tensors>"
    with view:
        pass
    view.release()
    for use in (lambda: view["count"], lambda: len(view), lambda: list(view)):
        with pytest.raises(rtr.ConfigurationError, match="this view of 'w' was released"):
            use()
    assert view.version == 1 and "released" in repr(view)
    assert wait_until(lambda: readers_of(sharing) == 0, LONG)


@READERS
def test_a_view_outlives_a_clear_of_its_store(sharing: Members, reader: str) -> None:
    publish(sharing, 1.0)
    with sharing.acting(reader):
        view = rtr.WeightStore.find("w").view()
    with sharing.acting("home"):
        rtr.WeightStore("w").clear()
    (held,) = sharing.served("weight store", "w").held.values()
    assert is_all(view["layers.0"], 1) and held > view["layers.0"].nbytes
    view.release()
    del view
    gc.collect()
    assert wait_until(lambda: sharing.served("weight store", "w").held == {}, LONG)


@READERS
def test_a_view_outlives_its_group(sharing: Members, reader: str) -> None:
    """And the memory that its publisher frees."""
    publish(sharing, 1.0)
    with sharing.acting(reader):
        view = rtr.WeightStore.find("w").view()
    sharing.close()
    gc.collect()
    assert is_all(view["layers.0"], 1) and is_all(view["layers.1"], 1)
    view.release()


# --- copies ---------------------------------------------------------------------------------------------------------


def publish_shards(members: Members, value: float) -> None:
    for number, name in enumerate(("a", "b")):
        with members.acting(name):
            rows = rtr.Shard(torch.full((2, 3), value), (4, 3), (2 * number, 0))
            rtr.WeightStore("s", publishers=["a", "b"]).publish({"rows": rows, "other": torch.zeros(2)})


def test_readers_that_cannot_read_in_place_get_copies_and_the_reason(members: Members) -> None:
    publish(members, 1.0)
    publish_shards(members, 2.0)
    with members.acting("a"):
        view = rtr.WeightStore.find("w").view(only="layers.*")
        assert view.copied_because == "no lane reads the memory of 'home' in place"
        assert list(view) == ["layers.0", "layers.1"] and is_all(view["layers.0"], 1)
        assert repr(view).endswith("2 tensors, copied>")
    with members.acting("home"):
        shards = rtr.WeightStore("s", publishers=["a", "b"]).view()
        assert shards.copied_because == "several members publish it"
        assert shards["rows"].shape == (4, 3) and is_all(shards["rows"], 2) and shards.version == 1
        with pytest.raises(rtr.NotFound):
            rtr.WeightStore("s", publishers=["a", "b"]).view(2)
        with pytest.raises(rtr.Empty):
            rtr.WeightStore("t", publishers=["a", "b"]).view(timeout=0.05)
    publish(members, 3.0)
    assert is_all(view["layers.0"], 1)


def test_small_versions_come_in_the_message(sharing: Members) -> None:
    publish(sharing, 1.0, {"weight": torch.ones(10)})
    with sharing.acting("a"):
        view = rtr.WeightStore.find("w").view()
    assert view.copied_because == "they came in a message" and is_all(view["weight"], 1)
    with sharing.acting("a"):
        assert rtr.WeightStore.find("w").stats().mapped == 0
    for value in (2.0, 3.0, 4.0):
        publish(sharing, value, {"weight": torch.full((10,), value)})
    assert is_all(view["weight"], 1)
