"""Encodes simple values without a pickler, or with as little of it as possible.

Numbers, text, small tuples and lists of them, and ordinary tensors, alone or as the elements of one tuple, list or
dict, need no pickler: to start one takes longer than all the rest of the encoding of a small call. A list or dict of
many ordinary tensors is taken apart as a whole, by loops that run in C: a pickler calls back for every tensor, for 2
microseconds each.
"""

from __future__ import annotations

import marshal
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy
import torch

from raytorchrpc.tensors.dtypes import may_be_freed

#: Smaller buffers stay in the pickle: lifting one costs more than copying it (bytes).
LIFT_BUFFER_BYTES = 16 * 1024
#: Containers from this size on are taken apart as a whole; smaller ones may need no pickler.
MANY = 8
#: Types that marshal restores exactly.
_NUMBERS = frozenset({int, float, complex, bool, type(None)})
_TEXTS = frozenset({str, bytes})
#: Longer text is left to the pickler: marshal copies it several times, and refuses 2 GiB and more.
MOST_TEXT = 16 * 1024
#: How a pickle of protocol 2 or later begins; marshal never begins so.
PICKLE = 0x80
#: What was encoded.
_VALUE, _CALL, _TUPLE, _LIST, _DICT = range(5)


def encoded(obj: Any, own: bool) -> tuple[bytes, Sequence[torch.Tensor]] | None:
    """Return ``obj`` as bytes and tensors; None if it needs a pickler. ``own``: see ``Codec.encode``."""
    kind = type(obj)
    tensors: list[torch.Tensor] = []
    names: tuple[str, ...] = ()
    if kind is tuple and len(obj) == 2 and type(obj[0]) is tuple and type(obj[1]) is dict:
        shape, (values, named) = _CALL, obj
        if named:
            names, values = tuple(named), (*values, *named.values())
    elif kind is tuple or kind is list:
        shape, values = _TUPLE if kind is tuple else _LIST, obj
    elif kind is dict:
        shape, names, values = _DICT, tuple(obj), obj.values()
    else:
        shape, values = _VALUE, (obj,)
    if len(values) >= (2 * MANY if shape == _CALL else MANY) or set(map(type, names)) - {str}:
        return None
    simple = _without_tensors(values, tensors)
    if simple is None:
        return None
    if not own:
        tensors = list(map(_detach, tensors))
    return marshal.dumps((shape, names, simple)), tensors


def _without_tensors(values: Iterable[Any], tensors: list[torch.Tensor]) -> list[Any] | None:
    """Return the values with ``...`` in place of each tensor, which is added to ``tensors``."""
    simple: list[Any] = []
    for value in values:
        if _is_simple(value, _DEPTH):
            simple.append(value)
        elif is_ordinary(value) and not (tensors and any(value is other for other in tensors)):
            tensors.append(value)
            simple.append(...)
        else:
            return None
    return simple


def _is_simple(value: Any, depth: int) -> bool:
    """Whether marshal restores it exactly, and without much copying."""
    kind = type(value)
    if kind in _NUMBERS:
        return True
    if kind in _TEXTS:
        return len(value) <= MOST_TEXT
    if kind not in (tuple, list) or not depth or len(value) >= MANY:
        return False
    return all(_is_simple(each, depth - 1) for each in value)


def is_plain(payload: bytes) -> bool:
    """Whether ``encoded`` made this payload, and not a pickler."""
    return payload[0] != PICKLE


def decoded(payload: bytes, tensors: Sequence[torch.Tensor]) -> Any:
    """Reverse ``encoded``. The object contains the given tensors themselves."""
    shape, names, values = marshal.loads(payload)
    if tensors:
        following = iter(tensors)
        values = [*tensors] if len(tensors) == len(values) else [next(following) if v is ... else v for v in values]
    if shape == _CALL:
        count = len(values) - len(names)
        return tuple(values[:count]), dict(zip(names, values[count:], strict=True))
    if shape == _VALUE:
        return values[0]
    if shape == _DICT:
        return dict(zip(names, values, strict=True))
    return tuple(values) if shape == _TUPLE else values


# --- containers of many tensors ------------------------------------------------------------------------------------

#: Greatest depth of nested containers.
_DEPTH = 3

