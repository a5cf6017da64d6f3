"""Takes apart lists and dicts of tensors as a whole, and puts them together again.

A pickler calls back for every tensor, which takes 2 microseconds each and most of the time of a call with a state dict.
A container of ordinary tensors only is checked as a whole instead, by loops that run in C.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch

#: Smaller containers are not taken apart as a whole.
MANY = 8
#: Greatest depth of nested containers.
_DEPTH = 3

_ATOMS = frozenset({int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device})
_dtype, _layout, _is_cpu, _is_cuda = (attrgetter(name) for name in ("dtype", "layout", "is_cpu", "is_cuda"))
_requires_grad, _is_nested = attrgetter("requires_grad"), attrgetter("is_nested")
#: Excludes quantized dtypes, and complex ones, which can be conjugated views.
_PLAIN_DTYPES = frozenset(
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not dtype.is_complex and not str(dtype).startswith(("torch.q", "torch.bits"))
)


class Bulk(NamedTuple):
    """Takes the place of a container of tensors."""

    kind: type[Any]
    keys: tuple[str, ...] | None
    """The keys of a dict."""
    state: dict[str, Any]
    """Attributes of the container, as a module's state dict has."""
    tensors: Sequence[torch.Tensor]

    def rebuilt(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Build the container with other tensors."""
        made = self.kind(tensors if self.keys is None else zip(self.keys, tensors, strict=True))
        if self.state:
            vars(made).update(self.state)
        return made


def gathered(obj: Any) -> Any | None:
    """Return ``obj`` with a ``Bulk`` in place of each container of many tensors. None if there is none, or if any
    object may occur twice, because a pickler preserves identity.
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
    if len(obj) >= MANY:
        bulk = _bulk(obj, kind, values)
        seen += map(id, bulk.tensors)
        found.append(bulk)
        return bulk
    below = [_gather(value, depth - 1, seen, found) for value in values]
    if kind is OrderedDict:
        raise _NotSimple  # a small one, which may have attributes
    if kind is not dict:
        return kind(below)
    if set(map(type, obj)) - _ATOMS:
        raise _NotSimple
    return dict(zip(obj, below, strict=True))


def is_ordinary(obj: Any) -> bool:
    """Whether ``obj`` is a tensor described by its dtype, shape and memory alone."""
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
    if not all(map(torch.Tensor.data_ptr, tensors)):  # empty, or freed, which the pickler refuses
        raise _NotSimple
    keys = tuple(obj) if kind in (dict, OrderedDict) else None
    if keys is not None and set(map(type, keys)) != {str}:
        raise _NotSimple
    return Bulk(kind, keys, vars(obj) if kind is OrderedDict else {}, tensors)
