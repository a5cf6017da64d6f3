"""Any Python object to and from (pickle bytes, tensors, RRefs). Nothing else knows about pickling.

Tensors anywhere inside an object, and large buffers that follow pickle protocol 5 (numpy arrays, Arrow
columns), are lifted out and travel beside the bytes, uncopied; a lane decides how. What stays is small.
"""

from __future__ import annotations

import ctypes
import io
import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy
import torch

from raytorchrpc._compat.torch_internals import RREF_TYPE
from raytorchrpc.errors import RayTorchRpcError, SerializationError, shown
from raytorchrpc.tensors.containers import Bulk, gathered

#: Buffers below this stay in the pickle: lifting one costs more than copying it (bytes).
LIFT_BUFFER_BYTES = 16 * 1024


class Encoded(NamedTuple):
    """One object taken apart.

    ``tensors`` are the caller's own (no copy): they must not change until the lane has taken them. The
    last ``buffers`` of them stand for protocol 5 buffers as flat uint8 CPU tensors.
    """

    payload: bytes
    tensors: Sequence[torch.Tensor]
    rrefs: Sequence[Any]
    buffers: int


#: None, taken apart.
NOTHING = Encoded(b"", (), (), 0)


class _Table(threading.local):
    """What the object being decoded on this thread may take its tensors and RRefs from."""

    tensors: Sequence[torch.Tensor] = ()
    rrefs: Sequence[Any] = ()


_table = _Table()


def _take_tensor(index: int, requires_grad: bool, order: tuple[int, ...] | None = None) -> torch.Tensor:
    tensor = _table.tensors[index]
    if order is not None:
        tensor = tensor.permute(order)
    return tensor.requires_grad_() if requires_grad and not tensor.requires_grad else tensor


def _take_as(index: int, requires_grad: bool, order: tuple[int, ...] | None, kind: type[torch.Tensor]) -> torch.Tensor:
    tensor = _take_tensor(index, False, order)
    if kind is torch.nn.Parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    tensor = tensor.as_subclass(kind)
    return tensor.requires_grad_() if requires_grad and not tensor.requires_grad else tensor


def _set_attributes(tensor: torch.Tensor, attributes: dict[str, Any]) -> None:
    vars(tensor).update(attributes)


def _take_bulk(kind: type[Any], keys: tuple[str, ...] | None, state: dict[str, Any], start: int, count: int) -> Any:
    tensors = _table.tensors[start : start + count]
    return Bulk(kind, keys, state, tensors).filled(tensors)


def _take_rref(index: int) -> Any:
    return _table.rrefs[index]


class Codec:
    """Encodes with ``pickler`` as the base class: ``pickle.Pickler``, or a cloudpickle that also knows
    functions and classes by value. Safe to share between threads.
    """

    def __init__(self, pickler: type[Any] = pickle.Pickler) -> None:
        self._pickler = _lifting(pickler)

    def encode(self, obj: object, *, keep_graph: bool = False, own: bool = False) -> Encoded:
        """Take ``obj`` apart.

        ``own`` lifts the very tensors of ``obj`` where it can, not tensors of its own over the same memory.

        ``keep_graph`` lifts tensors with their autograd history (distributed autograd records the hop);
        otherwise what arrives is a leaf with the same ``requires_grad``.
        Raises SerializationError, naming the type that could not be pickled.
        """
        if obj is None:  # what most methods return
            return NOTHING
        file = io.BytesIO()
        buffers: list[torch.Tensor] = []
        pickler = self._pickler(file, protocol=5, buffer_callback=_buffer_lifter(buffers))
        pickler.tensors, pickler.rrefs, pickler.keep_graph, pickler.own = [], [], keep_graph, own
        simple = None if keep_graph else gathered(obj)
        try:
            pickler.dump(obj if simple is None else simple)
        except RayTorchRpcError:
            raise
        except BaseException as error:
            if _is_interrupt(error):
                raise
            raise SerializationError(shown(error)) from error
        return Encoded(file.getvalue(), pickler.tensors + buffers, pickler.rrefs, len(buffers))

    def decode(
        self,
        payload: bytes,
        tensors: Sequence[torch.Tensor] = (),
        rrefs: Sequence[Any] = (),
        buffers: int = 0,
        load: Callable[..., Any] = pickle.loads,
    ) -> Any:
        """Put an object together again; it takes the given tensors as they are, without a copy.

        ``load``: see ``placed``. Raises what the object's own code raises, and SerializationError in place of what
        would end this process.
        """
        if not payload:
            return None
        split = len(tensors) - buffers
        outer = _table.tensors, _table.rrefs
        _table.tensors, _table.rrefs = tensors, rrefs
        try:
            return load(payload, buffers=[tensor.numpy().data for tensor in tensors[split:]])
        except BaseException as error:
            if isinstance(error, Exception) or _is_interrupt(error):
                raise
            raise SerializationError(f"its own code asked this process to exit: {shown(error)}") from error
        finally:
            _table.tensors, _table.rrefs = outer


