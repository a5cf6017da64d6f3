"""Converts any Python object to and from (bytes, tensors, RRefs). The bytes are a pickle, or for simple objects what
``plain_values`` makes. Only this package uses pickle.

Tensors anywhere inside an object, and large buffers of pickle protocol 5 (numpy arrays, Arrow columns), are lifted out
without a copy and travel out of band; a lane decides how. The remaining bytes are few.
"""

from __future__ import annotations

import inspect
import io
import marshal
import math
import pickle
import reprlib
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from operator import attrgetter
from types import FunctionType
from typing import Any, NamedTuple

import numpy
import torch

from raytorchrpc._compat.torch_internals import RREF_TYPE
from raytorchrpc.errors import RayTorchRpcError, SerializationError, shown
from raytorchrpc.process.threads import is_shortage
from raytorchrpc.tensors import distributed_tensors, plain_values
from raytorchrpc.tensors.dtypes import FREED, bytes_at, is_freed, span_of
from raytorchrpc.tensors.plain_values import LIFT_BUFFER_BYTES, Bulk, gathered

#: How deep the search for what cannot be pickled goes, and how many parts of one object it tries.
_MAX_DEPTH, _MAX_PARTS = 6, 1000


class Encoded(NamedTuple):
    """An encoded object.

    ``payload`` may be another buffer than bytes, if it arrived as a tensor.

    ``tensors`` are the caller's own, not copies: they must not change until the lane has taken them. The last
    ``buffers`` of them are numpy arrays, or protocol 5 buffers as flat uint8 CPU tensors.
    """

    payload: bytes
    tensors: Sequence[torch.Tensor]
    rrefs: Sequence[Any]
    buffers: int


nbytes_of = attrgetter("nbytes")


def body_bytes(body: Encoded) -> int:
    """Bytes that cross for this object: ``payload`` and the tensors' data."""
    size: int = sum(map(nbytes_of, body.tensors), len(body.payload))
    return size


#: The encoding of None.
NOTHING = Encoded(b"", (), (), 0)


class _Table(threading.local):
    """The tensors and RRefs of the object that is being decoded on this thread."""

    tensors: Sequence[torch.Tensor] = ()
    rrefs: Sequence[Any] = ()
    split = 0
    """Where the arrays and buffers begin among the tensors."""
    as_given = False
    """Whether they become part of the object as they are, without the order, class or attributes of those encoded."""


_table = _Table()


#: Shape and strides of a tensor that travels as it lies in memory, in which it is contiguous.
Layout = tuple[tuple[int, ...], tuple[int, ...]]


def overlaps(layout: Layout) -> bool:
    """Whether several elements share a place in memory, so that the tensor travels as a flat one."""
    shape, strides = layout
    return span_of(shape, strides) < math.prod(shape)


def memory_order(layout: Layout) -> list[int]:
    """The dimensions from the greatest to the smallest stride, as a tensor travels whose elements do not overlap."""
    return sorted(range(len(layout[1])), key=layout[1].__getitem__, reverse=True)


def _take_tensor(index: int, requires_grad: bool, layout: Layout | None = None) -> torch.Tensor:
    tensor = _table.tensors[index]
    if _table.as_given:
        return tensor
    if layout is not None:
        tensor = tensor.as_strided(*layout)
    return tensor.requires_grad_() if requires_grad and not tensor.requires_grad else tensor


def _take_as(index: int, requires_grad: bool, layout: Layout | None, kind: type[torch.Tensor]) -> torch.Tensor:
    tensor = _take_tensor(index, False, layout)
    if _table.as_given:
        return tensor
    if kind is torch.nn.Parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    tensor = tensor.as_subclass(kind)
    return tensor.requires_grad_() if requires_grad and not tensor.requires_grad else tensor


def _set_attributes(tensor: torch.Tensor, attributes: dict[str, Any]) -> None:
    if not _table.as_given:
        vars(tensor).update(attributes)


def _take_bulk(
    kind: type[Any], keys: tuple[str, ...] | None, state: dict[str, Any], start: int, count: int, are_arrays: bool
) -> Any:
    start += _table.split if are_arrays else 0
    tensors = _table.tensors[start : start + count]
    return Bulk(kind, keys, state, tensors, are_arrays).rebuilt(tensors)


def _take_rref(index: int) -> Any:
    return _table.rrefs[index]


