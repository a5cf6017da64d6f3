"""Ray Direct Transport without Ray's processes: what is kept, and pulls that do not get what they ask for."""

from __future__ import annotations

import gc
import pickle
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

import raytorchrpc as rtr
from raytorchrpc.errors import SerializationError, TransferFailed
from raytorchrpc.lanes.nng.offers import NngServer
from raytorchrpc.process import this_process
from raytorchrpc.rdt import transfer
from raytorchrpc.rdt.transfer import Pull, Source
from raytorchrpc.tensors.codec import Codec, Encoded
from tests.freed import FREED, freed
from tests.releases import skip_module_without
from tests.unit.members import Members

skip_module_without("objectrefs")
from raytorchrpc.rdt import transport  # noqa: E402

SECRET = b"s" * 32


@pytest.fixture
def server() -> Iterator[NngServer]:
    server = NngServer("elsewhere", SECRET, tcp_host=None)
    yield server
    server.close()


@pytest.fixture
def elsewhere(server: NngServer) -> Source:
    """As if another process had the tensors."""
    return Source("node", 1, b"another process", "actor 'x'", server.open(), SECRET)


@pytest.fixture
def stuck(server: NngServer) -> Iterator[None]:
    """The server offers an object that does not arrive while the test lasts, and another that does."""
    over = threading.Event()
    server.offer("object", lambda: (over.wait(30), value())[1])
    server.offer("other", value(torch.ones(3)))
    yield
    over.set()


def value(*tensors: torch.Tensor) -> Encoded:
    return Codec().encode((list(tensors), []), own=True)


def test_a_pull_from_the_server(server: NngServer, elsewhere: Source) -> None:
    server.offer("object", lambda: value(torch.ones(3), torch.zeros(100_000), torch.empty(0, 3)))
    one, two, empty = Pull("object", elsewhere, False).wait(10)
    assert torch.equal(one, torch.ones(3)) and torch.equal(two, torch.zeros(100_000)) and empty.shape == (0, 3)
    targets = torch.empty(3), torch.empty(100_000), torch.empty(0, 3)
    filled = Pull("object", elsewhere, False, targets).wait(10)
    assert filled[0] is targets[0] and torch.equal(targets[0], torch.ones(3))
    with pytest.raises(rtr.TransferFailed, match="cannot be reached"):
        Pull("object", elsewhere._replace(secret=b"x" * 32), False).wait(10)


def test_what_is_not_there_and_what_cannot_be_had(server: NngServer, elsewhere: Source) -> None:
    with pytest.raises(rtr.TransferFailed, match=r"object gone did not arrive from actor 'x': .*nothing is offered"):
        Pull("gone", elsewhere, False).wait(10)

    def fail() -> Encoded:
        raise MemoryError("no room")

    server.offer("object", fail)
    with pytest.raises(rtr.TransferFailed, match="MemoryError: no room") as raised:
        Pull("object", elsewhere, False).wait(10)
    assert (raised.value.object_id, raised.value.source) == ("object", "actor 'x'")
    again = pickle.loads(pickle.dumps(raised.value))
    assert (str(again), again.object_id) == (str(raised.value), "object")


def test_a_source_that_is_gone(server: NngServer, elsewhere: Source) -> None:
    server.offer("object", value(torch.ones(3)))
    Pull("object", elsewhere, False).wait(10)
    server.close()
    begun = time.monotonic()
    with pytest.raises(rtr.TransferFailed, match="it is gone, or cannot be reached"):
        Pull("object", elsewhere, False).wait(10)
    with pytest.raises(rtr.TransferFailed, match="no server"):
        Pull("object", elsewhere._replace(server=None), False).wait(10)
    assert time.monotonic() - begun < 10


@pytest.mark.usefixtures("stuck")
def test_a_pull_that_is_aborted_or_not_awaited(elsewhere: Source) -> None:
    pull = Pull("object", elsewhere, False)
    with pytest.raises(TimeoutError, match="has not arrived within"):
        pull.wait(0.05)
    transfer.abort("other")
    threading.Timer(0.05, transfer.abort, ["object"]).start()
    with pytest.raises(rtr.TransferFailed, match="Ray aborted the transfer"):
        pull.wait(None)
    assert torch.equal(Pull("other", elsewhere, False).wait(10)[0], torch.ones(3))


