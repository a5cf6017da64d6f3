"""Which argument of a call, and which part of it, an error names that cannot be pickled."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from raytorchrpc.errors import SerializationError
from raytorchrpc.tensors.codec import Codec


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held


class AwkwardKeys(dict[Any, Any]):
    def items(self) -> Any:
        raise RuntimeError("no")

    def __reduce__(self) -> Any:
        raise TypeError("awkward")


def message(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(SerializationError) as raised:
        Codec().encode((args, kwargs))
    return Codec().explain_argument("b.double", args, kwargs, raised.value)


LOCK = threading.Lock()
WHY = ": TypeError: cannot pickle '_thread.lock' object"


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        ((LOCK,), {}, "the 1st argument of b.double (_thread.lock) cannot be pickled"),
        ((1, torch.ones(2), LOCK), {"x": 1}, "the 3rd argument of b.double (_thread.lock) cannot be pickled"),
        ((*range(10), LOCK), {}, "the 11th argument of b.double (_thread.lock) cannot be pickled"),
        ((1,), {"batch": LOCK}, "argument 'batch' of b.double (_thread.lock) cannot be pickled"),
        (
            ([1, {"x": LOCK}],),
            {},
            "the 1st argument of b.double (list) cannot be pickled, because of its [1]['x'] (_thread.lock)",
        ),
        (
            (Holder((torch.ones(1), LOCK)),),
            {},
            f"the 1st argument of b.double ({__name__}.Holder) cannot be pickled, because of its held[1] "
            "(_thread.lock)",
        ),
    ],
)
def test_the_argument_and_its_part_are_named(args: tuple[Any, ...], kwargs: dict[str, Any], said: str) -> None:
    assert message(*args, **kwargs) == said + WHY


def test_a_container_whose_own_code_fails_is_named_all_the_same() -> None:
    said = message(AwkwardKeys(a=1))
    assert said == f"the 1st argument of b.double ({__name__}.AwkwardKeys) cannot be pickled: TypeError: awkward"


def test_an_object_that_holds_itself_ends_the_search() -> None:
    loop: list[Any] = [LOCK]
    loop.insert(0, loop)
    assert message(loop).startswith("the 1st argument of b.double (list) cannot be pickled, because of its [0]")
