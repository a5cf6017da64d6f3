"""What a peer says of memory is checked before any of it is touched.

A descriptor comes from a process that proved to be a member. It may still be of another release, or broken, or of what
has ended: it must not make this process read or write where nothing of it is.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from raytorchrpc.errors import LaneUnavailable, RayTorchRpcError

F = TypeVar("F", bound=Callable[..., Any])

#: What reading a descriptor raises that is none.
MALFORMED = (TypeError, ValueError, LookupError, OverflowError, ctypes.ArgumentError)


class OutOfBounds(ValueError):
    """Bytes that a peer described are not in the memory that it described."""


def within(offset: int, size: int, total: int) -> None:
    """Raise OutOfBounds unless ``size`` bytes from ``offset`` on lie in ``total``. Hot path."""
    if offset < 0 or size < 0 or offset + size > total:
        raise OutOfBounds(f"{size} bytes at {offset} are not in {total} bytes")


def checked(method: F) -> F:
    """For a lane's ``fetch`` and ``scatter_into``: a malformed descriptor is LaneUnavailable that names the peer."""

    @functools.wraps(method)
    def call(lane: Any, peer: str, *args: Any) -> Any:
        try:
            return method(lane, peer, *args)
        except RayTorchRpcError:  # some of them are ValueErrors and the like too
            raise
        except MALFORMED as error:
            raise LaneUnavailable(
                lane.name,
                f"the tensors of member {peer!r} cannot be where it says ({type(error).__name__}: {error}), so nothing "
                f"was read there; run one release of raytorchrpc everywhere",
            ) from error

    return cast(F, call)
