"""What a peer describes is checked before memory is touched: the checks that the lanes share, without peers."""

from __future__ import annotations

import marshal
from typing import Any

import pytest
import torch

from raytorchrpc.errors import ConfigurationError, LaneUnavailable
from raytorchrpc.lanes.base import Message, checked
from raytorchrpc.lanes.common import frames, packing
from raytorchrpc.lanes.cuda_ipc.exports import Offer
from raytorchrpc.lanes.cuda_ipc.mappings import Loan, Mapped, tensor_over
from raytorchrpc.lanes.cuda_ipc.pages import NUMBERS
from raytorchrpc.lanes.nixl.memory import check_members
from raytorchrpc.rdt.transfer import filled
from raytorchrpc.tensors.codec import Encoded
from raytorchrpc.tensors.dtypes import OutOfBounds, view_at, within

FLOATS = (torch.float32, (2, 3))


def test_bytes_lie_within() -> None:
    for offset, size in ((0, 0), (0, 10), (10, 0), (3, 7)):
        within(offset, size, 10)
    for offset, size in ((-1, 1), (0, 11), (3, 8), (11, 0), (0, -1), (5, -1), (1 << 63, 1)):
        with pytest.raises(OutOfBounds):
            within(offset, size, 10)


def test_a_view_outside_of_its_source_is_refused() -> None:
    source = torch.arange(64, dtype=torch.uint8)
    assert view_at(source, 40, FLOATS).shape == (2, 3)
    view = view_at(source, 8, FLOATS, (11, 1))  # its last element ends with the source
    assert torch.equal(view, source.view(torch.float32).as_strided((2, 3), (11, 1), 2))
    assert view.untyped_storage().data_ptr() == source.data_ptr()
    assert view_at(source, 64, (torch.float32, (0, 3)), (5, 1)).shape == (0, 3)
    outside = [(offset, None) for offset in (-64, -24, 64, 1 << 40)]
    for offset, strides in (
        *outside,
        *((12, (11, 1)), (8, (12, 1)), (-4, (3, 1)), (8, (-1, 1)), (8, (1, 1 << 62)), (65, (0, 0))),
    ):
        with pytest.raises(OutOfBounds):
            view_at(source, offset, FLOATS, strides)


class _Lane:
    name = "somewhat"

    @checked
    def read(self, peer: str, error: BaseException) -> None:
        raise error


@pytest.mark.parametrize(
    "error", [OutOfBounds("x"), TypeError("x"), IndexError("x"), KeyError("x"), OverflowError("x")]
)
def test_a_malformed_descriptor_names_lane_and_peer(error: Exception) -> None:
    with pytest.raises(LaneUnavailable, match=r"lane 'somewhat'.*member 'a'.*one release"):
        _Lane().read("a", error)


def test_other_errors_of_a_lane_stay_what_they_are() -> None:
    for error in (
        RuntimeError("CUDA"),
        LaneUnavailable("somewhat", "full"),
        ConfigurationError("no"),
        KeyboardInterrupt(),
    ):
        with pytest.raises(type(error)) as raised:
            _Lane().read("a", error)
        assert raised.value is error


# --- frames ------------------------------------------------------------------------------------------------------


def frame(described: Any) -> memoryview:
    """With one tensor of 24 bytes in its area, described like this."""
    message = Message(("x",), Encoded(b"", [torch.ones(2, 3)], (), 0))
    whole = b"".join(bytes(part) for part in frames.pack(frames.REQUEST, 1, message))
    call, area, payload, _, kind = frames._PREFIX.unpack_from(whole)
    blob = marshal.dumps((("x",), described, 0, ()))
    head = frames._PREFIX.pack(call, area, payload, len(blob), kind) + blob
    return memoryview(head + bytes(-len(head) % 64) + whole[-area:])


