"""Memory for one more version of a model, which the model's tensors can exchange with their own."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version
from torch.utils.weak import WeakIdKeyDictionary

from raytorchrpc.calls.receive_into import obstacle_of
from raytorchrpc.errors import ConfigurationError
from raytorchrpc.patterns.weights.model_tensors import (
    Model,
    ModuleState,
    Targets,
    check_lasting,
    local_tensor,
    shards_of,
    ties_of,
)
from raytorchrpc.patterns.weights.plan import Options
from raytorchrpc.patterns.weights.shards import PlaceInWhole, Shard
from raytorchrpc.process.completion import nothing
from raytorchrpc.process.locks import Lock, Turn
from raytorchrpc.tensors import host_device_copy
from raytorchrpc.tensors.cuda_streams import follow_streams
from raytorchrpc.tensors.dtypes import unrecorded

_INSTEAD = "swap(in_place=True) copies into the tensors instead"


class BufferSpec(NamedTuple):
    """What the buffer of one tensor has to be like."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: torch.device
    pinned: bool
    inference: bool  # made under inference mode
    slot: str  # the first name of the tensor: all its names share a buffer
    place: PlaceInWhole | None  # of a shard

    @staticmethod
    def of(tensor: torch.Tensor, slot: str, place: PlaceInWhole | None) -> BufferSpec:
        # The strides of a dense tensor are kept; a tensor with gaps gets a buffer without.
        stride = tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()
        pinned = tensor.is_cpu and torch.cuda.is_initialized() and tensor.is_pinned()  # type: ignore[no-untyped-call]
        layout = tuple(tensor.shape), tuple(stride), tensor.device
        return BufferSpec(tensor.dtype, *layout, pinned, tensor.is_inference(), slot, place)

    def allocate(self) -> torch.Tensor:
        with torch.inference_mode(self.inference):
            return torch.empty_strided(
                self.shape, self.stride, dtype=self.dtype, device=self.device, pin_memory=self.pinned
            )


class KnownSpecs(NamedTuple):
    """The specs of models of one form. Keeps no tensor."""

    form: Any
    specs: dict[str, BufferSpec]


