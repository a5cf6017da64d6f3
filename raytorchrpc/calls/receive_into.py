"""Receivers: results that arrive in existing tensors, for ``into=`` and for a model's weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from raytorchrpc._compat import torch_internals
from raytorchrpc.calls.payload import PendingTensors, joined, kinds, owned, read_into
from raytorchrpc.errors import ConfigurationError, RayTorchRpcError
from raytorchrpc.lanes.base import Arrived, Copies
from raytorchrpc.tensors.codec import Codec, Encoded, Layout, body_bytes, layouts, memory_order, overlaps
from raytorchrpc.tensors.dtypes import FREED, Shape, as_copyable, dense_obstacle, is_freed, unrecorded, written

_TENSORS = (torch.Tensor, torch.nn.Parameter)


class Receiver(ABC):
    """Receives the result of one call. Used at most once."""

    #: Set by the call, for what crosses after ``receive``: counts bytes, and says what an error means by then.
    count: Callable[[int], object]
    error_of: Callable[[RayTorchRpcError], RayTorchRpcError]

    @abstractmethod
    def receive(
        self, codec: Codec, body: Encoded, pending: list[PendingTensors], label: str, keep: bool
    ) -> tuple[int, Any]:
        """The bytes that crossed, and the result. Blocks while tensors are read.

        ``pending``: the out-of-band tensors, which this takes out of the list: an error holds the frames that it
        passes, which must not hold the sender's memory. ``label``: of the call, for errors. ``keep``: copy each array
        of the result into memory of its own.
        """


def _read(body: Encoded, pending: Sequence[PendingTensors], copies: Copies) -> Arrived:
    """See ``read_into``. Autograd learns what the lanes write."""
    with written(copies.filled):
        return read_into(body, pending, copies)


class Window(Receiver):
    """Receives the flat tensors in a result: copied in parts into existing tensors, at once or later, or as they are.

    The result that the caller gets has empty tensors in their places. What is neither copied nor viewed is released
    with this object.
    """

    result: Any = None
    """What the caller gets, once it is received."""

    def __init__(self, plan: Callable[[Any], Copies | None] | None = None) -> None:
        """``plan(result)`` returns the copies that are wanted at once, or None for none; the caller of the call gets
        what it raises. Without a plan nothing is copied at once.
        """
        self._plan = plan
        self._pending: list[PendingTensors] = []
        self._body: Encoded | None = None

    def receive(
        self, codec: Codec, body: Encoded, pending: list[PendingTensors], label: str, keep: bool
    ) -> tuple[int, Any]:
        try:
            places: list[torch.Tensor] = [_EMPTY] * len(kinds(body, pending))
            self.result = codec.decode(*body._replace(tensors=places), as_given=True)
            self._pending, self._body = [*pending], body
        finally:
            pending.clear()
        size = len(body.payload)
        if self._plan is not None:
            try:
                if (copies := self._plan(self.result)) is not None:
                    size += self._make(copies)
            finally:
                self._drop()  # what is not wanted is released
        return size, self.result

    @property
    def has_tensors(self) -> bool:
        """Whether there is something to be copied or viewed."""
        return bool(self._pending or (self._body is not None and self._body.tensors))

    def prepare(self) -> None:
        """Have lanes prepare, beside this thread, for a copy that comes soon."""
        for tensors in self._pending:
            tensors.prepare()

    def make(self, copies: Copies) -> None:
        """Make copies out of the flat tensors; to be called once. Blocks."""
        with self._errors():
            size = self._make(copies)
        self.count(size)

    def take(self) -> Sequence[torch.Tensor]:
        """The flat tensors, as a call brings them; to be called once. Blocks."""
        pending, body = self._pending, self._body
        self._drop()
        if body is None:
            return ()
        with self._errors():
            body = joined(body, pending) if pending else owned(body)
        self.count(body_bytes(body) - len(body.payload))
        return body.tensors

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except RayTorchRpcError as error:
            if self.error_of(error) is error:
                raise
            raise self.error_of(error) from error

    def _make(self, copies: Copies) -> int:
        """Returns the bytes of all targets."""
        pending, body = self._pending, self._body
        self._drop()
        if body is not None:
            _read(body, pending, copies)
        return copies.nbytes

    def _drop(self) -> None:
        self._pending, self._body = [], None

    def view(self) -> tuple[Sequence[torch.Tensor] | None, bool]:
        """The flat tensors, and whether they are copies, which came in the message; else they are the sender's memory,
        read-only. None if that cannot be viewed. To be called once.
        """
        pending, body = self._pending, self._body
        self._drop()
        if not pending:
            return None if body is None else owned(body).tensors, True
        return (pending[0].view() if len(pending) == 1 and not (body and body.tensors) else None), False


_EMPTY = torch.empty(0, device="cpu")


class Buffers(Receiver):
    """The buffers that a caller gave for the tensors of one result. Filled at most once."""

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        """Raises ConfigurationError for a buffer that cannot be filled."""
        if not isinstance(given, (list, tuple)):
            raise ConfigurationError(f"into= is a list or a tuple of tensors, not a {type(given).__name__}")
        for place, buffer in enumerate(given):
            if (obstacle := obstacle_of(buffer)) is not None:
                raise ConfigurationError(f"buffer {place} of into= {obstacle}")
        self._given: list[torch.Tensor] = list(given)

    def receive(
        self, codec: Codec, body: Encoded, pending: list[PendingTensors], label: str, keep: bool
    ) -> tuple[int, Any]:
        """See Receiver. Raises ConfigurationError for a mismatch, before any buffer is changed."""
        try:
            lifted, by_place = kinds(body, pending), layouts(body)
            split = len(lifted) - body.buffers
            targets = self._targets(lifted[:split], by_place, label)
            tensors = _read(body, pending, Copies.whole([*targets, *[None] * body.buffers]))
        finally:
            pending.clear()
        for place, target in enumerate(targets):
            if target is None and (tensor := tensors[place]) is not None:
                with unrecorded([self._given[place]]):
                    as_copyable(self._given[place]).copy_(as_copyable(tensor.as_strided(*by_place[place])))
        arrays = [tensor for tensor in tensors[split:] if tensor is not None]
        if keep:
            arrays = [*owned(body._replace(tensors=arrays)).tensors]
        body = body._replace(tensors=[*self._given, *arrays])
        return body_bytes(body), codec.decode(*body, as_given=True)

    def _targets(
        self, lifted: Sequence[Shape], by_place: Mapping[int, Layout], label: str
    ) -> list[torch.Tensor | None]:
        """For each tensor as it travels, the buffer with its dimensions in that order; None if its elements overlap."""
        if len(lifted) != len(self._given):
            raise ConfigurationError(
                f"the result of {label} does not fit: it has {len(lifted)} tensors, and into= {len(self._given)}"
            )
        targets: list[torch.Tensor | None] = []
        for place, ((dtype, shape), buffer) in enumerate(zip(lifted, self._given, strict=True)):
            layout = by_place.get(place)
            wanted = shape if layout is None else layout[0]
            if buffer.dtype != dtype or buffer.shape != wanted:
                raise ConfigurationError(
                    f"the result of {label} does not fit: tensor {place} of it is {_shown(dtype, wanted)}, and buffer "
                    f"{place} of into= is {_shown(buffer.dtype, tuple(buffer.shape))}"
                )
            if is_freed(buffer):  # since the call
                raise ConfigurationError(f"buffer {place} of into= {FREED}")
            target = buffer.detach() if buffer.requires_grad else buffer
            if layout is None:
                targets.append(target)
            elif overlaps(layout):
                targets.append(None)
            else:
                targets.append(target.permute(memory_order(layout)))
        return targets


def receiver(into: Sequence[torch.Tensor] | Receiver) -> Receiver:
    """The receiver for ``into=``. Raises ConfigurationError for buffers that cannot receive a result."""
    if isinstance(into, Receiver):
        return into
    if torch_internals.current_autograd_context() != torch_internals.NO_CONTEXT:
        raise ConfigurationError(
            "into= cannot be used inside a distributed autograd context: a result there has a history, which a buffer "
            "cannot take; leave into= out and copy what arrives"
        )
    return Buffers(into)


def obstacle_of(buffer: Any) -> str | None:
    """Why nothing can be received into this; None if it can."""
    kind = type(buffer)
    if kind not in _TENSORS:
        if not isinstance(buffer, torch.Tensor):
            return f"is a {kind.__name__}, not a tensor"
        if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            inside = "its to_local()" if kind is torch_internals.dtensor_type() else "the tensor inside"
            return f"is a {kind.__name__}, which has no memory of its own; give {inside}"
    if (obstacle := dense_obstacle(buffer)) is not None:
        return obstacle
    if buffer.is_conj() or buffer.is_neg():
        return "is a conjugated or negated view; give what it is a view of"
    if not buffer.is_contiguous() and any(
        stride == 0 and extent > 1 for stride, extent in zip(buffer.stride(), buffer.shape, strict=True)
    ):
        return "is expanded: several of its elements share one place; clone() it"
    return FREED if is_freed(buffer) else None


def _shown(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {shape}"