class Codec:
    """Encodes with ``pickler`` as the base class: ``pickle.Pickler``, or a cloudpickle that also pickles functions and
    classes by value. Its attribute ``refusals``, if it has one, is a dict by type of functions that raise
    SerializationError for an object which may not travel. Thread-safe.
    """

    def __init__(self, pickler: type[Any] = pickle.Pickler) -> None:
        self._pickler = _lifting(pickler)

    def encode(self, obj: object, *, keep_graph: bool = False, own: bool = False) -> Encoded:
        """Encode ``obj``.

        ``own``: lift the tensor objects in ``obj`` themselves if possible, not new tensors over the same memory.
        ``keep_graph``: lift tensors with their autograd history, so that distributed autograd records the hop;
        otherwise they arrive as leaves with the same ``requires_grad``. Raises MemoryError or SerializationError, which
        names the type that could not be pickled.
        """
        if obj is None:  # as most methods return
            return NOTHING
        try:
            if not keep_graph and (plain := plain_values.encoded(obj, own)) is not None:
                return Encoded(*plain, (), 0)
            file = io.BytesIO()
            buffers: list[torch.Tensor] = []
            pickler = self._pickler(file, protocol=5, buffer_callback=_buffer_lifter(buffers))
            pickler.tensors, pickler.rrefs, pickler.keep_graph, pickler.own = [], [], keep_graph, own
            pickler.layouts, pickler.arrays = {}, []
            simple = None if keep_graph else gathered(obj)
            pickler.dump(obj if simple is None else simple)
            _append_trailer(file, pickler.layouts, len(pickler.arrays))
            buffers = pickler.arrays + buffers
        except RayTorchRpcError:
            raise
        except BaseException as error:
            if _is_interrupt(error) or isinstance(error, MemoryError):
                raise
            raise (MemoryError if is_shortage(error) else SerializationError)(shown(error)) from error
        return Encoded(file.getvalue(), pickler.tensors + buffers, pickler.rrefs, len(buffers))

    def decode(
        self,
        payload: bytes,
        tensors: Sequence[torch.Tensor] = (),
        rrefs: Sequence[Any] = (),
        buffers: int = 0,
        *,
        as_given: bool = False,
    ) -> Any:
        """Decode an object, with the given tensors in it, without a copy.

        ``as_given``: the object contains these tensor objects themselves; see ``layouts``. Raises what the object's own
        code raises, but SerializationError in place of an exception that would end this process.
        """
        if not payload:
            return None
        if payload[0] != plain_values.PICKLE:
            return plain_values.decoded(payload, tensors)
        split = len(tensors) - buffers
        outer = _table.tensors, _table.rrefs, _table.split, _table.as_given
        _table.tensors, _table.rrefs, _table.split, _table.as_given = tensors, rrefs, split, as_given
        try:
            raw = tensors[split + _trailer(payload)[1] :] if buffers else ()
            return pickle.loads(payload, buffers=[tensor.numpy().data for tensor in raw])
        except BaseException as error:
            if isinstance(error, Exception) or _is_interrupt(error):
                raise
            raise SerializationError(f"its own code asked this process to exit: {shown(error)}") from error
        finally:
            _table.tensors, _table.rrefs, _table.split, _table.as_given = outer

    def explain_argument(self, label: str, args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception) -> str:
        """The message for arguments of the call ``label`` that ``error`` kept from being pickled."""
        for place, value in _named_arguments(args, kwargs):
            if not self._can_encode(value):
                return self.explain(f"{place} of {label}", value, error)
        return f"an argument of {label} cannot be pickled: {error}"

    def explain(self, subject: str, value: Any, error: Exception) -> str:
        """The message for a ``value`` that ``error`` kept from being pickled; ``subject`` names it.

        Pickles parts of the value again, to find the one that fails.
        """
        path, part = "", value
        with suppress(Exception):  # the code of the user's own containers and keys
            for _ in range(_MAX_DEPTH):
                failing = next(((step, each) for step, each in _parts(part) if not self._can_encode(each)), None)
                if failing is None:
                    break
                path, part = path + failing[0], failing[1]
        where = f", because of its {path.lstrip(' .')} ({_type(part)})" if path else ""
        return f"{subject} ({_type(value)}) cannot be pickled{where}: {error}"

    def _can_encode(self, value: Any) -> bool:
        try:
            self.encode(value)
        except (RayTorchRpcError, MemoryError):
            return False
        return True


