"""Encodes the arguments and results that most small calls have, without a pickler.

These are numbers, text and ordinary tensors, alone or as the elements of one tuple, list or dict. Starting a pickler
for them takes longer than all the rest of their encoding. Anything else is left to the pickler.
"""

from __future__ import annotations

import marshal
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from raytorchrpc.tensors.containers import MANY, is_ordinary

#: Types that marshal restores exactly.
_NUMBERS = frozenset({int, float, complex, bool, type(None)})
_TEXTS = frozenset({str, bytes})
#: Longer text is left to the pickler: marshal copies it several times, and refuses 2 GiB and more.
MOST_TEXT = 16 * 1024
#: How a pickle of protocol 2 or later begins; marshal never begins so.
_PICKLE = 0x80
#: What was encoded.
_VALUE, _CALL, _TUPLE, _LIST, _DICT = range(5)


def encoded(obj: Any, own: bool) -> tuple[bytes, Sequence[torch.Tensor]] | None:
    """Return ``obj`` as bytes and tensors; None if it needs a pickler. ``own``: see ``Codec.encode``."""
    kind = type(obj)
    tensors: list[torch.Tensor] = []
    names: tuple[str, ...] = ()
    if kind is tuple and len(obj) == 2 and type(obj[0]) is tuple and type(obj[1]) is dict:
        what, (values, named) = _CALL, obj
        if named:
            names, values = tuple(named), (*values, *named.values())
    elif kind is tuple or kind is list:
        what, values = _TUPLE if kind is tuple else _LIST, obj
    elif kind is dict:
        what, names, values = _DICT, tuple(obj), obj.values()
    else:
        what, values = _VALUE, (obj,)
    if len(values) >= MANY or set(map(type, names)) - {str}:
        return None
    simple = _without_tensors(values, tensors)
    if simple is None:
        return None
    if not own:
        tensors = [tensor.detach() for tensor in tensors]
    return marshal.dumps((what, names, simple)), tensors


def _without_tensors(values: Iterable[Any], tensors: list[torch.Tensor]) -> list[Any] | None:
    """Return the values with ``...`` in place of each tensor, which is added to ``tensors``."""
    simple: list[Any] = []
    for value in values:
        kind = type(value)
        if kind in _NUMBERS or (kind in _TEXTS and len(value) <= MOST_TEXT):
            simple.append(value)
        elif is_ordinary(value) and not any(value is other for other in tensors):
            tensors.append(value)
            simple.append(...)
        else:
            return None
    return simple


def is_plain(payload: bytes) -> bool:
    """Whether ``encoded`` made this payload, and not a pickler."""
    return payload[0] != _PICKLE


def decoded(payload: bytes, tensors: Sequence[torch.Tensor]) -> Any:
    """Reverse ``encoded``. The object contains the given tensors themselves."""
    what, names, values = marshal.loads(payload)
    if tensors:
        following = iter(tensors)
        values = [next(following) if value is ... else value for value in values]
    if what == _CALL:
        count = len(values) - len(names)
        return tuple(values[:count]), dict(zip(names, values[count:], strict=True))
    if what == _VALUE:
        return values[0]
    if what == _DICT:
        return dict(zip(names, values, strict=True))
    return tuple(values) if what == _TUPLE else values