_ATOMS = frozenset({int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device})
_TENSOR, _STRIDED = torch.Tensor, torch.strided  # to look these up takes longer than to compare them
_detach = torch.Tensor.detach
_dtype, _layout, _is_cpu, _is_cuda = (attrgetter(name) for name in ("dtype", "layout", "is_cpu", "is_cuda"))
_requires_grad, _is_nested = attrgetter("requires_grad"), attrgetter("is_nested")
_nbytes, _flags = attrgetter("nbytes"), attrgetter("flags")
#: Excludes quantized dtypes, and complex ones, which can be conjugated views.
_PLAIN_DTYPES = frozenset(
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not dtype.is_complex and not str(dtype).startswith(("torch.q", "torch.bits"))
)
#: Those of arrays that torch can view.
_ARRAY_DTYPES = frozenset(map(numpy.dtype, ("?", "B", "b", "h", "i", "q", "e", "f", "d", "F", "D")))


class Bulk(NamedTuple):
    """Takes the place of a container of tensors, or of large numpy arrays."""

    kind: type[Any]
    keys: tuple[str, ...] | None
    """The keys of a dict."""
    state: dict[str, Any]
    """Attributes of the container, as a module's state dict has."""
    tensors: Sequence[torch.Tensor]
    are_arrays: bool = False
    """The tensors are views of what the container holds."""

    def rebuilt(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Build the container with other tensors."""
        values: Iterable[Any] = map(torch.Tensor.numpy, tensors) if self.are_arrays else tensors
        made = self.kind(values if self.keys is None else zip(self.keys, values, strict=True))
        if self.state:
            vars(made).update(self.state)
        return made


def gathered(obj: Any) -> Any | None:
    """Return ``obj`` with a ``Bulk`` in place of each container of many tensors or arrays. None if there is none, or if
    any object may occur twice, because a pickler preserves identity.
    """
    seen: list[int] = []
    bulks: list[Bulk] = []
    try:
        gone_over = _gather(obj, _DEPTH, seen, bulks)
    except _NotSimple:
        return None
    return gone_over if bulks and len(set(seen)) == len(seen) else None


class _NotSimple(Exception):
    pass


def _gather(obj: Any, depth: int, seen: list[int], bulks: list[Bulk]) -> Any:
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
        members = list(values)
        bulk = _bulk(obj, kind, members)
        seen += map(id, members)
        bulks.append(bulk)
        return bulk
    below = [_gather(value, depth - 1, seen, bulks) for value in values]
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
        type(obj) is _TENSOR
        and obj.layout is _STRIDED
        and obj.dtype in _PLAIN_DTYPES
        and (obj.is_cpu or obj.is_cuda)
        and not obj.requires_grad
        and not obj.is_nested
        and not obj.is_neg()
        and obj.is_contiguous()
        and not obj.__dict__
        and obj.untyped_storage().nbytes() >= obj.storage_offset() * obj.itemsize + obj.nbytes  # else it was freed
    )


def _bulk(obj: Any, kind: type[Any], members: list[Any]) -> Bulk:
    kinds = set(map(type, members))
    if kinds == {torch.Tensor}:
        _check_tensors(members)
    elif kinds == {numpy.ndarray}:
        _check_arrays(members)
    else:
        raise _NotSimple
    keys = tuple(obj) if kind in (dict, OrderedDict) else None
    if keys is not None and set(map(type, keys)) != {str}:
        raise _NotSimple
    are_arrays = numpy.ndarray in kinds
    tensors = list(map(torch.from_numpy, members)) if are_arrays else members
    return Bulk(kind, keys, vars(obj) if kind is OrderedDict else {}, tensors, are_arrays)


def _check_tensors(tensors: list[torch.Tensor]) -> None:
    if set(map(_layout, tensors)) != {torch.strided} or set(map(_dtype, tensors)) - _PLAIN_DTYPES:
        raise _NotSimple
    if not all(map(_is_cuda if tensors[0].is_cuda else _is_cpu, tensors)):
        raise _NotSimple
    if any(map(_requires_grad, tensors)) or any(map(_is_nested, tensors)) or any(map(torch.Tensor.is_neg, tensors)):
        raise _NotSimple
    if not all(map(torch.Tensor.is_contiguous, tensors)) or any(map(vars, tensors)):
        raise _NotSimple
    if may_be_freed(tensors):  # which the pickler refuses
        raise _NotSimple


def _check_arrays(arrays: list[numpy.ndarray]) -> None:
    if set(map(_dtype, arrays)) - _ARRAY_DTYPES or min(map(_nbytes, arrays)) < LIFT_BUFFER_BYTES:
        raise _NotSimple
    if not all(flags.c_contiguous and flags.writeable for flags in map(_flags, arrays)):
        raise _NotSimple