#: Size of what follows a pickle, where pickle ignores it: the layouts of its tensors, and how many arrays precede its
#: buffers.
_SIZE = struct.Struct("<I")


def _append_trailer(file: io.BytesIO, layouts: dict[int, Layout], arrays: int) -> None:
    blob = marshal.dumps((layouts, arrays)) if layouts or arrays else b""
    file.write(blob + _SIZE.pack(len(blob)))


def _trailer(payload: bytes) -> tuple[dict[int, Layout], int]:
    end = len(payload) - _SIZE.size
    (size,) = _SIZE.unpack_from(payload, end)
    return marshal.loads(payload[end - size : end]) if size else ({}, 0)


def layouts(encoded: Encoded) -> dict[int, Layout]:
    """Return by index in ``encoded.tensors`` the layout of each tensor that travels with another shape. Decodes nothing
    of the object.
    """
    payload = encoded.payload
    return {} if not payload or plain_values.is_plain(payload) else _trailer(payload)[0]


def _is_interrupt(error: BaseException) -> bool:
    """Whether the exception may be a Ctrl-C, which reaches the main thread at any point."""
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def _lifting(base: type[Any]) -> type[Any]:
    """Make a pickler class that replaces tensors and RRefs by their index, and leaves the rest to ``base``."""
    inherited = getattr(base, "reducer_override", None)
    refusal_of = getattr(base, "refusals", {}).get

    class LiftingPickler(base):  # type: ignore[misc]
        tensors: list[torch.Tensor]
        rrefs: list[Any]
        arrays: list[torch.Tensor]
        layouts: dict[int, Layout]
        keep_graph: bool
        own: bool

        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, torch.Tensor):
                return _lift(self, obj)
            if type(obj) is Bulk:
                lifted = self.arrays if obj.are_arrays else self.tensors
                start = len(lifted)
                lifted += obj.tensors if self.own or obj.are_arrays else map(torch.Tensor.detach, obj.tensors)
                return _take_bulk, (obj.kind, obj.keys, obj.state, start, len(obj.tensors), obj.are_arrays)
            if type(obj) is numpy.ndarray:
                if obj.nbytes >= LIFT_BUFFER_BYTES and not _is_one_buffer(obj):
                    return obj.copy().__reduce_ex__(5)  # numpy would copy it into the pickle
                if not obj.flags.writeable:
                    reduced: Any = obj.__reduce_ex__(5)
                    rebuild, (buffer, *rest), *_ = reduced
                    if type(buffer) is pickle.PickleBuffer:  # pickle would restore it read-only
                        return rebuild, (pickle.PickleBuffer(_window(buffer.raw())), *rest)
            if (refuse := refusal_of(type(obj))) is not None:
                refuse(obj)
            if isinstance(obj, RREF_TYPE):
                self.rrefs.append(obj)
                return _take_rref, (len(self.rrefs) - 1,)
            return NotImplemented if inherited is None else inherited(self, obj)

    return LiftingPickler


def _lift(pickler: Any, tensor: torch.Tensor) -> Any:
    """Reduce a tensor to its index; NotImplemented leaves it to the base class."""
    kind, attributes = type(tensor), vars(tensor)
    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        if not _is_plain(kind):
            parts = distributed_tensors.reduced(tensor, pickler.keep_graph)
            # Its own __reduce__ leads back here for its parts.
            return NotImplemented if parts is None else with_attributes(*parts)
        tensor = tensor.as_subclass(torch.Tensor)
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_nested:
        return NotImplemented  # likewise: sparse and nested tensors reduce to dense parts
    if is_freed(tensor):
        raise SerializationError(f"a tensor of shape {tuple(tensor.shape)} {FREED}")
    requires_grad = tensor.requires_grad
    layout: Layout | None = None
    if requires_grad and pickler.keep_graph:
        kind = torch.Tensor if kind is torch.nn.Parameter else kind  # a new Parameter would cut the graph
    else:
        if requires_grad or not pickler.own:
            tensor = tensor.detach()
        if not tensor.is_contiguous():
            tensor, layout = _as_it_lies(tensor)
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    pickler.tensors.append(tensor)
    if layout is not None:
        pickler.layouts[len(pickler.tensors) - 1] = layout
    take: Any = _take_tensor
    args: tuple[Any, ...] = (len(pickler.tensors) - 1, requires_grad)
    if kind is not torch.Tensor:
        take, args = _take_as, (*args, layout, kind)
    elif layout is not None:
        args = (*args, layout)
    return with_attributes(take, args, attributes)


