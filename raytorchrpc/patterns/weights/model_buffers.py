"""Memory for one more version of a model, which the model's tensors can exchange with their own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.utils.weak import WeakIdKeyDictionary

from raytorchrpc.calls.receive_into import obstacle_of
from raytorchrpc.errors import ConfigurationError
from raytorchrpc.patterns.weights.model_tensors import BufferSpec, KnownSpecs, ModelTensors
from raytorchrpc.patterns.weights.plan import Options
from raytorchrpc.patterns.weights.shards import Model, Shard
from raytorchrpc.tensors import host_device_copy
from raytorchrpc.tensors.cuda_streams import follow_streams, nothing


def _unrecorded(tensors: Sequence[torch.Tensor]) -> AbstractContextManager[Any]:
    # Tensors made under inference mode can only be written under it.
    return torch.inference_mode() if any(map(torch.Tensor.is_inference, tensors)) else torch.no_grad()


class ModelBuffers:
    """Memory for one more version of a model. Holds no reference to the model."""

    def __init__(self) -> None:
        self.writing = threading.Lock()
        """Held by the thread that pulls into the buffers, or exchanges them."""
        self.version: int | None = None
        """The version that the buffers hold, bit for bit, if that is known."""
        self.options: Options | None = None
        """Of the pull that brought it."""
        self.names: frozenset[str] = frozenset()
        """Names of the tensors that the version has."""
        self.specs: dict[str, BufferSpec] = {}
        self.known: KnownSpecs | None = None
        """Of the model, as it was at its last prefetch."""
        self.tensors: dict[str, torch.Tensor] = {}
        self.prefetch: Callable[[], Any] = lambda: None
        """Returns the handle of the last prefetch into them, if it is still in use."""
        self.reader: Any = None
        """The handle that pulls into them."""
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._wait_for_pull = self._wait_for_readers = nothing

    def as_model(self) -> dict[str, Any]:
        """The buffers by name, for a pull into them."""
        places = [(name, self.tensors[name], spec.place) for name, spec in self.specs.items()]
        return {name: tensor if place is None else Shard(tensor, *place) for name, tensor, place in places}

    @contextmanager
    def writable(self, specs: dict[str, BufferSpec]) -> Iterator[int | None]:
        """Make ``tensors`` those of these specs, for a pull by this thread on CUDA streams of their own.

        Yields the version that they hold, if that is known. It counts as unknown until the caller sets it again. At the
        end, blocks until the GPUs have finished.
        """
        devices = {spec.device for spec in specs.values() if spec.device.type == "cuda"}
        if specs != self.specs:
            self._wait_for_readers()  # what is freed may be allocated again at once
            self._allocate(specs)  # on default streams, where their memory can be freed without regard to the pull's
            self._wait_for_readers = follow_streams(devices)
        with ExitStack() as stack:
            for device in devices:
                if device not in self._streams:
                    self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                stack.enter_context(torch.cuda.stream(self._streams[device]))
            held, self.version = self.version, None
            self._wait_for_readers()
            self._wait_for_readers = nothing
            try:
                yield held
            except BaseException:
                self._keep_for_current_streams()  # they may write yet
                raise
            self._wait_for_pull = follow_streams(devices)
            for device in devices:
                arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                arrived.record(self._streams[device])
                arrived.synchronize()

    def _allocate(self, specs: dict[str, BufferSpec]) -> None:
        self.tensors, self.specs, self.version = {}, {}, None  # free those first
        made: dict[int, torch.Tensor] = {}
        for spec in specs.values():
            if spec.slot not in made:
                made[spec.slot] = spec.allocate()
        self.tensors = {name: made[spec.slot] for name, spec in specs.items()}
        self.specs = specs

    def _keep_for_current_streams(self) -> None:
        """Have the buffers' memory, once it is freed, wait for this thread's streams."""
        for tensor in self.tensors.values():
            if tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def _take_from_pull(self) -> None:
        """Have this thread's streams wait for the pull."""
        self._wait_for_pull()
        if any(torch.cuda.current_stream(device) != torch.cuda.default_stream(device) for device in self._streams):
            self._keep_for_current_streams()

    def exchange(self, model: ModelTensors, version: int | None) -> None:
        """Give the model's tensors the memory of the buffers, and the buffers that of the model: all, or none.

        ``version``: that the model holds, if that is known. Raises ConfigurationError. CUDA: the caller's current
        streams wait for the pull, and the next pull waits for them.
        """
        model.check_unchanged(self.specs)
        model.check_replaceable(self.names)
        slots = {self.specs[name].slot for name in self.names}
        moved = [name for name, spec in self.specs.items() if spec.slot in slots]
        owners = [model.local[name] for name in moved]
        self._take_from_pull()
        with _unrecorded(owners):
            buffers = [self.tensors[name] for name in moved]
            theirs = [owner.data for owner in owners]
            all_have_buffers = False
            try:
                for owner, buffer in zip(owners, buffers, strict=True):
                    owner.data = buffer
                all_have_buffers = True
                for buffer, memory in zip(buffers, theirs, strict=True):  # the same tensors, which the next pull knows
                    buffer.data = memory
                self.version = version
            except BaseException:
                if all_have_buffers:
                    for owner, buffer in zip(owners, buffers, strict=True):
                        buffer.data = owner.data
                for owner, memory in zip(owners, theirs, strict=True):
                    owner.data = memory
                self.version = None
                raise
        # A backward pass through a forward pass before the exchange raises torch's own error.
        increment_version([owner for owner in owners if not owner.is_inference()])
        self._wait_for_readers = follow_streams(self._streams)

    def copy_into(self, model: ModelTensors) -> None:
        """Copy into the model's tensors. The buffers keep their version. Otherwise as ``exchange``."""
        model.check_unchanged(self.specs)
        by_slot = {self.specs[name].slot: name for name in self.names}
        detached = model.detached()
        targets = [detached[name] for name in by_slot.values()]
        for name, target in zip(by_slot.values(), targets, strict=True):
            if (obstacle := obstacle_of(target)) is not None:
                raise ConfigurationError(f"swap() cannot write to {name!r}, which {obstacle}")
        model.check_lasting(self.names)
        self._take_from_pull()
        with _unrecorded(targets):
            host_device_copy.copy_into(targets, [self.tensors[name] for name in by_slot.values()])
        self._wait_for_readers = follow_streams(self._streams)


class BuffersByModel:
    """The buffers of one store's handle. They live as long as their models. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffers = WeakIdKeyDictionary()

    def of(self, model: Model, store: str) -> tuple[ModelBuffers, ModelTensors]:
        """Return the buffers of a model, and its tensors; the buffers of a mapping live as long as its first tensor.

        ``store``: its name, for errors. Raises ConfigurationError.
        """
        known: ModelBuffers | None = None
        if isinstance(model, torch.nn.Module):
            with self._lock:
                known = self._buffers.get(model)  # type: ignore[no-untyped-call]
        tensors = ModelTensors(model, store, None if known is None else known.known)
        key = model if isinstance(model, torch.nn.Module) else next(iter(tensors.own.values()), None)
        if key is None:
            return ModelBuffers(), tensors
        with self._lock:
            found: ModelBuffers | None = self._buffers.get(key)  # type: ignore[no-untyped-call]
            if found is None:
                found = self._buffers[key] = ModelBuffers()
        if found.known is None or found.known.specs is not tensors.specs:
            found.known = tensors.known_specs()
        return found, tensors
