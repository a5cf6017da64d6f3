"""What can be tested without a GPU of tensors between the CPU and GPUs, and of shared GPU memory."""

from __future__ import annotations

import gc
import itertools
import logging

import pytest
import torch

from raytorchrpc.errors import LaneUnavailable
from raytorchrpc.lanes.cuda_ipc.mappings import Loan
from raytorchrpc.tensors import host_device_copy
from raytorchrpc.tensors.dtypes import span_of
from raytorchrpc.tensors.host_device_copy import PART, Region, region_of


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


@pytest.mark.parametrize(
    ("offset", "size", "cuts"),
    [
        (0, 5, []),
        (0, PART, []),
        (PART - 3, 3, []),
        (PART - 3, 4, [PART]),
        (PART, 2 * PART + 5, [2 * PART, 3 * PART]),
        (PART - 1, PART + 2, [PART, 2 * PART]),
    ],
)
def test_a_span_is_cut_where_registrations_meet(offset: int, size: int, cuts: list[int]) -> None:
    registrar = Registrar()
    edges = [BASE + edge for edge in (offset, *cuts, offset + size)]
    assert Region(BASE, 8 * PART, registrar).pieces(BASE + offset, size) == [
        (begin, end - begin) for begin, end in itertools.pairwise(edges)
    ]
    assert registrar.calls == [(BASE + (edge - BASE) // PART * PART, PART) for edge in edges[:-1]]


def test_memory_is_registered_once_and_only_where_it_is_used() -> None:
    registrar = Registrar()
    region = Region(BASE, 3 * PART + 4096, registrar)
    for offset, size, new in (
        (PART + 5, 10, [(PART, PART)]),
        (2 * PART - 1, 2, [(2 * PART, PART)]),
        (3 * PART, 4096, [(3 * PART, 4096)]),  # the last part ends with the region
        (PART, 2 * PART, []),
    ):
        before = len(registrar.calls)
        region.pieces(BASE + offset, size)
        assert registrar.calls[before:] == [(BASE + begin, length) for begin, length in new]
    assert region.close() == {BASE + PART, BASE + 2 * PART, BASE + 3 * PART}
    assert region.close() == set()
    region.pieces(BASE, 10)
    assert len(registrar.calls) == 3, "a closed region registers nothing more"


def test_memory_that_cannot_be_registered_is_told_of_once_and_not_tried_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_device_copy, "_warned", False)
    with caplog.at_level(logging.WARNING, "raytorchrpc"):
        for base in (BASE, 2 * BASE):
            registrar = Registrar(refuses_after=1)
            region = Region(base, 8 * PART, registrar)
            assert region.pieces(base, 3 * PART) == [(base + number * PART, PART) for number in range(3)]
            region.pieces(base, 8 * PART)
            assert len(registrar.calls) == 2
            assert region.close() == {base}
    (record,) = caplog.records
    assert "no memory may be locked" in record.getMessage() and "are slower" in record.getMessage()


def test_announced_memory_is_found_by_address_until_it_is_withdrawn() -> None:
    """Withdrawing what was never used needs no GPU."""
    bases = [BASE + 2000 * number for number in (0, 2, 1)]
    for base in bases:
        host_device_copy.announce(base, 1000)
    for offset, size, begin in [(0, 1000, 0), (2999, 1, 2000), (4500, 100, 4000)]:
        found = region_of(BASE + offset, size)
        assert found is not None and found.base == BASE + begin
    for offset, size in [(-1, 1), (-1, 10), (500, 501), (1500, 1), (5000, 1), (3000, 1)]:
        assert region_of(BASE + offset, size) is None
    host_device_copy.withdraw(bases[2])
    assert region_of(bases[2], 1) is None and region_of(bases[1], 1) is not None
    for base in bases:
        host_device_copy.withdraw(base)
    assert not host_device_copy._regions


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