def _is_interrupt(error: BaseException) -> bool:
    """Whether it may be meant for this process: Ctrl-C reaches the main thread, in the middle of anything."""
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def _lifting(base: type[Any]) -> type[Any]:
    """A pickler class that reduces tensors and RRefs to their place in a table, and leaves the rest to ``base``."""
    inherited = getattr(base, "reducer_override", None)

    class LiftingPickler(base):  # type: ignore[misc]
        tensors: list[torch.Tensor]
        rrefs: list[Any]
        keep_graph: bool
        own: bool

        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, torch.Tensor):
                return self.lift(obj)
            if type(obj) is Bulk:
                start = len(self.tensors)
                self.tensors += obj.tensors if self.own else map(torch.Tensor.detach, obj.tensors)
                return _take_bulk, (obj.kind, obj.keys, obj.state, start, len(obj.tensors))
            if type(obj) is numpy.ndarray and obj.nbytes >= LIFT_BUFFER_BYTES and not _is_one_buffer(obj):
                return obj.copy().__reduce_ex__(5)  # numpy would copy it too, but into the pickle
            if isinstance(obj, RREF_TYPE):
                self.rrefs.append(obj)
                return _take_rref, (len(self.rrefs) - 1,)
            return NotImplemented if inherited is None else inherited(self, obj)

        def lift(self, tensor: torch.Tensor) -> Any:
            kind, attributes = type(tensor), vars(tensor)
            if kind is not torch.Tensor and kind is not torch.nn.Parameter:
                if not _is_plain(kind):
                    return NotImplemented  # its own __reduce__ leads back here for its parts
                tensor = tensor.as_subclass(torch.Tensor)
            if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_nested:
                return NotImplemented  # likewise: sparse and nested tensors reduce to dense parts
            requires_grad, order = tensor.requires_grad, None
            if requires_grad and self.keep_graph:
                kind = torch.Tensor if kind is torch.nn.Parameter else kind  # made anew, it would cut the graph
            else:
                if requires_grad or not self.own:
                    tensor = tensor.detach()
                if not tensor.is_contiguous():
                    tensor, order = _in_memory_order(tensor)
            if tensor.is_conj() or tensor.is_neg():
                tensor = tensor.resolve_conj().resolve_neg()
            if not tensor.data_ptr() and tensor.numel():  # reading it would end the process
                raise SerializationError(
                    f"a tensor of shape {tuple(tensor.shape)} has no memory: its storage was freed"
                )
            self.tensors.append(tensor)
            take: Any = _take_tensor
            args: tuple[Any, ...] = (len(self.tensors) - 1, requires_grad)
            if kind is not torch.Tensor:
                take, args = _take_as, (*args, order, kind)
            elif order is not None:
                args = (*args, order)
            return (take, args, dict(attributes), None, None, _set_attributes) if attributes else (take, args)

    return LiftingPickler


def _is_plain(kind: type[torch.Tensor]) -> bool:
    """Whether a subclass is a tensor with memory of its own, as any other, that leaves pickling to torch."""
    return (
        kind.__reduce_ex__ is torch.Tensor.__reduce_ex__ and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    )


