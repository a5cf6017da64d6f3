"""Which buffer takes which tensor of a result, and what is refused before any is changed."""

from __future__ import annotations

import collections
from typing import Any

import numpy
import pytest
import torch

from raytorchrpc._compat import ray_internals
from raytorchrpc.calls.receive_into import Buffers, Window
from raytorchrpc.errors import ConfigurationError, LaneUnavailable, PeerLost
from raytorchrpc.lanes.base import Copies, Copy, Target
from raytorchrpc.tensors.codec import Codec, Encoded
from raytorchrpc.tensors.dtypes import OutOfBounds
from tests.freed import FREED, freed

CODEC = Codec(ray_internals.cloudpickler())


def receive(obj: Any, *buffers: torch.Tensor, keep: bool = False) -> Any:
    return Buffers(buffers).receive(CODEC, private(CODEC.encode(obj)), [], "b.get", keep)[1]


def private(body: Encoded) -> Encoded:
    """As after a journey."""
    return body._replace(tensors=[tensor.clone() for tensor in body.tensors])


class Odd:
    """With state of every kind, and code that must run once."""

    made = 0

    def __init__(self) -> None:
        self.state: Any = {"t": torch.arange(6.0).view(2, 3).T, "set": {1, (2, 3)}, "more": [torch.ones(2)]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        type(self).made += 1
        vars(self).update(state)


def test_the_result_holds_the_buffers_in_the_order_of_its_tensors() -> None:
    named = collections.OrderedDict((str(number), torch.full((number,), float(number))) for number in range(9))
    obj = {"first": torch.ones(2), "rest": (named, [torch.zeros(3, 2), 5]), "last": torch.tensor(7)}
    buffers = [torch.ones(2), *[torch.empty(number) for number in range(9)], torch.ones(3, 2), torch.tensor(0)]
    result = receive(obj, *buffers)
    found = [result["first"], *result["rest"][0].values(), result["rest"][1][0], result["last"]]
    assert all(tensor is buffer for tensor, buffer in zip(found, buffers, strict=True))
    assert (buffers[9].tolist(), buffers[-1].item(), result["rest"][1][1]) == ([8.0] * 8, 7, 5)


def test_whatever_it_is_made_of_is_made_once() -> None:
    local = {"closure": lambda: 3}
    obj = [
        Odd(),
        local,
        collections.deque([torch.zeros(1)]),
        collections.Counter("ab"),
        frozenset([1]),
        ValueError("x"),
    ]
    buffers = [torch.zeros(3, 2), torch.zeros(2), torch.ones(1)]
    before = Odd.made
    result = receive(obj, *buffers)
    assert Odd.made == before + 1
    assert result[0].state["t"] is buffers[0] and result[0].state["more"][0] is buffers[1]
    assert buffers[0].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert (result[0].state["set"], result[1]["closure"](), result[2][0] is buffers[2]) == ({1, (2, 3)}, 3, True)


SQUARE, EXPANDED = torch.arange(9.0).view(3, 3), torch.arange(3.0).expand(4, 3)
IMAGES = torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("sent", "buffer"),
    [
        (SQUARE.T, torch.zeros(3, 3)),
        (SQUARE, torch.zeros(3, 3).T),
        (SQUARE.T, torch.zeros(3, 3).T),
        (IMAGES, torch.zeros(2, 3, 4, 5)),
        (IMAGES, torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)),
        (EXPANDED, torch.zeros(4, 3)),  # elements share a place
        (EXPANDED, torch.zeros(3, 4).T),
    ],
)
def test_dimensions_meet_by_their_place_and_not_by_how_they_lie(sent: torch.Tensor, buffer: torch.Tensor) -> None:
    strides = buffer.stride()
    assert receive({"x": sent, "y": torch.ones(2)}, buffer, torch.zeros(2))["x"] is buffer
    assert torch.equal(buffer, sent) and buffer.stride() == strides


def test_a_tensor_that_is_there_twice_counts_once() -> None:
    tensor, buffer = torch.ones(3), torch.zeros(3)
    result = receive([tensor, tensor], buffer)
    assert result[0] is result[1] is buffer


@pytest.mark.parametrize("keep", [False, True])
def test_arrays_do_not_count(keep: bool) -> None:
    array, buffer = numpy.arange(10_000.0), torch.zeros(4)
    result = receive({"array": array, "tensor": torch.ones(4), "small": array[:3]}, buffer, keep=keep)
    assert result["tensor"] is buffer and buffer.sum() == 4
    assert (result["array"] == array).all() and (result["small"] == array[:3]).all()


