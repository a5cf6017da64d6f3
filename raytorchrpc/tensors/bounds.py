"""Checks a peer's descriptors of memory before any of the memory is accessed.

A descriptor comes from an authenticated member. That may still be of another release, broken, or have ended: its
descriptor must not make this process access memory out of bounds.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from raytorchrpc.errors import LaneUnavailable, RayTorchRpcError

F = TypeVar("F", bound=Callable[..., Any])

#: Errors that an invalid descriptor causes.
MALFORMED = (TypeError, ValueError, LookupError, OverflowError, ctypes.ArgumentError)


class OutOfBounds(ValueError):
    """A peer described a range that lies outside the memory that it described."""


def within(offset: int, size: int, total: int) -> None:
    """Raise OutOfBounds unless ``size`` bytes at ``offset`` lie within ``total`` bytes. Hot path."""
    if offset < 0 or size < 0 or offset + size > total:
        raise OutOfBounds(f"{size} bytes at {offset} are not in {total} bytes")


def span_of(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Count the elements from the first to the last of a strided tensor, inclusive; 0 if it is empty."""
    if 0 in shape:
        return 0
    return 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))


def strided_within(offset: int, shape: Sequence[int], strides: Sequence[int], itemsize: int, total: int) -> int:
    """Return the bytes from the first to the last of a strided region's elements, inclusive.

    Raises OutOfBounds for a negative stride, or unless the region at byte ``offset`` lies within ``total`` bytes.
    """
    if any(stride < 0 for stride in strides):
        raise OutOfBounds(f"a region has negative strides: {tuple(strides)}")
    size = span_of(shape, strides) * itemsize
    within(offset, size, total)
    return size


def checked(method: F) -> F:
    """Decorate a lane's ``fetch`` or ``scatter_into``: invalid descriptors raise LaneUnavailable with the peer."""

    @functools.wraps(method)
    def call(lane: Any, peer: str, *args: Any) -> Any:
        try:
            return method(lane, peer, *args)
        except RayTorchRpcError:  # some of these are ValueErrors and the like too
            raise
        except MALFORMED as error:
            raise LaneUnavailable(
                lane.name,
                f"the descriptor of the tensors of member {peer!r} is invalid ({type(error).__name__}: {error}), so "
                f"nothing was read; run one release of raytorchrpc everywhere",
            ) from error

    return cast(F, call)