@pytest.mark.usefixtures("stuck")
def test_a_pull_ends_before_ray_gives_it_up(elsewhere: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import ray_constants

    Pull("other", elsewhere, False).wait(20)  # it is connected now
    monkeypatch.setattr(ray_constants, "RDT_FETCH_FAIL_TIMEOUT_SECONDS", 0.5)
    begun = time.monotonic()
    with pytest.raises(rtr.TransferFailed, match=r"within 0\.\d+ s"):  # from when its thread asks
        Pull("object", elsewhere, False).wait(None)
    assert 0.3 < time.monotonic() - begun < 20


@pytest.mark.parametrize(
    ("when_full", "said"),
    [("block", "home.* was not sent by its deadline"), ("reject", "PeerBusy: home.* was not sent")],
)
def test_a_pull_from_a_member_that_cannot_be_sent(
    when_full: Any, said: str, elsewhere: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray._private import ray_constants

    monkeypatch.setattr(ray_constants, "RDT_FETCH_FAIL_TIMEOUT_SECONDS", 0.5)
    config = rtr.GroupConfig(max_calls_in_flight=1, when_full=when_full)
    with Members(config) as members, members.acting("a"):
        members.lanes["a"].holds = lambda method: True
        home, in_flight = members.members["home"].me, rtr.rpc_async("home").anything()
        with pytest.raises(rtr.TransferFailed, match=f"object object did not arrive from actor 'x': {said}"):
            Pull("object", elsewhere._replace(node_id=home.node_id, pid=home.pid), False).wait(None)
        assert not in_flight.done()


def test_what_is_kept_is_kept_until_it_is_dropped() -> None:
    tensor = torch.ones(1000)
    alive = weakref.ref(tensor.untyped_storage())
    before = rtr.rdt.held()
    transfer.keep("mine", [tensor])
    here = transfer.here("node", "127.0.0.1", "this process")
    outside = here._replace(process=b"another")
    del tensor
    assert rtr.rdt.held() == before + 1
    assert Pull("mine", here, False).wait(10)[0].sum() == 1000
    pull = Pull("mine", here, False)
    transfer.drop("mine")
    assert rtr.rdt.held() == before
    with pytest.raises(rtr.TransferFailed, match="its last ObjectRef was dropped"):
        pull.wait(1)
    with pytest.raises(rtr.TransferFailed, match="nothing is offered"):
        Pull("mine", outside, False).wait(10)
    with pytest.raises(LookupError, match="restarted"):
        transfer.tensors_of("mine", b"an earlier process")
    del pull
    gc.collect()
    assert alive() is None


def test_tensors_that_are_nowhere_are_refused_and_not_kept() -> None:
    before = rtr.rdt.held()
    manager = transport.TorchRpcTransport()
    with pytest.raises(rtr.ConfigurationError, match="carries tensors on cpu and cuda, not on meta: move them"):
        manager.extract_tensor_transport_metadata("object", [torch.ones(1), torch.ones(1, device="meta")])
    assert rtr.rdt.held() == before


def test_a_tensor_whose_storage_was_freed_is_neither_kept_nor_sent(server: NngServer, elsewhere: Source) -> None:
    for make in FREED.values():
        with pytest.raises(SerializationError, match="has no memory: its storage was freed"):
            transfer.keep("freed", [torch.ones(3), make()])
    assert "freed" not in transfer._objects
    transfer.keep("later", [torch.ones(3), later := torch.ones(9)[1:]])
    kept = transfer.tensors_of("later", this_process.unique)
    try:
        freed(later)
        for read in (kept.make_current, lambda: transfer._on_cpu(kept)):
            with pytest.raises(SerializationError, match=r"\(8,\) of this object has no memory"):
                read()
    finally:
        transfer.drop("later")
    server.offer("object", lambda: value(torch.ones(3), torch.ones(2, 3)))
    for make in FREED.values():
        with pytest.raises(TransferFailed, match=r"a target of shape \(2, 3\) has no memory"):
            Pull("object", elsewhere, False, [torch.zeros(3), make()]).wait(20)


# --- DTensors in objects that Ray pickled before it knew of DTensors ---------------------------------------------


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if the program imported DTensors only now."""
    reducers = ray.cloudpickle.CloudPickler.dispatch
    monkeypatch.setattr(transport, "_covered", set())
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
        transport.check([torch.ones(3), taken])
    transport.check([taken])  # from now on Ray takes it out as it should


@pytest.mark.usefixtures("unknown")
def test_a_reducer_of_the_users_own_is_kept(tensor: DTensor) -> None:
    ray.cloudpickle.CloudPickler.dispatch[DTensor] = lambda tensor: (str, ("the user's",))
    transport.reduce_for_transports()
    assert ray.cloudpickle.loads(ray.cloudpickle.dumps(tensor)) == "the user's"


@pytest.mark.usefixtures("unknown")
def test_outside_of_transports_pickles_stay_torchs_own(tensor: DTensor) -> None:
    assert transport.reduce_for_transports()
    assert not transport.reduce_for_transports()
    found = ray.cloudpickle.loads(ray.cloudpickle.dumps(tensor))
    assert type(found) is DTensor and found.device_mesh == tensor.device_mesh
