"""Which tensors leave a message, and how they find back into it."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from raytorchrpc.calls.payload import IN_BAND, OutOfBand, Payloads, joined, owned, read_into, tensor_lane
from raytorchrpc.errors import LaneUnavailable
from raytorchrpc.lanes.base import (
    Arrived,
    Copies,
    Copy,
    Export,
    PeerAddress,
    Target,
    TensorCapabilities,
    TensorLane,
    arrived,
)
from raytorchrpc.tensors import host_device_copy
from raytorchrpc.tensors.codec import Encoded
from raytorchrpc.tensors.dtypes import Shape


class Depot(TensorLane):
    """A lane within this process that remembers what was asked of it."""

    name: ClassVar[str] = "depot"
    capabilities: ClassVar[TensorCapabilities] = TensorCapabilities(frozenset({"cpu"}))

    def __init__(self, refuses: str = "") -> None:
        self.refuses = refuses
        self.stored: dict[int, list[torch.Tensor]] = {}
        self.cancelled: list[Any] = []
        self.released: list[tuple[str, Any]] = []
        self.exported = 0
        self.shared: list[int] = []
        self.uses: list[tuple[str, Any]] = []

    def open(self) -> Any:
        return None

    def connect(self, peers: Sequence[PeerAddress]) -> None:
        pass

    def export(self, tensors: Sequence[torch.Tensor], peer: str, devices: Mapping[int, int]) -> Export:
        if self.refuses:
            raise LaneUnavailable(self.name, self.refuses)
        self.exported += 1
        self.stored[self.exported] = [tensor.clone() for tensor in tensors]
        descriptor = (self.exported, "box")
        return Export(descriptor, cancel=partial(self.cancelled.append, descriptor))

    def read(self, peer: str, descriptor: Any, shapes: Sequence[Shape], copies: Copies | None = None) -> Arrived:
        if self.refuses:
            raise LaneUnavailable(self.name, self.refuses)
        tensors = self.stored.pop(descriptor[0])
        assert [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors] == list(shapes)
        return arrived(tensors, copies)

    def share(self, tensors: Sequence[torch.Tensor], peer: str, devices: Mapping[Any, Any]) -> Export:
        self.shared.append(len(tensors))
        return self.export(tensors, peer, devices)

    def used(self, peer: str, descriptor: Any) -> None:
        self.uses.append((peer, descriptor))

    def release(self, peer: str, descriptor: Any) -> None:
        self.released.append((peer, descriptor))
        self.stored.pop(descriptor[0])

    def disconnect(self, peer: str) -> None:
        pass

    def close(self) -> None:
        pass


def body_of(*tensors: torch.Tensor) -> Encoded:
    return Encoded(b"payload", list(tensors), (), 0)


CPU = {"cpu": "depot"}
GPU = {"cpu": "depot", "meta": "gpu depot"}  # a device that every machine has stands for the GPU


class Shipped(NamedTuple):
    body: Encoded
    beside: OutOfBand

    @property
    def manifests(self) -> tuple[Any, ...]:
        return self.beside.manifests

    @property
    def lane(self) -> str | None:
        return tensor_lane(self.manifests)


def ship(splitter: Payloads, body: Encoded, routes: Mapping[str, str] = CPU, in_band: int | None = 0) -> Any:
    return Shipped(*splitter.split(body, "b", routes, {}, in_band, lane="socket"))


Lanes = dict[str, Depot]


@pytest.fixture
def lanes() -> Lanes:
    return {"depot": Depot(), "gpu depot": Depot()}


@pytest.fixture
def splitter(lanes: Lanes) -> Payloads:
    """Whose CPU tensors go by the depot, and those of the GPU by the other one."""
    return Payloads(0, lanes)


def test_small_tensors_stay_in_the_message(lanes: Lanes, splitter: Payloads) -> None:
    body = body_of(torch.ones(4), torch.ones(12))
    shipped = ship(splitter, body, in_band=64)  # just so
    assert shipped.body == body and not shipped.beside.exports
    assert shipped.lane is None
    assert lanes["depot"].exported == 0
    assert ship(splitter, body_of(), in_band=0).manifests == ()


def test_one_byte_more_goes_beside_in_one_export(lanes: Lanes, splitter: Payloads) -> None:
    shipped = ship(splitter, body_of(torch.ones(4), torch.ones(12), torch.ones(1)), in_band=64)
    assert shipped.body == Encoded(b"payload", [], (), 0)
    assert shipped.lane == "depot"
    ((lane, positions, runs, descriptor),) = shipped.manifests
    assert (lane, positions, descriptor) == ("depot", None, (1, "box"))
    assert [(getattr(torch, name), shape, count) for name, shape, count in runs] == [
        (torch.float32, (4,), 1), (torch.float32, (12,), 1), (torch.float32, (1,), 1),
    ]  # fmt: skip
    assert lanes["depot"].exported == 1


def copies_to(*described: tuple[int, int, torch.Tensor, tuple[int, ...] | None]) -> Copies:
    """Of regions: which tensor, where it begins, the target, strides."""
    copies = [Copy(source, Target.of(target), offset, strides) for source, offset, target, strides in described]
    return Copies(copies, [target for _, _, target, _ in described])


def test_regions_are_copied_from_a_lane_that_brings_the_whole(lanes: Lanes, splitter: Payloads) -> None:
    shipped = ship(splitter, body_of(torch.arange(256, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)))
    target, wide = torch.zeros(3, dtype=torch.int16), torch.zeros(2, 5, dtype=torch.uint8)
    parcels = splitter.receive("a", shipped.manifests)
    copies = copies_to((0, 64, target, None), (0, 64, wide[:, 1:4], (100, 2)))
    assert read_into(shipped.body, parcels, copies) == [None, None]
    assert target.tolist() == [64 + 65 * 256, 66 + 67 * 256, 68 + 69 * 256]
    assert wide.tolist() == [[0, 64, 66, 68, 0], [0, 164, 166, 168, 0]]
    assert not lanes["depot"].stored and not lanes["depot"].released
    with pytest.raises(LaneUnavailable, match="read already"):
        read_into(shipped.body, parcels, copies)


@pytest.mark.parametrize("stays", [False, True])
def test_copies_out_of_several_lanes_and_the_message_go_where_they_belong(splitter: Payloads, stays: bool) -> None:
    made = [torch.full((2,), 1.0), torch.empty(3, device="meta"), torch.full((4,), 2.0), torch.full((5,), 3.0)]
    shipped = ship(splitter, body_of(*made), GPU, 1000 if stays else 0)
    targets = [torch.zeros(2), None, torch.zeros(4), None]
    left = read_into(shipped.body, splitter.receive("a", shipped.manifests), Copies.whole(targets))
    assert [None if tensor is None else len(tensor) for tensor in left] == [None, 3, None, 5]
    assert targets[0] is not None and targets[0].tolist() == [1.0] * 2
    assert targets[2] is not None and targets[2].tolist() == [2.0] * 4


@pytest.mark.parametrize("kinds", ["cg", "gc", "ccgg", "cgcgc", "ggc", "gcccg", "g", "c"])
@pytest.mark.parametrize("in_band", [0, 1000])
def test_the_order_of_tensors_is_restored(lanes: Lanes, splitter: Payloads, kinds: str, in_band: int) -> None:
    made = [torch.empty(number + 1, device="cpu" if kind == "c" else "meta") for number, kind in enumerate(kinds)]
    shipped = ship(splitter, body_of(*made), GPU, in_band)
    assert len(shipped.body.tensors) == (kinds.count("c") if in_band else 0)
    assert lanes["depot"].exported == (1 if "c" in kinds and not in_band else 0)
    assert lanes["gpu depot"].exported == (1 if "g" in kinds else 0)
    together = joined(shipped.body, splitter.receive("a", shipped.manifests))
    assert [(len(tensor), tensor.device.type) for tensor in together.tensors] == [
        (len(tensor), tensor.device.type) for tensor in made
    ]
    assert together.payload == b"payload"


def test_what_no_lane_takes_stays_in_the_message(lanes: Lanes, splitter: Payloads) -> None:
    body = body_of(torch.ones(4), torch.ones(5))
    assert ship(splitter, body, {}) == (body, IN_BAND)
    assert ship(splitter, body, in_band=None) == (body, IN_BAND), "its messages carry all as well"
    assert not lanes["depot"].exported


def test_a_lane_that_cannot_is_told_of_once(lanes: Lanes, splitter: Payloads, caplog: pytest.LogCaptureFixture) -> None:
    body = body_of(torch.ones(4))
    lanes["depot"].refuses = "no room: 7 MiB are out"
    with caplog.at_level(logging.WARNING, "raytorchrpc"):
        for _ in range(3):
            assert ship(splitter, body) == (body, IN_BAND)
        assert ship(splitter, body, {}).body is body  # no lane by the plan: nothing to tell
    (record,) = caplog.records
    assert record.getMessage() == "tensors to b go by socket instead of depot: no room: 7 MiB are out"
    caplog.clear()
    lanes["depot"].refuses = "of another kind"
    with caplog.at_level(logging.WARNING, "raytorchrpc"):
        assert ship(splitter, body).body is body
    assert "of another kind" in caplog.text


def test_a_second_export_that_fails_leaves_its_tensors_in_the_message(lanes: Lanes, splitter: Payloads) -> None:
    lanes["gpu depot"].refuses, there = "no handle", torch.empty(2, device="meta")
    shipped = ship(splitter, body_of(torch.ones(4), there), GPU)
    assert shipped.body.tensors == [there] and not lanes["depot"].cancelled
    together = joined(shipped.body, splitter.receive("a", shipped.manifests))
    assert torch.equal(together.tensors[0], torch.ones(4)) and together.tensors[1] is there


def test_what_is_kept_gets_memory_of_its_own_and_is_copied_only_for_that() -> None:
    mine, shared = torch.ones(5), torch.arange(10.0)
    array = torch.from_numpy(numpy.ones(3))
    body = Encoded(b"", [mine, shared[:5], shared[5:], array, torch.ones(2, dtype=torch.uint8).view(torch.int4)], (), 0)
    addresses = [tensor.data_ptr() for tensor in body.tensors]
    assert joined(body, []).tensors is body.tensors
    kept = owned(body).tensors
    assert [one.data_ptr() == address for one, address in zip(kept, addresses, strict=True)][:4] == [True] + 3 * [False]
    shared.zero_()
    assert kept[1].tolist() + kept[2].tolist() == list(range(10))
    assert kept[4].dtype is torch.int4 and kept[4].view(torch.uint8).tolist() == [1, 1]


def test_cancelling_takes_back_every_export(lanes: Lanes, splitter: Payloads) -> None:
    shipped = ship(splitter, body_of(torch.ones(4), torch.empty(2, device="meta")), GPU)
    shipped.beside.cancel()
    assert lanes["depot"].cancelled == lanes["gpu depot"].cancelled == [(1, "box")]


def test_a_parcel_that_nobody_fetches_is_given_up(lanes: Lanes, splitter: Payloads) -> None:
    parcels = splitter.receive("a", ship(splitter, body_of(torch.ones(4))).manifests)
    assert not lanes["depot"].released
    del parcels
    gc.collect()
    assert lanes["depot"].released == [("a", (1, "box"))]


def test_a_parcel_is_fetched_once_and_then_used_and_not_given_up(lanes: Lanes, splitter: Payloads) -> None:
    (parcel,) = splitter.receive("a", ship(splitter, body_of(torch.ones(4))).manifests)
    parcel.read()
    with pytest.raises(LaneUnavailable, match="read already"):
        parcel.read()
    parcel.used()
    assert lanes["depot"].uses == [("a", (1, "box"))], "a lane hears when its tensors have been used"
    del parcel
    gc.collect()
    assert not lanes["depot"].released


def test_when_one_parcel_fails_the_others_are_given_up(lanes: Lanes, splitter: Payloads) -> None:
    shipped = ship(splitter, body_of(torch.empty(2, device="meta"), torch.ones(4)), GPU)
    lanes["gpu depot"].refuses = "cannot map it"
    with pytest.raises(LaneUnavailable):
        joined(shipped.body, splitter.receive("a", shipped.manifests))
    gc.collect()
    assert lanes["depot"].released == [("a", (1, "box"))]


class GpuDepot(Depot):
    """Takes CUDA tensors whether or not they are to stay such."""

    capabilities: ClassVar[TensorCapabilities] = TensorCapabilities(frozenset({"cpu"}), takes_cuda=True)


@pytest.fixture
def cuda() -> Iterator[Callable[[int, int], torch.Tensor]]:
    """Makes CUDA tensors (size, index) without data, on a machine without a GPU."""
    with FakeTensorMode():
        yield lambda size, index: torch.empty(size, device=f"cuda:{index}")


@pytest.mark.parametrize(
    ("maps", "share", "manifests", "shared"),
    [
        ({0: 0, 1: 0}, False, [("gpu depot", (0, 2, 3)), ("depot", (1,))], []),
        ({0: 0, 1: 0}, True, [("gpu depot", (0, 2, 3)), ("depot", (1,))], [3]),
        ({0: "cpu", 1: 0}, True, [("depot", (0, 1, 3)), ("gpu depot", (2,))], [1]),
    ],
    ids=["exported", "shared", "those for the CPU travel with its tensors"],
)
def test_cuda_tensors_go_by_their_lane_and_are_shared_where_that_is_asked_for(
    cuda: Callable[[int, int], torch.Tensor], maps: Any, share: bool, manifests: list[Any], shared: list[int]
) -> None:
    lanes = {"depot": GpuDepot(), "gpu depot": GpuDepot()}
    body = body_of(cuda(5, 0), torch.empty(50), cuda(6, 1), cuda(7, 0))
    routes = {"cpu": "depot", "cuda": "gpu depot"}
    shipped = Shipped(*Payloads(0, lanes).split(body, "b", routes, maps, 5 * 4, share))
    assert [manifest[:2] for manifest in shipped.manifests] == manifests and not shipped.body.tensors
    assert lanes["gpu depot"].shared == shared and lanes["depot"].shared == []


@pytest.mark.parametrize("routes", [{}, {"cuda": "gpu depot"}], ids=["no lane", "a lane that cannot"])
def test_cuda_tensors_that_no_lane_takes_cross_on_the_cpu(
    cuda: Callable[[int, int], torch.Tensor],
    routes: dict[str, str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_device_copy, "wait_for", lambda tensors: None)
    monkeypatch.setattr(host_device_copy, "region_of", lambda address, size: None)
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda tensor: 0)
    splitter = Payloads(0, {"gpu depot": Depot("no handle")})
    body = body_of(cuda(5, 0), torch.empty(50), cuda(6, 1), cuda(7, 2))
    maps = {0: 1, 1: 0, 2: "cpu"}
    with caplog.at_level(logging.WARNING, "raytorchrpc"):
        for _ in range(2):
            packed = splitter.split(body, "b", routes, maps, None, lane="socket", through_cpu="no CUDA IPC")
            shipped = Shipped(*packed)
    assert [len(tensor) for tensor in shipped.body.tensors] == [5, 50, 6, 7]
    assert all(tensor.is_cpu for tensor in shipped.body.tensors) and shipped.lane is None
    (record,) = caplog.records
    assert ("no handle" if routes else "no CUDA IPC") in record.getMessage()
    assert not splitter.receive("a", shipped.manifests)
    arrived = splitter.unpack(shipped.body, (), shipped.manifests, keep=False)
    assert [str(tensor.device) for tensor in arrived.tensors] == ["cuda:1", "cpu", "cuda:0", "cpu"]
    with pytest.raises(LaneUnavailable, match="it carries no CUDA tensors"):
        splitter.split(body, "b", {}, maps, None, through_cpu=None)