def test_a_buffer_keeps_what_it_is() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.tag = "mine"  # type: ignore[attr-defined]
    plain = torch.zeros(3)
    theirs = torch.nn.Parameter(torch.ones(3))
    theirs.tag = "theirs"  # type: ignore[attr-defined]
    result = receive([torch.ones(3), theirs], parameter, plain)
    assert result[0] is parameter and result[1] is plain
    assert (parameter.requires_grad, parameter.is_leaf, parameter.tag) == (True, True, "mine")  # type: ignore[attr-defined]
    assert (plain.requires_grad, vars(plain)) == (False, {})
    assert parameter.tolist() == plain.tolist() == [1.0] * 3


def test_autograd_knows_that_a_buffer_was_changed() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    loss = (parameter * parameter).sum()
    receive(torch.zeros(3), parameter)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]


def test_a_buffer_made_under_inference_mode() -> None:
    with torch.inference_mode():
        buffer = torch.zeros(3)
    leaf = torch.zeros(2, requires_grad=True)
    receive([torch.ones(3), torch.ones(2)], buffer, leaf)
    assert (buffer.tolist(), leaf.tolist(), leaf.requires_grad) == ([1.0] * 3, [1.0] * 2, True)
    spread([torch.arange(4.0).view(torch.uint8)], lambda result: region(4, buffer))
    assert buffer.tolist() == [1.0, 2.0, 3.0], "and for a region"


def test_a_result_without_tensors_takes_no_buffer() -> None:
    assert receive({"a": 1}) == {"a": 1}
    assert receive(None) is None
    with pytest.raises(ConfigurationError, match="has 0 tensors, and into= 1"):
        receive(None, torch.zeros(1))


@pytest.mark.parametrize(
    ("sent", "buffers", "said"),
    [
        ([torch.ones(3)], [], "has 1 tensors, and into= 0"),
        ([torch.ones(3)], [torch.zeros(3), torch.zeros(3)], "has 1 tensors, and into= 2"),
        ([torch.ones(3), torch.ones(3, 2)], [torch.zeros(3), torch.zeros(2, 3)],
         r"tensor 1 of it is float32 \(3, 2\), and buffer 1 of into= is float32 \(2, 3\)"),
        ([torch.ones(2), torch.ones(3, 2).T], [torch.zeros(2), torch.zeros(3, 2)],
         r"tensor 1 of it is float32 \(2, 3\), and buffer 1 of into= is float32 \(3, 2\)"),
        ([torch.ones(3), torch.ones(4)], [torch.zeros(3), torch.zeros(4, dtype=torch.float64)],
         r"tensor 1 of it is float32 \(4,\), and buffer 1 of into= is float64 \(4,\)"),
        ([torch.ones(3), torch.ones(())], [torch.zeros(3), torch.zeros(1)], r"float32 \(\), and buffer 1"),
        ([EXPANDED], [torch.zeros(3)], r"float32 \(4, 3\), and buffer 0 of into= is float32 \(3,\)"),
    ],
)  # fmt: skip
def test_what_does_not_match_is_named_and_nothing_changes(
    sent: list[torch.Tensor], buffers: list[torch.Tensor], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=rf"the result of b\.get does not fit: .*{said}"):
        receive(sent, *buffers)
    assert all(not buffer.any() for buffer in buffers)


def test_a_buffer_that_lost_its_memory_since_the_call() -> None:
    buffers = Buffers([torch.zeros(3), given := torch.zeros(4)[1:]])
    freed(given)
    with pytest.raises(ConfigurationError, match="buffer 1 of into= has no memory"):
        buffers.receive(CODEC, CODEC.encode([torch.ones(3), torch.ones(3)]), [], "b.get", False)


