"""Receivers: results that arrive in existing tensors, for ``into=`` and for a model's weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.autograd.graph import increment_version

from raytorchrpc._compat import torch_internals
from raytorchrpc.calls.payload import PendingTensors, filled, kinds, owned, scatter_into
from raytorchrpc.errors import ConfigurationError
from raytorchrpc.lanes.base import Part, Parts
from raytorchrpc.tensors.codec import Codec, Encoded, body_bytes, orders
from raytorchrpc.tensors.dtypes import Shape, unrecorded

_NO_MEMORY = "has no memory: its storage was freed"
_TENSORS = (torch.Tensor, torch.nn.Parameter)


class Receiver(ABC):
    """Receives the result of one call. Used at most once."""

    @abstractmethod
    def receive(
        self, codec: Codec, body: Encoded, pending: list[PendingTensors], label: str, keep: bool
    ) -> tuple[int, Any]:
        """The bytes that crossed, and the result. Blocks while tensors are fetched.

        ``pending``: the out-of-band tensors. ``label``: of the call, for errors. ``keep``: copy each array of the
        result into memory of its own.
        """


class Spread(Receiver):
    """Receives parts of the flat tensors in a result, each into an existing tensor."""

    def __init__(self, plan: Callable[[Any], Sequence[Sequence[Part]] | None]) -> None:
        """``plan(result)`` returns the wanted parts of each flat tensor, or None for no part yet. The result that it
        gets has empty tensors in their places. The caller of the call gets what it raises.
        """
        self._plan = plan

    def receive(
        self, codec: Codec, body: Encoded, pending: list[PendingTensors], label: str, keep: bool
    ) -> tuple[int, Any]:
        """See Receiver."""
        try:
            value = _without_tensors(codec, body, pending)
            parts = self._plan(value)
            if parts is None:
                for tensors in pending:
                    tensors.prepare()
                pending.clear()
                return len(body.payload), value
            targets, size = _filled_by(parts)
            with unrecorded(targets):
                try:
                    for tensors in pending:  # at most one, which has them all
                        tensors.scatter_into(parts)
                    if not pending:
                        scatter_into(body.tensors, parts)
                finally:
                    increment_version(targets)  # autograd does not see what lanes write
        except BaseException:
            pending.clear()  # the error holds this frame, which must not hold the sender's memory
            raise
        return len(body.payload) + size, value


class Views(Receiver):
    """Receives the flat tensors in a result as views of the sender's memory, if it has lent that."""

    def __init__(self) -> None:
        self.tensors: Sequence[torch.Tensor] | None = None
        """None: they are in other memory of the sender's, and were not fetched."""
        self.are_copies = False
        """Whether they came in the message; else they are read-only."""

    def receive(
        self, codec: Codec, body: Encoded, pending: list[PendingTensors], label: str, keep: bool
    ) -> tuple[int, Any]:
        """See Receiver. The result that the caller gets has empty tensors in their places."""
        try:
            value = _without_tensors(codec, body, pending)
            if not pending:
                self.tensors, self.are_copies = owned(body).tensors, True
            elif len(pending) == 1 and not body.tensors:
                self.tensors = pending[0].view()
        finally:
            pending.clear()  # what is not viewed is discarded
        return len(body.payload), value


def _filled_by(parts: Sequence[Sequence[Part]]) -> tuple[list[torch.Tensor], int]:
    """The tensors that parts write to, and the bytes of all parts."""
    targets: list[torch.Tensor] = []
    size = 0
    for its in parts:
        if isinstance(its, Parts):
            targets += its.filled
            size += its.nbytes
        else:
            mine = [part.target for part in its]
            targets += mine
            size += sum(map(_nbytes, mine))
    return targets, size


_nbytes = attrgetter("nbytes")
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
            lifted = kinds(body, pending)
            split = len(lifted) - body.buffers
            targets = self._targets(lifted[:split], orders(body), label)
            with unrecorded(self._given):
                body = self._filled(body, pending, [*targets, *[None] * body.buffers])
        except BaseException:
            pending.clear()  # the error holds this frame, which must not hold the sender's memory
            raise
        arrays = body.tensors[split:]
        if keep:
            arrays = owned(body._replace(tensors=arrays)).tensors
        body = body._replace(tensors=[*self._given, *arrays])
        return body_bytes(body), codec.decode(*body, as_given=True)

    def _filled(
        self, body: Encoded, pending: Sequence[PendingTensors], targets: Sequence[torch.Tensor | None]
    ) -> Encoded:
        try:
            return filled(body, pending, targets)
        finally:
            increment_version(self._given)  # autograd does not see what lanes write

    def _targets(self, lifted: Sequence[Shape], turned: dict[int, tuple[int, ...]], label: str) -> list[torch.Tensor]:
        """For each tensor as it travels, the buffer with its dimensions in that order."""
        if len(lifted) != len(self._given):
            raise ConfigurationError(
                f"the result of {label} does not fit: it has {len(lifted)} tensors, and into= {len(self._given)}"
            )
        targets: list[torch.Tensor] = []
        for place, ((dtype, shape), buffer) in enumerate(zip(lifted, self._given, strict=True)):
            order = turned.get(place)
            wanted = shape if order is None else tuple(shape[dimension] for dimension in order)
            if buffer.dtype != dtype or buffer.shape != wanted:
                raise ConfigurationError(
                    f"the result of {label} does not fit: tensor {place} of it is {_shown(dtype, wanted)}, and buffer "
                    f"{place} of into= is {_shown(buffer.dtype, tuple(buffer.shape))}"
                )
            if not buffer.data_ptr() and buffer.numel():  # since the call
                raise ConfigurationError(f"buffer {place} of into= {_NO_MEMORY}")
            target = buffer.detach() if buffer.requires_grad else buffer
            if order is not None:
                target = target.permute(sorted(range(len(order)), key=order.__getitem__))
            targets.append(target)
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
    if buffer.layout is not torch.strided or buffer.is_quantized or buffer.is_nested or buffer.is_meta:
        return "is no dense tensor with memory"
    if buffer.is_conj() or buffer.is_neg():
        return "is a conjugated or negated view; give what it is a view of"
    if not buffer.is_contiguous() and any(
        stride == 0 and extent > 1 for stride, extent in zip(buffer.stride(), buffer.shape, strict=True)
    ):
        return "is expanded: several of its elements share one place; clone() it"
    if not buffer.data_ptr() and buffer.numel():
        return _NO_MEMORY
    return None


def _shown(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {shape}"


def _without_tensors(codec: Codec, body: Encoded, pending: list[PendingTensors]) -> Any:
    """The result, with empty tensors in the places of its own."""
    places: list[torch.Tensor] = [_EMPTY] * len(kinds(body, pending))
    return codec.decode(*body._replace(tensors=places), as_given=True)
