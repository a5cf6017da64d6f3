"""Lists and dicts full of tensors, taken apart and put together at once.

A pickler calls back for every tensor, 2 microseconds each: most of the time of a call with a state dict. A container
of nothing but ordinary tensors is looked over as a whole instead, by loops that run in C.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch

#: Smaller containers are left to the pickler.
_MANY = 8
#: Containers of containers are looked into this far.
_DEPTH = 3

_ATOMS = frozenset({int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device})
_dtype, _layout, _is_cpu, _is_cuda = (attrgetter(name) for name in ("dtype", "layout", "is_cpu", "is_cuda"))
_requires_grad, _is_nested = attrgetter("requires_grad"), attrgetter("is_nested")
#: Neither quantized nor complex, which can be conjugated views.
_PLAIN_DTYPES = frozenset(
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not dtype.is_complex and not str(dtype).startswith(("torch.q", "torch.bits"))
)


class Bulk(NamedTuple):
    """Stands for a container of tensors."""

    kind: type[Any]
    keys: tuple[str, ...] | None
    """Of a dict."""
    state: dict[str, Any]
    """Attributes of a container that can have some (a module's state dict has)."""
    tensors: Sequence[torch.Tensor]

    def filled(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The container again, with these tensors."""
        made = self.kind(tensors if self.keys is None else zip(self.keys, tensors, strict=True))
        if self.state:
            vars(made).update(self.state)
        return made


def gathered(obj: Any) -> Any | None:
    """``obj`` with a ``Bulk`` in place of each container of many tensors; None if that is not worth it, or if
    anything in it might be there twice (a pickler keeps what is one object one object).
    """
    seen: list[int] = []
    found: list[Bulk] = []
    try:
        gone_over = _gather(obj, _DEPTH, seen, found)
    except _NotSimple:
        return None
    return gone_over if found and len(set(seen)) == len(seen) else None


class _NotSimple(Exception):
    pass


def _gather(obj: Any, depth: int, seen: list[int], found: list[Bulk]) -> Any:
    kind = type(obj)
    if kind in _ATOMS:
        return obj
    if kind is torch.Tensor:
        seen.append(id(obj))
        return obj
    if kind not in (list, tuple, dict, OrderedDict) or not depth:
        raise _NotSimple
    if not obj:
        return obj
    values = obj.values() if kind in (dict, OrderedDict) else obj
    seen.append(id(obj))
    if len(obj) >= _MANY:
        bulk = _bulk(obj, kind, values)
        seen += map(id, bulk.tensors)
        found.append(bulk)
        return bulk
    below = [_gather(value, depth - 1, seen, found) for value in values]
    if kind is OrderedDict:
        raise _NotSimple  # small, and may have attributes
    if kind is not dict:
        return kind(below)
    if set(map(type, obj)) - _ATOMS:
        raise _NotSimple
    return dict(zip(obj, below, strict=True))


def is_ordinary(obj: Any) -> bool:
    """Whether it is a tensor that is nothing but its dtype, its shape and its memory."""
    return (
        type(obj) is torch.Tensor
        and obj.layout is torch.strided
        and obj.dtype in _PLAIN_DTYPES
        and (obj.is_cpu or obj.is_cuda)
        and not obj.requires_grad
        and not obj.is_nested
        and not obj.is_neg()
        and obj.is_contiguous()
        and not vars(obj)
        and bool(obj.data_ptr())
    )


def _bulk(obj: Any, kind: type[Any], values: Any) -> Bulk:
    tensors = list(values)
    if set(map(type, tensors)) != {torch.Tensor}:
        raise _NotSimple
    if set(map(_layout, tensors)) != {torch.strided} or set(map(_dtype, tensors)) - _PLAIN_DTYPES:
        raise _NotSimple
    if not all(map(_is_cuda if tensors[0].is_cuda else _is_cpu, tensors)):
        raise _NotSimple
    if any(map(_requires_grad, tensors)) or any(map(_is_nested, tensors)) or any(map(torch.Tensor.is_neg, tensors)):
        raise _NotSimple
    if not all(map(torch.Tensor.is_contiguous, tensors)) or any(map(vars, tensors)):
        raise _NotSimple
    if not all(map(torch.Tensor.data_ptr, tensors)):  # empty, which is well, or freed, which the pickler refuses
        raise _NotSimple
    keys = tuple(obj) if kind in (dict, OrderedDict) else None
    if keys is not None and set(map(type, keys)) != {str}:
        raise _NotSimple
    return Bulk(kind, keys, vars(obj) if kind is OrderedDict else {}, tensors)
