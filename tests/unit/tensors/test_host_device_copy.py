"""What can be tested without a GPU of tensors between the CPU and GPUs, and of shared GPU memory."""

from __future__ import annotations

import gc
import logging
import threading

import pytest
import torch

from raytorchrpc.errors import LaneUnavailable
from raytorchrpc.lanes.cuda_ipc.mappings import Loan
from raytorchrpc.tensors import host_device_copy
from raytorchrpc.tensors.codec import Encoded
from raytorchrpc.tensors.dtypes import span_of
from raytorchrpc.tensors.host_device_copy import PART, Region, Regions, pieces


@pytest.mark.parametrize(
    ("offset", "size", "expected"),
    [
        (0, 5, [(0, 5)]),
        (0, 10, [(0, 10)]),
        (7, 3, [(7, 3)]),
        (7, 4, [(7, 3), (10, 1)]),
        (10, 25, [(10, 10), (20, 10), (30, 5)]),
        (9, 12, [(9, 1), (10, 10), (20, 1)]),
        (3, 0, []),
    ],
)
def test_a_span_is_cut_where_registrations_meet(offset: int, size: int, expected: list[tuple[int, int]]) -> None:
    assert list(pieces(offset, size, 10)) == expected


class Registrar:
    """Takes the place of CUDA's registration; refuses from a number of calls on."""

    def __init__(self, refuses_after: int = 1 << 30) -> None:
        self.calls: list[tuple[int, int]] = []
        self.refuses_after = refuses_after

    def __call__(self, address: int, size: int) -> None:
        self.calls.append((address, size))
        if len(self.calls) > self.refuses_after:
            raise LaneUnavailable("cuda", "no memory may be locked")


BASE = 1 << 40


def test_memory_is_registered_once_and_only_where_it_is_used() -> None:
    registrar = Registrar()
    region = Region(BASE, 3 * PART + 4096, registrar)
    assert region.prepare(PART + 5, 10) == [(PART + 5, 10)]
    assert registrar.calls == [(BASE + PART, PART)]
    assert region.prepare(2 * PART - 1, 2) == [(2 * PART - 1, 1), (2 * PART, 1)]
    assert registrar.calls == [(BASE + PART, PART), (BASE + 2 * PART, PART)]
    region.prepare(3 * PART, 4096)
    assert registrar.calls[2:] == [(BASE + 3 * PART, 4096)], "the last part ends with the region"
    region.prepare(PART, 2 * PART)
    assert len(registrar.calls) == 3
    assert region.close() == {BASE + PART, BASE + 2 * PART, BASE + 3 * PART}
    assert region.close() == set()
    region.prepare(0, 10)
    assert len(registrar.calls) == 3, "a closed region registers nothing more"


def test_many_threads_register_each_part_once() -> None:
    registrar = Registrar()
    region = Region(BASE, 64 * PART, registrar)
    threads = [threading.Thread(target=region.prepare, args=(0, 64 * PART)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(registrar.calls) == len(set(registrar.calls)) == 64


def test_memory_that_cannot_be_registered_is_told_of_once_and_not_tried_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_device_copy, "_warned", False)
    with caplog.at_level(logging.WARNING, "raytorchrpc"):
        for base in (BASE, 2 * BASE):
            registrar = Registrar(refuses_after=1)
            region = Region(base, 8 * PART, registrar)
            assert list(region.prepare(0, 3 * PART)) == [(0, PART), (PART, PART), (2 * PART, PART)]
            region.prepare(0, 8 * PART)
            assert len(registrar.calls) == 2
            assert region.close() == {base}
    (record,) = caplog.records
    assert "no memory may be locked" in record.getMessage() and "are slower" in record.getMessage()


def test_regions_are_found_by_address() -> None:
    regions = Regions()
    for base in (1000, 5000, 3000):
        regions.add(Region(base, 1000, Registrar()))
    for address, size, base in [(1000, 1000, 1000), (3999, 1, 3000), (5500, 100, 5000)]:
        found = regions.find(address, size)
        assert found is not None and found.base == base
    for address, size in [(999, 1), (999, 10), (1500, 501), (2500, 1), (6000, 1), (4000, 1)]:
        assert regions.find(address, size) is None
    removed = regions.remove(3000)
    assert removed is not None and regions.find(3500, 1) is None
    assert regions.remove(3000) is None
    assert regions.find(1500, 1) is not None


def test_withdrawing_what_was_never_used_needs_no_gpu() -> None:
    host_device_copy.announce(BASE, PART)
    host_device_copy.withdraw(BASE)
    host_device_copy.withdraw(BASE)


def test_a_body_without_anything_to_move_is_taken_as_it_is() -> None:
    body = Encoded(b"", [torch.ones(3)], (), 0)
    for devices in ({}, {0: 0}, {0: "cpu"}, {"cpu": 0}):
        assert host_device_copy.outbound(body, devices) is body


# --- shared memory ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(()),
        torch.empty(7),
        torch.empty(3, 4),
        torch.empty(3, 4).t(),
        torch.empty(30, 40)[::3, 5:31:2],
        torch.empty(1, 1, 5)[:, :, 2:3],
        torch.empty(5).expand(1000, 5),
        torch.empty(6).as_strided((4, 3), (1, 1)),
        torch.empty(0, 4),
        torch.empty(4, 0),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)}-{tensor.stride()}",
)
def test_a_span_reaches_from_the_first_element_to_the_last(tensor: torch.Tensor) -> None:
    places = torch.arange(tensor.untyped_storage().nbytes() // 4).as_strided(tensor.shape, tensor.stride())
    expected = int(places.max() - places.min()) + 1 if tensor.numel() else 0
    assert span_of(tensor.shape, tensor.stride()) == expected


def test_a_loan_is_over_with_its_last_holder_and_once() -> None:
    over: list[int] = []
    loan = Loan(lambda: over.append(1))
    holders = [{"loan": loan} for _ in range(3)]
    del loan
    while holders:
        assert not over
        holders.pop()
    gc.collect()
    assert over == [1]


def test_a_loan_that_cannot_be_told_dies_quietly() -> None:
    def over() -> None:
        raise RuntimeError("CUDA is gone")

    Loan(over).__del__()