def _in_memory_order(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...] | None]:
    """A view with its dimensions as they lie in memory, and the order that leads back, if that makes it contiguous.

    So a transposed or channels_last tensor is copied in one piece, and arrives with the strides it had.
    """
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    view = tensor.permute(order).detach()  # a view of its own, not one that holds the tensor
    if not view.is_contiguous():
        return tensor, None
    back = [0] * len(order)
    for place, dimension in enumerate(order):
        back[dimension] = place
    return view, tuple(back)


def _is_one_buffer(array: numpy.ndarray) -> bool:
    """Whether numpy gives it away as it lies: contiguous, in one order or the other; or cannot, for objects in it."""
    return bool(array.flags.c_contiguous or array.flags.f_contiguous or array.dtype.hasobject)


def _buffer_lifter(into: list[torch.Tensor]) -> Any:
    def lift(buffer: pickle.PickleBuffer) -> bool:
        try:
            raw = buffer.raw()
        except BufferError:  # neither C nor Fortran order: the pickle copies it
            return True
        if raw.nbytes < LIFT_BUFFER_BYTES:
            return True
        into.append(_as_tensor(raw))
        return False

    return lift


def _as_tensor(raw: memoryview) -> torch.Tensor:
    """A uint8 view of the buffer, kept alive by the tensor."""
    if not raw.readonly:
        return torch.frombuffer(raw, dtype=torch.uint8)
    # Arrays from Ray's object store are read-only, and torch warns at each of them. Lanes only read what
    # they send, so hand torch the address; the array stays alive through the attribute.
    array = numpy.frombuffer(raw, dtype=numpy.uint8)
    window = (ctypes.c_ubyte * raw.nbytes).from_address(array.ctypes.data)
    window._keep_alive = array  # type: ignore[attr-defined]
    return torch.frombuffer(window, dtype=torch.uint8)


# --- an object with other tensors in it ------------------------------------------------------------------


class _Anything(type):
    """Stands for whatever an object is made of, while only its tensors are of interest. No user's code runs."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls

    def __setitem__(cls, key: Any, value: Any) -> None: ...
    def __setstate__(cls, state: Any) -> None: ...
    def append(cls, value: Any) -> None: ...
    def extend(cls, values: Any) -> None: ...
    def add(cls, value: Any) -> None: ...


class _Thing(metaclass=_Anything):
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls


class _Outline(pickle.Unpickler):
    """Makes nothing, and notes in which order each tensor's dimensions are to be put."""

    def __init__(self, encoded: Encoded) -> None:
        super().__init__(io.BytesIO(encoded.payload), buffers=[bytearray()] * encoded.buffers)
        self.orders: dict[int, tuple[int, ...]] = {}

    def find_class(self, module: str, name: str, /) -> Any:
        return self._note if (module, name) in _TAKING else _Thing

    def _note(self, index: int, requires_grad: bool, order: tuple[int, ...] | None = None, *rest: Any) -> Any:
        if order is not None:
            self.orders[index] = order
        return _Thing


_TAKING = {(function.__module__, function.__name__) for function in (_take_tensor, _take_as)}


def orders(encoded: Encoded) -> dict[int, tuple[int, ...]]:
    """By place in ``encoded.tensors``, how the dimensions of a tensor have to be permuted to be as they were; without
    those that are so already. Makes no object, and runs none of its code.
    """
    outline = _Outline(encoded)
    if encoded.payload:
        outline.load()
    return outline.orders


class _Placing(pickle.Unpickler):
    """Puts given tensors into an object as they are, instead of what was made of those that were lifted."""

    def find_class(self, module: str, name: str, /) -> Any:
        return _PLACING.get((module, name)) or super().find_class(module, name)


def _place(index: int, *rest: Any) -> torch.Tensor:
    return _table.tensors[index]


def _no_attributes(tensor: torch.Tensor, attributes: dict[str, Any]) -> None:
    """They stay what they are."""


_PLACING: dict[tuple[str, str], Any] = {
    **dict.fromkeys(_TAKING, _place),
    (_set_attributes.__module__, _set_attributes.__name__): _no_attributes,
}


def placed(payload: bytes, *, buffers: Sequence[Any]) -> Any:
    """For ``Codec.decode(load=...)``: the tensors it is given are in the object that it returns, these very ones."""
    return _Placing(io.BytesIO(payload), buffers=buffers).load()
