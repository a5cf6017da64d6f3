"""What every WindowLane must do: memory that its owner fills once, and that peers read in parts, in place.

The suite for tensors of messages, test_tensor_lanes.py, runs on these lanes too. Functions with an underscore run in
the processes ``a`` and ``b``.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from raytorchrpc.calls.payload import PendingTensors
from raytorchrpc.errors import LaneUnavailable, PeerLost
from raytorchrpc.lanes.base import Part, WindowLane
from raytorchrpc.tensors.dtypes import Shape
from tests.conformance import test_tensor_lanes as tensor_lanes
from tests.conformance.peers import ALL_DTYPES, export, random, same, tensors
from tests.conformance.test_tensor_lanes import GPU_KINDS, MIB, Pair

KINDS = ["shm", *(kind for kind in GPU_KINDS if kind.values[0].startswith("cuda_ipc"))]  # type: ignore[union-attr]
OTHERS = [kind for kind in tensor_lanes.KINDS if kind not in KINDS]


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = tensor_lanes.make_pair(request.param)
    yield pair
    pair.kill()


@pytest.fixture(scope="module", params=[*KINDS, *OTHERS])
def any_pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Of all lanes for tensors: from a lane without windows, a member fetches the whole tensors."""
    pair = tensor_lanes.make_pair(request.param)
    yield pair
    pair.kill()


def _lane() -> WindowLane:
    lane = tensors().lane
    assert isinstance(lane, WindowLane)
    return lane


# --- parts ---------------------------------------------------------------------------------------------------------


def _column_slice(shape: Shape) -> torch.Tensor:
    dtype, extents = shape
    if not extents:
        return tensor_lanes._plain(shape)
    return tensor_lanes._plain((dtype, (*extents[:-1], extents[-1] + 16)))[..., 8:-8]


