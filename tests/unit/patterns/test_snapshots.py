"""A result that the actor goes on changing is copied before it is sent; one that is its caller's alone is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from raytorchrpc.calls.payload import snapshot
from raytorchrpc.tensors.codec import Codec


def copied(method: Callable[[], Any]) -> bool:
    """What the server does with a method's result before a lane that takes the data later."""
    body = Codec().encode(method())
    before = [tensor.data_ptr() for tensor in body.tensors]
    after = snapshot(body)
    assert all(torch.equal(*both) for both in zip(after.tensors, body.tensors, strict=True))
    assert after.buffers == body.buffers
    return [tensor.data_ptr() for tensor in after.tensors] != before


KEPT = torch.ones(1000)
ARRAY = numpy.ones(100_000)


@pytest.mark.parametrize(
    "method",
    [
        lambda: KEPT,
        lambda: {"deep": [KEPT]},
        lambda: KEPT[10:],
        lambda: KEPT.detach(),
        lambda: torch.nn.Parameter(KEPT),
        lambda: ARRAY,
        lambda: torch.from_numpy(ARRAY),
    ],
    ids=["tensor", "inside", "view", "detached", "parameter", "array", "from numpy"],
)
def test_what_the_actor_keeps_is_copied(method: Callable[[], Any]) -> None:
    assert copied(method)


@pytest.mark.parametrize(
    "method",
    [
        lambda: torch.ones(1000),
        lambda: [torch.ones(1000)],
        lambda: KEPT * 2,
        lambda: torch.ones(10, requires_grad=True),
    ],
)
def test_what_nobody_keeps_is_not_copied(method: Callable[[], Any]) -> None:
    assert not copied(method)
