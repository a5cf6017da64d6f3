"""Error messages for what cannot be pickled: which argument, and which part of it.

They pickle parts of the object again to find the one that fails, so they are for errors only.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from raytorchrpc.errors import RayTorchRpcError
from raytorchrpc.tensors.codec import Codec

#: How deep the search goes, and how many parts of one object it tries.
_MAX_DEPTH, _MAX_PARTS = 6, 1000


def argument(codec: Codec, label: str, args: Sequence[Any], kwargs: Mapping[str, Any], error: RayTorchRpcError) -> str:
    """The message for arguments of the call ``label`` that ``error`` kept from being pickled."""
    places = [(f"the {_ordinal(number)} argument", value) for number, value in enumerate(args, 1)]
    places += [(f"argument {name!r}", value) for name, value in kwargs.items()]
    for place, value in places:
        if not _can_be_pickled(codec, value):
            return explain(codec, f"{place} of {label}", value, error)
    return f"an argument of {label} cannot be pickled: {error}"


def explain(codec: Codec, what: str, value: Any, error: RayTorchRpcError) -> str:
    """The message for a ``value`` that ``error`` kept from being pickled; ``what`` names it."""
    path, part = "", value
    with suppress(Exception):  # the code of the user's own containers and keys
        for _ in range(_MAX_DEPTH):
            failing = next(((step, each) for step, each in _parts(part) if not _can_be_pickled(codec, each)), None)
            if failing is None:
                break
            path, part = path + failing[0], failing[1]
    where = f", because of its {path.removeprefix('.')} ({_type(part)})" if path else ""
    return f"{what} ({_type(value)}) cannot be pickled{where}: {error}"


def _can_be_pickled(codec: Codec, value: Any) -> bool:
    try:
        codec.encode(value)
    except RayTorchRpcError:
        return False
    return True


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """The elements of a container or the attributes of an object, each with the text that selects it."""
    if isinstance(value, (list, tuple)):
        return ((f"[{index}]", each) for index, each in enumerate(value[:_MAX_PARTS]))
    if isinstance(value, dict):
        return ((f"[{reprlib.repr(key)}]", each) for key, each in islice(value.items(), _MAX_PARTS))
    attributes = {} if isinstance(value, type) else getattr(value, "__dict__", {})
    return ((f".{name}", each) for name, each in islice(attributes.items(), _MAX_PARTS))


def _type(value: Any) -> str:
    cls = type(value)
    return cls.__qualname__ if cls.__module__ in ("builtins", "__main__") else f"{cls.__module__}.{cls.__qualname__}"


def _ordinal(number: int) -> str:
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