#: Where a part begins, its target's dtype and shape, and its strides in the flat tensor.
_Described = tuple[int, torch.dtype, tuple[int, ...], "tuple[int, ...] | None"]
#: Bools of random bytes would be none.
_DTYPES = [dtype for dtype in ALL_DTYPES if dtype is not torch.bool]
_SIZES = (5 * MIB, 192, 0, 3 * MIB + 64, 256)
_PARTS: list[list[_Described]] = [
    [
        (64, torch.float32, (1000, 300), (1024, 1)),  # columns of a matrix
        (2048, torch.bfloat16, (512, 20), (1024, 1)),
        (0, torch.int16, (4, 100, 64), (100_000, 256, 1)),  # and of a stack of them
        (256, torch.int32, (3, 200, 500), (400_000, 1000, 1)),
        (0, torch.uint8, (3, 4, 5, 6), (50_000, 4000, 40, 3)),
        (0, torch.float64, (300, 200), (1, 300)),  # transposed
        (128, torch.complex32, (20, 30), (64, 1)),
        (MIB, torch.uint8, (2 * MIB,), None),
        (4096, torch.float32, (MIB // 8,), None),
        (0, torch.float32, (7, 3), None),
        (0, torch.float32, (3, 4), (0, 1)),
        (8, torch.int64, (), ()),
        (0, torch.float32, (0, 3), (3, 1)),
    ],
    [
        (0, torch.uint8, (5, 4), (30, 1)),
        (8, torch.int32, (5,), (2,)),
        (64, torch.int32, (5,), None),
        (128, torch.complex32, (2, 2), None),
        (192, torch.int8, (0, 4), None),
    ],
    [(0, torch.uint8, (0, 4), (30, 1)), (0, torch.float64, (0,), None)],
    [
        (64, torch.bfloat16, (512, 1024), (2048, 1)),
        (3 * MIB, torch.float16, (4, 8), None),
        # Small ones among contiguous neighbours, and some over others.
        *((256 * number, dtype, (3, 2), (4, 1)) for number, dtype in enumerate(_DTYPES)),
        *((2 * MIB + 64 * number, dtype, (3,), None) for number, dtype in enumerate(_DTYPES)),
        *((256 * number, torch.int16, (7,), None) for number in range(9)),
        (2 * MIB, torch.uint8, (8192,), None),
        (2 * MIB + (64 << 10) + 192, torch.uint8, (5,), None),
    ],
    [],
]
_ALL = slice(None)


_TARGETS = (tensor_lanes._plain, _column_slice, tensor_lanes._strided, tensor_lanes._turned, tensor_lanes._on_the_cpu)


@pytest.mark.parametrize("lend", [False, True])
def test_parts_of_flat_tensors_go_where_they_belong(any_pair: Pair, lend: bool) -> None:
    for prepare in _TARGETS:
        for kept in (_ALL, slice(1, 3)):  # the latter are small enough for a message of cuda_ipc
            any_pair.b.run(_spread, any_pair.send(_flats, lend, kept), prepare, kept)
    if any_pair.a.run(lambda: tensors().lane.name == "shm"):
        assert any_pair.used() == 0, "slots are back"


def _flats(lend: bool, kept: slice = _ALL) -> list[torch.Tensor]:
    made = [random((size,), torch.uint8, size) for size in _SIZES][kept]
    return [_lent(tensor) for tensor in made] if lend and isinstance(tensors().lane, WindowLane) else made


def _lent(tensor: torch.Tensor) -> torch.Tensor:
    lent = _lane().lend(tensor.nbytes)
    tensors().kept.setdefault("lent", []).append(lent)
    return tensor if lent is None else lent.copy_(tensor)


def _spread(sent: tuple[Any, list[Shape]], prepare: Callable[[Shape], torch.Tensor], kept: slice = _ALL) -> None:
    """As a member does: by ``scatter_into`` if the lane has it, and else out of the whole tensors."""
    descriptor, shapes = sent
    parts = [
        [Part(offset, prepare((dtype, shape)), strides) for offset, dtype, shape, strides in its]
        for its in _PARTS[kept]
    ]
    runs = tuple(("uint8", shape, 1) for _, shape in shapes)
    PendingTensors(tensors().lane, "a", ("", None, runs, descriptor)).scatter_into(parts)
    for whole, its in zip(_flats(False, kept), parts, strict=True):
        for offset, target, strides in its:
            count = (whole.numel() - offset) // target.itemsize * target.itemsize
            elements = whole[offset : offset + count].clone().view(target.dtype)
            shape = tuple(target.shape)
            contiguous = elements[: target.numel()]
            expected = contiguous.view(shape) if strides is None else elements.as_strided(shape, strides)
            assert same(tensor_lanes._brought(target), expected), (offset, target.dtype, shape)
            memory = target if target._base is None else target._base
            assert (memory.reshape(-1).view(torch.uint8) != 0x55).sum() <= target.nbytes, "nothing else was written"


# --- the memory ----------------------------------------------------------------------------------------------------


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
        lent = _lane().lend(4 * MIB)
        kept["window"] = torch.empty(4 * MIB, dtype=torch.uint8, device=tensors().device) if lent is None else lent
    if kept["window"].is_cuda:
        _lane().fence(kept["window"].device.index)
    kept["window"].view(torch.float32).fill_(value)


def _export_window() -> Any:
    return export([tensors().kept["window"]])


def _prepare(sent: tuple[Any, list[Shape]]) -> None:
    _lane().prepare("a", sent[0])
    for broken in ((), (1, 2), (1, "x", 3, 4, 5, 6), ("x",) * 4):
        _lane().prepare("a", broken)
    _lane().prepare("nobody", sent[0])


def _read_window(sent: tuple[Any, list[Shape]]) -> list[float]:
    target = torch.zeros(MIB, device=tensors().device)
    for part, source in _lane().scatter_into("a", sent[0], [4 * MIB], [[Part(0, target)]]):
        part.copy_(source)
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
    found = _lane().view("a", sent[0], [4 * MIB])
    if found is not None:
        (tensors().kept["view"],) = found
    return found is not None


def _viewed() -> list[float]:
    return [float(value) for value in tensors().kept["view"].view(torch.float32).unique()]


def _view_refused(sent: tuple[Any, list[Shape]]) -> None:
    for size in (4 * MIB + 1, -1, 1 << 50):
        with pytest.raises(LaneUnavailable, match="'a'"):
            _lane().view("a", sent[0], [size])


def test_lent_memory_is_exported_without_a_copy_for_as_long_as_it_lives() -> None:
    """Peers have it mapped for as long as it is lent."""
    pair = tensor_lanes.make_pair("shm", 2 * MIB)  # the arena could not hold a copy
    try:
        pair.a.run(_fill_window, 3)
        assert pair.b.run(_read_window, pair.a.run(_export_window)) == [3.0]
        assert pair.used() == 0
        assert pair.b.run(_mapped, "a") == 4 * MIB and pair.b.run(_mapped, "nobody") == 0
        sent = pair.a.run(_export_window)
        pair.a.run(_drop_window)
        pair.b.run(_read_fails, sent)
        assert pair.b.run(_mapped, "a") == 0
    finally:
        pair.kill()


def _mapped(peer: str) -> int:
    return _lane().mapped(peer)


def _drop_window() -> None:
    del tensors().kept["window"]
    gc.collect()


def _read_fails(sent: tuple[Any, list[Shape]]) -> None:
    _lane().disconnect("nobody")
    assert _lane().mapped("a") == 0, "what its owner has dropped stays mapped"
    with pytest.raises(PeerLost, match="'a'"):
        _lane().scatter_into("a", sent[0], [4 * MIB], [[Part(0, torch.zeros(1))]])


def test_memory_is_moved_by_several_threads_until_the_lane_is_closed(pair: Pair) -> None:
    pair.a.run(_move)


def _move() -> None:
    lane = tensor_lanes._another()
    assert isinstance(lane, WindowLane)
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