class ModelTensors:
    """A model's tensors by name, at one moment."""

    def __init__(self, model: Model, store: str, known: KnownSpecs | None = None) -> None:
        """``known``: of the model's last prefetch. Raises ConfigurationError for anything that is not a model."""
        self._model, self._store, self._state = model, store, _state_of(model)
        self.own = self._state.saved
        self.local = {name: local_tensor(tensor) for name, tensor in self.own.items()}
        """The tensors that have memory: of a DTensor, its local shard."""
        values = self.own if isinstance(model, torch.nn.Module) else model
        if (targets := Targets.of(values)) is None:
            shards_of(values, store)  # raises for what is no tensor
            targets = Targets({})
        self._ties, self._seen, self._writes = ties_of(targets.tensors), self._look(), _writes(self.local)
        self._apart = [name for name, tensor in self.local.items() if tensor is not self.own[name]]
        self._replaceable: tuple[frozenset[str], dict[str, torch.Tensor]] | None = None  # see ``replaceable``
        kinds = [(tensor.device, tensor.is_inference()) for tensor in self.local.values()]
        form = targets.form, kinds, self._seen[1], self._ties
        if known is not None and known.form == form:
            self.known = known
        else:
            self.known = KnownSpecs(form, self._make_specs(shards_of(values, store)))

    @property
    def specs(self) -> dict[str, BufferSpec]:
        return self.known.specs

    @property
    def runs_code(self) -> bool:
        """Whether looking at the model runs code of its own, such as FSDP's, which needs the program's thread."""
        return self._state.runs_code

    def _make_specs(self, shards: Mapping[str, Shard]) -> dict[str, BufferSpec]:
        for name, tensor in self.local.items():
            if not _is_plain(tensor):
                raise ConfigurationError(
                    f"{name!r} of the weights for {self._store!r} is a {type(tensor).__name__}, which prefetch() does "
                    f"not support: pull() this model"
                )
        if absent := [name for name in self.local if name not in shards]:
            raise ConfigurationError(
                f"{absent[0]!r} of the weights for {self._store!r} is a number, and this process is not in its device "
                f"mesh, which prefetch() does not support: pull() this model"
            )
        places = [None if shard.is_whole else (shard.global_shape, shard.offset) for shard in shards.values()]
        first = {name: one for one, name in self._ties}
        rows = zip(self.local.items(), places, strict=True)
        return {name: BufferSpec.of(tensor, first.get(name, name), place) for (name, tensor), place in rows}

    def _look(self) -> tuple[Any, ...]:
        """Where the tensors lie, and how their memory is seen."""
        seen = [*self.local.values(), *filter(_is_plain, map(local_tensor, self._state.passing))]
        places = [list(map(ask, seen)) for ask in (torch.Tensor.data_ptr, torch.Tensor.stride)]
        return *places, [tensor.shape for tensor in seen], [tensor.dtype for tensor in seen]

    def now(self) -> ModelTensors:
        """The model's tensors as they are now: this, if a module has the same in the same memory.

        Raises ConfigurationError.
        """
        if isinstance(self._model, torch.nn.Module):
            state, before = ModuleState.of(self._model), self._state
            its, mine = ([*one.saved.values(), *one.passing] for one in (state, before))
            same = list(state.saved) == list(before.saved) and len(its) == len(mine) and state.made == before.made
            same = same and all(map(operator.is_, its, mine))
            same = same and all(local_tensor(state.saved[name]) is self.local[name] for name in self._apart)
            if same and self._look() == self._seen:
                return self
        return ModelTensors(self._model, self._store, self.known)

    def is_unwritten(self) -> bool:
        """Whether torch has counted no write to the tensors: it does not count those through ``.data``."""
        return self._writes == _writes(self.local)

    def check_unchanged(self, specs: dict[str, BufferSpec]) -> None:
        """Raise ConfigurationError, which names a tensor, unless the model still has tensors of these specs."""
        if self.specs == specs:
            return
        names = chain(specs, self.specs)
        changed = next((name for name in names if specs.get(name) != self.specs.get(name)), "the order of tensors")
        raise ConfigurationError(
            f"the model has changed since its prefetch from {self._store!r}: {changed!r} is not what it was; "
            f"cancel the prefetch, and prefetch again"
        )

    def replaceable(self, names: frozenset[str]) -> dict[str, torch.Tensor]:
        """These tensors and those that share a buffer with them, by name; looks at the model once.

        Raises ConfigurationError, which names a tensor, unless they can be given other memory.
        """
        if self._replaceable is None or self._replaceable[0] != names:
            self._check_replaceable(names)
            slots = {self.specs[name].slot for name in names}
            found = {name: self.local[name] for name, spec in self.specs.items() if spec.slot in slots}
            self._replaceable = names, found
        return self._replaceable[1]

    def _check_replaceable(self, names: frozenset[str]) -> None:
        if not isinstance(self._model, torch.nn.Module):
            raise ConfigurationError(
                f"swap() cannot replace the memory of a {type(self._model).__name__} of tensors, because a module may "
                f"use the same tensors: prefetch the module, or {_INSTEAD}"
            )
        slots: dict[int, str] = {}  # by the address of the storage
        for name in (name for name in self.own if name in names and self.local[name].numel()):
            tensor = self.local[name]
            storage = tensor.untyped_storage()
            obstacle = _obstacle(tensor, storage) if tensor is self.own[name] else _obstacle_of_shards(self._model)
            if obstacle is None and name in self._state.made:
                obstacle = "is made by state_dict(), and is not a parameter or buffer of the module"
            slot = self.specs[name].slot
            if obstacle is None and slots.setdefault(storage.data_ptr(), slot) != slot:
                obstacle = "shares memory with another tensor of the model"
            if obstacle is not None:
                raise ConfigurationError(f"swap() cannot replace {name!r}, which {obstacle}: {_INSTEAD}")
        replaced = {id(self.own[name]) for name in names}
        stays = (tensor for tensor in (*self.own.values(), *self._state.passing) if id(tensor) not in replaced)
        for tensor in filter(_is_plain, map(local_tensor, stays)):
            if tensor.numel() and (found := slots.get(tensor.untyped_storage().data_ptr())) is not None:
                name = next(name for name in names if self.specs[name].slot == found)
                raise ConfigurationError(
                    f"swap() cannot replace {name!r}, which shares memory with another tensor of the model: {_INSTEAD}"
                )


def _state_of(model: Any) -> ModuleState:
    """A model's tensors: those of a module are its own parameters and buffers."""
    if isinstance(model, torch.nn.Module):
        return ModuleState.of(model)
    named = model.items() if isinstance(model, Mapping) else ()
    tensors = {str(name): value.tensor if isinstance(value, Shard) else value for name, value in named}
    return ModuleState(tensors, [], frozenset())


