"""When weights are converted: once for each version, before a reader asks if one asked for the version before."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from raytorchrpc.patterns.weights import conversions
from tests.unit.members import Members
from tests.unit.patterns.test_weight_conversions import is_quantized, published, pulled, target

SHAPE = (130, 130)
LONG_S = 30.0


class Converter:
    """Counts the tensors that are converted, and holds the next ones up."""

    def __init__(self) -> None:
        self.made = 0
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.began = threading.Event()
        self._quantize = conversions._quantize

    def __call__(self, *args: Any) -> None:
        self.began.set()
        assert self.goes_on.wait(LONG_S)
        self.made += 1
        self._quantize(*args)


@pytest.fixture
def converter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Converter]:
    await_thread()  # of a test before
    made = Converter()
    monkeypatch.setattr(conversions, "_quantize", made)
    yield made
    made.goes_on.set()
    await_thread()


def await_thread() -> None:
    for thread in threading.enumerate():
        if thread.name == "raytorchrpc-convert":
            thread.join(LONG_S)
            assert not thread.is_alive()


def weight(version: int) -> torch.Tensor:
    return torch.full(SHAPE, float(version))


def test_a_version_is_converted_ahead_if_a_reader_asked_for_the_one_before(
    members: Members, converter: Converter
) -> None:
    published(members, {"w": weight(1)})
    await_thread()
    assert converter.made == 0, "nobody has asked"
    pulled(members, target(SHAPE))
    published(members, {"w": weight(2)})
    await_thread()
    assert converter.made == 2
    assert is_quantized(pulled(members, target(SHAPE)), weight(2))
    assert converter.made == 2


def test_one_version_at_most_is_converted_for_nobody(members: Members, converter: Converter) -> None:
    published(members, {"w": weight(1)})
    pulled(members, target(SHAPE))
    for version in range(2, 6):
        published(members, {"w": weight(version)})
        await_thread()
    assert converter.made == 2
    assert is_quantized(pulled(members, target(SHAPE)), weight(5))


def test_a_reader_without_conversion_does_not_wait_for_one(members: Members, converter: Converter) -> None:
    """One with a conversion gets what is being converted when it is done."""
    published(members, {"w": weight(1)})
    pulled(members, target(SHAPE))
    converter.began.clear()
    converter.goes_on.clear()
    published(members, {"w": weight(2)})
    assert converter.began.wait(LONG_S)
    model = pulled(members, {"w": torch.zeros(SHAPE)}, convert=False)
    assert torch.equal(model["w"], weight(2))
    asks = threading.Timer(0.05, converter.goes_on.set)
    asks.start()
    assert is_quantized(pulled(members, target(SHAPE)), weight(2))
    asks.join()
    assert converter.made == 2


def test_a_conversion_that_fails_ahead_is_tried_again_for_the_reader(
    members: Members, converter: Converter, monkeypatch: pytest.MonkeyPatch
) -> None:
    published(members, {"w": weight(1)})
    pulled(members, target(SHAPE))

    def fail(*_: Any) -> None:
        raise MemoryError("none is left")

    with monkeypatch.context() as without_memory:
        without_memory.setattr(conversions, "_quantize", fail)
        published(members, {"w": weight(2)})
        await_thread()
    assert is_quantized(pulled(members, target(SHAPE)), weight(2))