def with_attributes(take: Any, args: tuple[Any, ...], attributes: dict[str, Any]) -> tuple[Any, ...]:
    """The reduction of a tensor that ``take(*args)`` rebuilds, without these attributes."""
    return (take, args, dict(attributes), None, None, _set_attributes) if attributes else (take, args)


def _is_plain(kind: type[torch.Tensor]) -> bool:
    """Whether a tensor subclass has ordinary memory and leaves pickling to torch."""
    return (
        kind.__reduce_ex__ is torch.Tensor.__reduce_ex__ and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    )


def _as_it_lies(tensor: torch.Tensor) -> tuple[torch.Tensor, Layout | None]:
    """Return a contiguous view of the memory of a tensor, and the layout that leads back; the tensor itself if neither
    another order of its dimensions makes it contiguous nor its elements overlap.

    A transposed or channels_last tensor is then copied in one piece. An expanded one travels as the few bytes that it
    has. Both arrive with their original strides.
    """
    layout = tuple(tensor.shape), tensor.stride()
    # Detached, so that no view holds the tensor.
    if overlaps(layout):
        return tensor.as_strided((span_of(*layout),), (1,)).detach(), layout
    view = tensor.permute(memory_order(layout)).detach()
    return (view, layout) if view.is_contiguous() else (tensor, None)


def _is_one_buffer(array: numpy.ndarray) -> bool:
    """Whether numpy can export it without a copy, or not at all because it holds objects."""
    return bool(array.flags.c_contiguous or array.flags.f_contiguous or array.dtype.hasobject)


def _buffer_lifter(into: list[torch.Tensor]) -> Any:
    def lift(buffer: pickle.PickleBuffer) -> bool:
        try:
            raw = buffer.raw()
        except BufferError:  # neither C nor Fortran order: the pickle copies it
            return True
        if raw.nbytes < LIFT_BUFFER_BYTES:
            return True
        into.append(as_tensor(raw))
        return False

    return lift


def as_tensor(raw: memoryview) -> torch.Tensor:
    """Return a uint8 view of the buffer, which the tensor keeps alive."""
    if not raw.readonly:
        return torch.frombuffer(raw, dtype=torch.uint8)
    return torch.frombuffer(_window(raw), dtype=torch.uint8)  # torch warns about read-only buffers


def _window(raw: memoryview) -> Any:
    """A buffer over this read-only one that says it is writable, and keeps it alive. Lanes only read what they send."""
    array = numpy.frombuffer(raw, dtype=numpy.uint8)
    return bytes_at(array.ctypes.data, raw.nbytes, array)


# --- what cannot be pickled -------------------------------------------------------------------------


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """The elements of a container or the attributes of an object, each with the text that selects it."""
    if isinstance(value, (list, tuple)):
        return ((f"[{index}]", each) for index, each in enumerate(value[:_MAX_PARTS]))
    if isinstance(value, dict):
        return ((f"[{reprlib.repr(key)}]", each) for key, each in islice(value.items(), _MAX_PARTS))
    if isinstance(value, FunctionType):
        used = inspect.getclosurevars(value)
        return ((f" variable {name!r}", each) for name, each in {**used.globals, **used.nonlocals}.items())
    own: Any = type(value).__reduce__  # whose error says more than a part would
    attributes = {} if isinstance(value, type) or own is not object.__reduce__ else getattr(value, "__dict__", {})
    return ((f".{name}", each) for name, each in islice(attributes.items(), _MAX_PARTS))


def _type(value: Any) -> str:
    cls = type(value)
    return cls.__qualname__ if cls.__module__ in ("builtins", "__main__") else f"{cls.__module__}.{cls.__qualname__}"


def _named_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each argument with what errors call it."""
    yield from ((f"the {_ordinal(number)} argument", value) for number, value in enumerate(args, 1))
    yield from ((f"argument {name!r}", value) for name, value in kwargs.items())


def _ordinal(number: int) -> str:
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