def _writes(tensors: dict[str, torch.Tensor]) -> list[int]:
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors.values()]


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory of its own, and is not made of other tensors."""
    return type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def _obstacle_of_shards(model: torch.nn.Module) -> str | None:
    """Why the local shards of a model's DTensors cannot be given other memory; None if they can."""
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if fsdp is not None and any(isinstance(module, fsdp) for module in model.modules()):
        return "is sharded by FSDP, which has views of its memory"
    return None


def _obstacle(tensor: torch.Tensor, storage: torch.UntypedStorage) -> str | None:
    """Why a tensor cannot be given other memory; None if it can."""
    if tensor._is_view() or storage.nbytes() != tensor.nbytes:
        return "is a view of a larger tensor, or of another"
    if not storage.resizable():
        return "lies in memory that torch did not allocate"
    if tensor.is_cpu and storage.is_shared():
        return "lies in memory that processes share"
    return None


class ModelBuffers:
    """Memory for one more version of a model. Holds no reference to the model."""

    def __init__(self) -> None:
        self.writing = Turn()  # held by the thread that pulls into the buffers, or exchanges them
        self.version: int | None = None  # the version that the buffers hold, bit for bit, if that is known
        self.options: Options | None = None  # of the pull that brought it
        self.names: frozenset[str] = frozenset()  # names of the tensors that the version has
        self.specs: dict[str, BufferSpec] = {}
        self.known: KnownSpecs | None = None  # of the model, as it was at its last prefetch
        self.may_look_aside = False  # whether another thread may look at the model
        self.tensors: dict[str, torch.Tensor] = {}
        self.prefetch: Callable[[], Any] = lambda: None
        """Returns the handle of the last prefetch into them, if it is still in use."""
        self.reader: Any = None  # the handle that pulls into them
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
        made: dict[str, torch.Tensor] = {}
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
        """Exchange the memory of the model and the buffers: all, or none. Raises ConfigurationError.

        ``version``: that the model holds, if known. This thread's streams wait for the pull, and the next for them.
        """
        model.check_unchanged(self.specs)
        moved, before = model.replaceable(self.names), self.tensors
        owners = moved.values()
        self._take_from_pull()
        with unrecorded(owners):
            theirs = [owner.data for owner in owners]
            try:
                for name, owner in moved.items():
                    owner.data = before[name]
                self.tensors, self.version = {**before, **dict(zip(moved, theirs, strict=True))}, version
            except BaseException:
                for owner, memory in zip(owners, theirs, strict=True):
                    owner.data = memory
                self.tensors, self.version = before, None
                raise
        # A backward pass through a forward pass before the exchange raises torch's own error.
        increment_version([owner for owner in owners if not owner.is_inference()])
        self._wait_for_readers = follow_streams(self._streams)

    def copy_into(self, model: ModelTensors) -> None:
        """Copy into the model's tensors. The buffers keep their version. Otherwise as ``exchange``."""
        model.check_unchanged(self.specs)
        by_slot = {self.specs[name].slot: name for name in self.names}
        targets = [model.local[name].detach() for name in by_slot.values()]
        for name, target in zip(by_slot.values(), targets, strict=True):
            if (obstacle := obstacle_of(target)) is not None:
                raise ConfigurationError(f"swap() cannot write to {name!r}, which {obstacle}")
        check_lasting(model._store, model._model, model._state, self.names)
        self._take_from_pull()
        with unrecorded(targets):
            host_device_copy.copy_into(targets, [self.tensors[name] for name in by_slot.values()])
        self._wait_for_readers = follow_streams(self._streams)


class BuffersByModel:
    """The buffers of one store's handle. They live as long as their models. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._buffers = WeakIdKeyDictionary()

    def of(self, model: Model) -> ModelBuffers:
        """The buffers of a model; of a mapping, as long as its first tensor lives."""
        key = model if isinstance(model, torch.nn.Module) else next(iter(_state_of(model).saved.values()), None)
        if not isinstance(key, (torch.nn.Module, torch.Tensor)):  # no tensor, or no model
            return ModelBuffers()
        with self._lock:
            found: ModelBuffers = self._buffers.setdefault(key, ModelBuffers())  # type: ignore[no-untyped-call]
            return found
