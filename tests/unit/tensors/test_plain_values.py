"""What goes without a pickler arrives as a pickler would bring it, and what needs one gets one."""

from __future__ import annotations

import math
import pickle
from collections import OrderedDict
from enum import IntEnum
from typing import Any

import pytest
import torch

from raytorchrpc.tensors.codec import Codec
from raytorchrpc.tensors.plain_values import MOST_TEXT


class Refusing(pickle.Pickler):
    def dump(self, obj: Any) -> None:
        raise AssertionError("a pickler was started")


class Level(IntEnum):
    HIGH = 3


class Name(str):
    """A subclass, whose type must arrive."""


def through(obj: Any, codec: Codec) -> Any:
    return codec.decode(*codec.encode(obj))


PLAIN = [
    1,
    True,
    -0.0,
    1 << 200,
    2 + 3j,
    "lone \ud800 surrogate",
    b"\x80\x05",
    "x" * MOST_TEXT,
    (),
    [],
    {},
    (1, "a", None),
    [1.5, False],
    {"a": 1, "b": b""},
    ((1, "a"), {}),
    ((), {"key": None, "other": 2.0}),
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: f"{value!r:.30}")
def test_plain_values_need_no_pickler(value: Any) -> None:
    arrived = through(value, Codec(Refusing))
    assert (arrived, repr(arrived), type(arrived)) == (value, repr(value), type(value))


def test_not_a_number_arrives_as_one() -> None:
    assert math.isnan(through(math.nan, Codec(Refusing)))


def test_tensors_take_their_places_among_plain_values() -> None:
    a, b = torch.arange(3), torch.ones(2, 2, dtype=torch.bfloat16)
    args, kwargs = through(((a, 7), {"other": b, "name": "x"}), Codec(Refusing))
    assert torch.equal(args[0], a) and args[1] == 7
    assert torch.equal(kwargs["other"], b) and kwargs["name"] == "x" and list(kwargs) == ["other", "name"]


@pytest.mark.parametrize(
    "value",
    [Level.HIGH, Name("n"), "x" * (MOST_TEXT + 1), bytes(MOST_TEXT + 1), ..., [[1]], {1: 2}, OrderedDict(a=1), {1, 2}],
    ids=lambda value: f"{value!r:.30}",
)
def test_other_values_are_pickled(value: Any) -> None:
    codec = Codec()
    assert pickle.loads(codec.encode(value).payload) == value
    arrived = through(value, codec)
    assert arrived == value and type(arrived) is type(value)


def test_a_tensor_that_occurs_twice_arrives_as_one() -> None:
    first, second = through((tensor := torch.ones(2), tensor), Codec())
    assert first is second


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nn.Parameter(torch.ones(2)),
        lambda: torch.ones(2, requires_grad=True),
        lambda: torch.ones(2, 3).t(),
        lambda: torch.empty(0, 3),
        lambda: torch.ones(2, dtype=torch.complex64).conj(),
    ],
    ids=["Parameter", "requires grad", "transposed", "empty", "conjugated"],
)
def test_a_tensor_with_more_than_data_keeps_that(make: Any) -> None:
    tensor = make()
    (arrived,) = through((tensor,), Codec())
    assert type(arrived) is type(tensor)
    assert (arrived.requires_grad, arrived.stride(), arrived.dtype) == (
        tensor.requires_grad,
        tensor.stride(),
        tensor.dtype,
    )
    assert torch.equal(arrived, tensor)