@pytest.mark.parametrize("whole", [False, True], ids=["in parts", "at once"])
def test_tensors_outside_of_their_frame_are_no_frame(whole: bool) -> None:
    def read(view: memoryview) -> torch.Tensor:
        arrived = frames.parse(view) if whole else frames.LargeFrame(len(view)).add(view)
        assert arrived is not None
        return arrived.message.body.tensors[0]

    assert torch.equal(read(frame([("float32", (2, 3), 0)])), torch.ones(2, 3))
    for described in (
        [("float32", (2, 3), 1 << 20)],
        [("float32", (2, 3), -24)],
        [("float32", (1 << 40,), 0)],
        [("float32", (-2, -3), 0)],
        [("float33", (2, 3), 0)],
        [("float32", None, 0)],
        [("float32", (2, 3), "0")],
        [("float32", (2, 3))],
        7,
    ):
        with pytest.raises(ValueError, match="not a frame"):
            read(frame(described))


# --- lanes for GPUs, and those that are not installed everywhere ---------------------------------------------------


def test_memory_of_a_peers_gpu_ends_where_it_ends() -> None:
    mapped = Mapped(1 << 40, 1000, torch.device("cuda", 0))
    assert mapped.at(0, 1000) == 1 << 40 and mapped.at(999, 1) == (1 << 40) + 999
    for offset, size in ((-1, 1), (0, 1001), (1000, 1), (1 << 50, 8)):
        with pytest.raises(OutOfBounds):
            mapped.at(offset, size)
    for size, strides in ((16, (3, 1)), (24, (4, 1)), (24, (-3, 1)), (1001, (3, 1))):
        with pytest.raises(OutOfBounds):
            tensor_over(mapped, 0, size, FLOATS, strides, Loan(lambda: None))


def test_numbers_and_devices_of_a_shared_page() -> None:
    rest = (7, (), False, "tag")
    assert Offer.checked((5, 0, *rest), (0, 1)).tag == "tag"
    for number, device in ((-1, 0), (NUMBERS, 0), (5, 2), (5, -1)):
        with pytest.raises(ValueError, match=r"are not in|not in tuple"):
            Offer.checked((number, device, *rest), (0, 1))
    with pytest.raises(ValueError, match="are not in"):
        Offer.checked((5, 0, -7, *rest[1:]), (0, 1))


@pytest.mark.parametrize("grouped", [[(0, 1), (1,)], [(0,)], [(0,), (0,)], [(0,), (-1,)], [()]])
def test_pieces_of_several_tensors_have_each_of_them_once(grouped: list[tuple[int, ...]]) -> None:
    with pytest.raises((ValueError, LookupError)):
        packing.unpack([torch.zeros(6 * len(piece)) for piece in grouped], grouped, [FLOATS, FLOATS])


def test_a_piece_of_another_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="another dtype"):
        packing.unpack([torch.zeros(12)], [(0, 1)], [FLOATS, (torch.int32, (2, 3))])


def test_pieces_that_are_read_by_rdma_are_no_larger_than_their_tensors_need() -> None:
    shapes = [FLOATS, (torch.uint8, (5,)), (torch.int64, (0,))]

    def check(size: int, *group: tuple[int, int]) -> None:
        check_members([(1, b"", 1 << 40, size)], [group], shapes)

    check(128, (0, 0), (1, 64), (2, 128))
    check(24, (0, 0))
    for size, group in ((23, [(0, 0)]), (24, [(0, 1)]), (128, [(0, 0), (1, -5)]), (1 << 30, [(0, 0)]), (-1, [(2, 0)])):
        with pytest.raises(OutOfBounds):
            check(size, *group)


def test_an_object_is_received_into_tensors_of_its_own_kind_alone() -> None:
    targets = [torch.zeros(3)]
    assert torch.equal(filled(targets, [torch.ones(3)])[0], torch.ones(3))
    for tensor in (torch.ones(1), torch.ones(3, dtype=torch.float64), torch.ones(4)):
        with pytest.raises(ValueError, match="cannot be received into"):
            filled(targets, [tensor])