@pytest.mark.parametrize(
    ("into", "said"),
    [
        (torch.zeros(2), "into= is a list or a tuple of tensors, not a Tensor"),
        ({"a": torch.zeros(2)}, "not a dict"),
        ([torch.zeros(2), None], "buffer 1 of into= is a NoneType, not a tensor"),
        ([torch.zeros(3, 1).expand(3, 2)], "buffer 0 of into= is expanded"),
        ([torch.eye(2).to_sparse()], "is not a dense tensor"),
        ([torch.empty(2, device="meta")], "is not a dense tensor"),
        ([torch.zeros(2, dtype=torch.complex64).conj()], "conjugated"),
        *(([make()], "buffer 0 of into= has no memory: .*; gather the tensor first") for make in FREED.values()),
        ([torch.nn.LazyLinear(2).weight], "is not initialized, as of a lazy module: call the module once"),
    ],
)
def test_what_cannot_be_filled_is_refused_at_the_call(into: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Buffers(into)


def region(offset: int, target: torch.Tensor, strides: tuple[int, ...] | None = None) -> Copies:
    return Copies([Copy(0, Target.of(target), offset, strides)], [target])


def spread(obj: Any, plan: Any) -> Any:
    return Window(plan).receive(CODEC, private(CODEC.encode(obj)), [], "b.get", False)


def test_regions_of_flat_tensors_are_copied_to_where_they_belong() -> None:
    flat = torch.arange(256, dtype=torch.uint8)
    one, other = torch.zeros(4, dtype=torch.uint8), torch.zeros(2, 3, dtype=torch.int32).T
    versions = one._version, other._version
    seen: list[Any] = []

    def plan(result: Any) -> Copies:
        seen.append(result)
        return Copies([Copy(0, Target.of(one), 64), Copy(2, Target.of(other), 128)], [one, other])

    size, result = spread((5, [flat, flat + 1, flat.clone()]), plan)
    assert one.tolist() == [64, 65, 66, 67]
    assert torch.equal(other, flat[128:152].view(torch.int32).view(3, 2))
    assert (one._version, other._version) != versions, "autograd notices"
    assert size == len(CODEC.encode((5, [flat, flat + 1, flat.clone()])).payload) + one.nbytes + other.nbytes
    assert result is seen[0] and result[0] == 5 and [tensor.numel() for tensor in result[1]] == [0, 0, 0]


def test_strided_regions_of_a_message_are_copied_to_where_they_belong() -> None:
    matrix = torch.arange(48, dtype=torch.int32).view(6, 8)
    wide = torch.zeros(6, 7, dtype=torch.int32)
    target = wide[:, 2:5]
    spread([matrix.view(-1).view(torch.uint8)], lambda result: region(4 * 4, target, (8, 1)))
    assert torch.equal(target, matrix[:, 4:7])
    assert not wide[:, :2].any() and not wide[:, 5:].any()


@pytest.mark.parametrize(("offset", "strides"), [(0, (40, 1)), (0, (-8, 1)), (-4, (8, 1)), (20, (8, 1))])
def test_strided_regions_outside_of_a_message_are_refused(offset: int, strides: tuple[int, ...]) -> None:
    target = torch.zeros(6, 4, dtype=torch.int32)
    with pytest.raises(OutOfBounds):
        spread([torch.ones(192, dtype=torch.uint8)], lambda result: region(offset, target, strides))
    assert not target.any()


def window(obj: Any) -> tuple[Window, list[int]]:
    """A received window, and the bytes that it counts afterwards."""
    found, counted = Window(), list[int]()
    found.count = counted.append
    found.receive(CODEC, private(CODEC.encode(obj)), [], "b.get", False)
    return found, counted


def test_a_window_is_copied_from_after_the_result_was_looked_at() -> None:
    held, counted = window((5, [torch.arange(256, dtype=torch.uint8)]))
    assert held.result[0] == 5 and held.result[1][0].numel() == 0 and held.has_tensors and not counted
    target = torch.zeros(4, dtype=torch.uint8)
    version = target._version
    held.make(region(64, target))
    assert target.tolist() == [64, 65, 66, 67] and target._version != version
    assert counted == [4] and not held.has_tensors


class Unreachable:
    """Tensors beside the message that cannot be read any more."""

    positions, shapes = None, [(torch.uint8, (8,))]

    def read(self, copies: Any) -> None:
        raise LaneUnavailable("shm", "it is gone")


def test_a_window_says_what_an_error_means_after_the_result() -> None:
    held, counted = Window(), list[int]()
    held.count, held.error_of = counted.append, lambda error: PeerLost("b", str(error))
    body = private(CODEC.encode([torch.zeros(8, dtype=torch.uint8)]))._replace(tensors=[])
    held.receive(CODEC, body, [Unreachable()], "b.get", False)  # type: ignore[list-item]
    with pytest.raises(PeerLost, match="it is gone"):
        held.make(region(0, torch.zeros(4, dtype=torch.uint8)))
    assert not counted and not held.has_tensors


def test_a_window_of_a_message_is_viewed_as_a_copy() -> None:
    sent = torch.arange(8, dtype=torch.uint8)
    held, _ = window((1, [sent]))
    pieces, are_copies = held.view()
    assert pieces is not None and are_copies and torch.equal(pieces[0], sent) and not held.has_tensors
