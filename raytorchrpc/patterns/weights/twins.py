"""The twin of a model: memory like its own, into which a version arrives before the model takes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from raytorchrpc.errors import ConfigurationError
from raytorchrpc.patterns.weights.model_tensors import Model, ModelTensors, ties_of
from raytorchrpc.patterns.weights.shards import PlaceInWhole, Shard
from raytorchrpc.patterns.weights.slices import Options
from raytorchrpc.process.completion import nothing
from raytorchrpc.process.locks import Lock, Turn
from raytorchrpc.tensors import host_device_copy
from raytorchrpc.tensors.cuda_streams import follow_streams
from raytorchrpc.tensors.dtypes import unrecorded


class TwinSpec(NamedTuple):
    """What the twin of one tensor is like."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: torch.device
    slot: str  # the first name of the tensor: all its names have one twin
    place: PlaceInWhole | None  # of a shard

    @staticmethod
    def of(tensor: torch.Tensor, slot: str, place: PlaceInWhole | None) -> TwinSpec:
        # The strides of a dense tensor are kept, so that many can be copied at once; one with gaps gets none.
        stride = tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()
        return TwinSpec(tensor.dtype, tuple(tensor.shape), tuple(stride), tensor.device, slot, place)

    def allocate(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


class TwinForm(NamedTuple):
    """Equal for models that may have the same twin. Keeps no tensor."""

    key: Any
    specs: dict[str, TwinSpec]

    @staticmethod
    def of(tensors: ModelTensors, known: TwinForm | None) -> TwinForm:
        """``known``: of the same model before. Raises ConfigurationError for what is not a model."""
        if tensors.targets is None:
            _ = tensors.shards  # raises what is wrong
        assert tensors.targets is not None
        local = tensors.targets.tensors
        ties, strides = ties_of(local), tensors.targets.memory[1]
        key = tensors.targets.form, strides, [tensor.device for tensor in local.values()], ties
        if known is not None and known.key == key:
            return known
        if absent := [name for name in local if name not in tensors.shards]:
            raise ConfigurationError(
                f"{absent[0]!r} of the weights for {tensors.store!r} is a number, and this process is not in its "
                f"device mesh, which prefetch() does not support: pull() this model"
            )
        first = {name: slot for slot, name in ties}
        places = {
            name: None if shard.is_whole else (shard.global_shape, shard.offset)
            for name, shard in tensors.shards.items()
        }
        return TwinForm(
            key, {name: TwinSpec.of(tensor, first.get(name, name), places[name]) for name, tensor in local.items()}
        )


class Twin:
    """Memory for one more version of a model. Holds no reference to the model."""

    def __init__(self) -> None:
        self.writing = Turn()  # held by the thread that pulls into the twin, or copies out of it
        self.form: TwinForm | None = None  # of the model, as it was at its last prefetch
        self.specs: dict[str, TwinSpec] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.held: tuple[int, Options] | None = None  # the version that all of the twin has, and how it was pulled
        self.names: frozenset[str] = frozenset()  # of the tensors that the last pull has brought
        self.prefetch: Callable[[], Any] = lambda: None
        """Returns the handle of the last prefetch, if it is still in use."""
        self.reader: Any = None  # the handle of the store that pulls into the twin
        self._checked: Any = None  # names and memory of the model that can be written
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._wait_for_pull = self._wait_for_copies = nothing

    def as_model(self) -> dict[str, Any]:
        """The twin by name, for a pull into it."""
        places = [(name, self.tensors[name], spec.place) for name, spec in self.specs.items()]
        return {name: tensor if place is None else Shard(tensor, *place) for name, tensor, place in places}

    @contextmanager
    def writable(self, specs: dict[str, TwinSpec]) -> Iterator[tuple[int, Options] | None]:
        """Make ``tensors`` those of these specs, for a pull by this thread on CUDA streams of their own.

        Yields what was ``held``, which counts as unknown until the caller sets it again. At the end, blocks until the
        GPUs have finished.
        """
        devices = {spec.device for spec in specs.values() if spec.device.type == "cuda"}
        if specs != self.specs:
            self._wait_for_copies()  # what is freed may be allocated again at once
            self._allocate(specs)  # on default streams, where their memory can be freed without regard to the pull's
            self._wait_for_copies = follow_streams(devices)
        with ExitStack() as stack:
            for device in devices:
                if device not in self._streams:
                    self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                stack.enter_context(torch.cuda.stream(self._streams[device]))
            held, self.held = self.held, None
            self._wait_for_copies()
            self._wait_for_copies = nothing
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

    def _allocate(self, specs: dict[str, TwinSpec]) -> None:
        self.tensors, self.specs, self.held = {}, {}, None  # free those first
        by_slot: dict[str, torch.Tensor] = {}
        with torch.inference_mode(False):
            for spec in specs.values():
                if spec.slot not in by_slot:
                    by_slot[spec.slot] = spec.allocate()
        self.tensors = {name: by_slot[spec.slot] for name, spec in specs.items()}
        self.specs = specs

    def _keep_for_current_streams(self) -> None:
        """Have the twin's memory, once it is freed, wait for this thread's streams."""
        for tensor in self.tensors.values():
            if tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def copy_into(self, model: ModelTensors) -> None:
        """Copy what was brought into the model's tensors, on a GPU all at once. Raises ConfigurationError.

        This thread's streams wait for the pull, and the next pull for them.
        """
        if (form := TwinForm.of(model, self.form)).specs != self.specs:
            names = chain(self.specs, form.specs)
            changed = (name for name in names if self.specs.get(name) != form.specs.get(name))
            raise ConfigurationError(
                f"the model has changed since its prefetch from {model.store!r}: "
                f"{next(changed, 'the order of tensors')!r} is not what it was; cancel the prefetch, and prefetch again"
            )
        assert model.targets is not None
        if self._checked != (now := (self.names, model.targets.memory)) or model.makes_tensors:
            model.check(self.names)
            self._checked = now
        by_slot = {self.specs[name].slot: name for name in self.names}
        targets = [model.targets.tensors[name].detach() for name in by_slot.values()]
        self._wait_for_pull()
        with unrecorded(targets):
            host_device_copy.copy_into(targets, [self.tensors[name] for name in by_slot.values()])
        if any(torch.cuda.current_stream(device) != torch.cuda.default_stream(device) for device in self._streams):
            self._keep_for_current_streams()
        self._wait_for_copies = follow_streams(self._streams)


class Twins:
    """The twins of one store's handle. They live as long as their models. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._twins = WeakIdKeyDictionary()

    def of(self, model: Model) -> Twin:
        """The twin of a model; of a mapping, as long as its first tensor lives."""
        key: Any = model
        if isinstance(model, Mapping):
            key = next(iter(model.values()), None)
            key = key.tensor if isinstance(key, Shard) else key
        if not isinstance(key, (torch.nn.Module, torch.Tensor)):  # no tensor, or no model
            return Twin()
        with self._lock:
            twin: Twin = self._twins.setdefault(key, Twin())  # type: ignore[no-untyped-call]
            return twin
