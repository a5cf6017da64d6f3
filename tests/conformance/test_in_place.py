"""What every lane must do that reads in place: memory that its owner fills once, and that peers read again and again.

The suite for all lanes for tensors, test_tensor_lanes.py, runs on these lanes too. Functions with an underscore run in
the processes ``a`` and ``b``.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from raytorchrpc.errors import LaneUnavailable, PeerLost
from raytorchrpc.lanes.base import Copies
from raytorchrpc.tensors.dtypes import Shape
from tests.conformance import peers
from tests.conformance import test_tensor_lanes as tensor_lanes
from tests.conformance.peers import export, random, tensors
from tests.conformance.test_tensor_lanes import GPU_KINDS, MIB, Pair

KINDS = ["shm", *(kind for kind in GPU_KINDS if kind.values[0].startswith("cuda_ipc"))]  # type: ignore[union-attr]


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = tensor_lanes.make_pair(request.param)
    yield pair
    pair.kill()


def test_many_read_one_window_again_and_again(pair: Pair) -> None:
    """Each export is a reading of its own, and reading takes nothing from the next one."""
    pair.a.run(_fill_window, 1)
    sent = [pair.a.run(_export_window) for _ in range(3)]
    pair.b.run(_prepare, sent[0])
    for one in sent:
        assert pair.b.run(_read_window, one) == [1.0]
    pair.a.run(_fill_window, 2)
    assert pair.b.run(_read_window, pair.a.run(_export_window)) == [2.0]


def _fill_window(value: float) -> None:
    """As its owner does, once all have read it."""
    kept = tensors().kept
    if "window" not in kept:
        lent = tensors().lane.lend(4 * MIB)
        kept["window"] = torch.empty(4 * MIB, dtype=torch.uint8, device=tensors().device) if lent is None else lent
    if kept["window"].is_cuda:
        tensors().lane.fence(kept["window"].device.index)
    kept["window"].view(torch.float32).fill_(value)


def _export_window() -> Any:
    return export([tensors().kept["window"]])


def _prepare(sent: tuple[Any, list[Shape]]) -> None:
    tensors().lane.prepare("a", sent[0])
    for broken in ((), (1, 2), (1, "x", 3, 4, 5, 6), ("x",) * 4):
        tensors().lane.prepare("a", broken)
    tensors().lane.prepare("nobody", sent[0])


def _read_window(sent: tuple[Any, list[Shape]]) -> list[float]:
    target = torch.zeros(4 * MIB, dtype=torch.uint8, device=tensors().device)
    peers.read(sent, Copies.whole([target]))
    target = target.view(torch.float32)
    return [float(value) for value in target.unique()]


def test_a_view_is_memory_of_its_owner(pair: Pair) -> None:
    """Of lent memory; nothing else is viewed, and nothing is kept of it."""
    pair.a.run(_fill_window, 1)
    is_lent = pair.a.run(lambda: tensors().lane.name == "shm")
    sent = pair.a.run(_export_window)
    assert pair.b.run(_view, sent) is is_lent
    if is_lent:
        for value in (2.0, 3.0):
            pair.a.run(_fill_window, value)
            assert pair.b.run(_viewed) == [value]
        pair.b.run(_view_refused, sent)
        assert pair.b.run(_view, pair.a.run(_export_other)) is False and pair.used() == 0
        pair.a.run(_drop_window)
        assert pair.b.run(_viewed) == [0.0], "pages that are lent no more are freed for all"


def _export_other() -> Any:
    return export([random((4 * MIB,), torch.uint8)])


def _view(sent: tuple[Any, list[Shape]]) -> bool:
    found = tensors().lane.view("a", *sent)
    if found is not None:
        (tensors().kept["view"],) = found
    return found is not None


def _viewed() -> list[float]:
    return [float(value) for value in tensors().kept["view"].view(torch.float32).unique()]


def _view_refused(sent: tuple[Any, list[Shape]]) -> None:
    for size in (4 * MIB + 1, -1, 1 << 50):
        with pytest.raises(LaneUnavailable, match="'a'"):
            tensors().lane.view("a", sent[0], [(torch.uint8, (size,))])


def test_lent_memory_is_exported_without_a_copy_for_as_long_as_it_lives(form: Callable[..., Pair]) -> None:
    """Peers have it mapped for as long as it is lent."""
    pair = form("shm", 2 * MIB)  # the arena could not hold a copy
    pair.a.run(_fill_window, 3)
    assert pair.b.run(_read_window, pair.a.run(_export_window)) == [3.0]
    assert pair.used() == 0
    assert pair.b.run(lambda: [tensors().lane.mapped(peer) for peer in ("a", "nobody")]) == [4 * MIB, 0]
    sent = pair.a.run(_export_window)
    pair.a.run(_drop_window)
    pair.b.run(_read_fails, sent)
    assert pair.b.run(lambda: tensors().lane.mapped("a")) == 0


def _drop_window() -> None:
    del tensors().kept["window"]
    gc.collect()


def _read_fails(sent: tuple[Any, list[Shape]]) -> None:
    tensors().lane.disconnect("nobody")
    assert tensors().lane.mapped("a") == 0, "what its owner has dropped stays mapped"
    with pytest.raises(PeerLost, match="'a'"):
        peers.read(sent, Copies.whole([torch.zeros(4 * MIB, dtype=torch.uint8)]))


def test_memory_is_moved_by_several_threads_until_the_lane_is_closed(pair: Pair) -> None:
    pair.a.run(_move)


def _move() -> None:
    lane = tensor_lanes._another()
    lane.open()
    source, target = random((33 * MIB,), torch.uint8), torch.zeros(33 * MIB, dtype=torch.uint8)
    for size in (33 * MIB - 1, 100, 0):
        target.zero_()
        lane.move(target.data_ptr(), source.data_ptr(), size)
        assert torch.equal(target[:size], source[:size]) and not target[size:].any()
    lane.close()
    if lane.lend(MIB) is not None:
        with pytest.raises(LaneUnavailable):
            lane.move(target.data_ptr(), source.data_ptr(), 33 * MIB)
