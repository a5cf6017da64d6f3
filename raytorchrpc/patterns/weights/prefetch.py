"""Prefetched weights: a thread pulls a version into the twin of a model, which then takes it by one copy.

The twin is memory like the model's own.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from raytorchrpc.calls.options import check_longest_wait
from raytorchrpc.calls.scope import allow_calls, refuse_on_loop
from raytorchrpc.calls.server.services import DeferredReply
from raytorchrpc.errors import ConfigurationError, RpcTimeout
from raytorchrpc.patterns.handle import run
from raytorchrpc.patterns.weights.model_tensors import Model, ModelTensors, ties_of
from raytorchrpc.patterns.weights.shards import PlaceInWhole, Shard
from raytorchrpc.patterns.weights.slices import Options
from raytorchrpc.process import fork
from raytorchrpc.process.completion import nothing
from raytorchrpc.process.locks import Lock, Turn
from raytorchrpc.process.workers import Workers
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


def specs_of(tensors: ModelTensors) -> dict[str, TwinSpec]:
    """What the twin of each of a model's tensors is like. Raises ConfigurationError."""
    assert tensors.targets is not None
    local, specs = tensors.targets.tensors, dict[str, TwinSpec]()
    slots = {name: slot for slot, name in ties_of(local)}
    for name, tensor in local.items():
        if (shard := tensors.shards.get(name)) is None:
            raise ConfigurationError(
                f"{name!r} of the weights for {tensors.store!r} is a number, and this process is not in its "
                f"device mesh, which prefetch() does not support: pull() this model"
            )
        # The strides of a dense tensor are kept, so that many can be copied at once; one with gaps gets none.
        stride = tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()
        place = None if shard.is_whole else (shard.global_shape, shard.offset)
        form = tensor.dtype, tuple(tensor.shape), tuple(stride), tensor.device
        specs[name] = TwinSpec(*form, slots.get(name, name), place)
    return specs


class Twin:
    """Memory for one more version of a model. Holds no reference to the model."""

    def __init__(self) -> None:
        self.writing = Turn()  # held by the thread that pulls into the twin, or copies out of it
        self._known: tuple[Any, dict[str, TwinSpec]] | None = None  # the form that the model had last, and its specs
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

    def specs_for(self, tensors: ModelTensors) -> dict[str, TwinSpec]:
        """What the twin of a model is like, as the model is now; see ``specs_of``. Keeps no tensor."""
        if tensors.targets is None:
            _ = tensors.shards  # raises what is wrong
        assert tensors.targets is not None
        local = tensors.targets.tensors
        lies = [(tensor.device, tensor.stride()) for tensor in local.values()]
        form = tensors.targets.form, lies, ties_of(local)
        if self._known is None or self._known[0] != form:
            self._known = form, specs_of(tensors)
        return self._known[1]

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
                    by_slot[spec.slot] = torch.empty_strided(
                        spec.shape, spec.stride, dtype=spec.dtype, device=spec.device
                    )
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
        if (specs := self.specs_for(model)) != self.specs:
            changed = (name for name in chain(self.specs, specs) if self.specs.get(name) != specs.get(name))
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


@dataclass(eq=False)
class TwinPull:
    """One pull into a twin, by a thread of its own."""

    store: Any  # a ``WeightStore``
    version: int | None
    since: int | None
    timeout: float | None
    options: dict[str, Any]  # see ``WeightStore.pull``
    twin: Twin
    specs: dict[str, TwinSpec]
    is_wanted: bool = True
    has_brought: bool = False  # False if the model has the version already
    outcome: DeferredReply = field(default_factory=DeferredReply)

    def __post_init__(self) -> None:
        self.outcome.set_running_or_notify_cancel()  # a cancelled coroutine does not cancel it

    def run(self) -> None:
        """Pull, and settle ``outcome``."""
        try:
            self.outcome.settle(self._pull())
        except BaseException as error:
            self.outcome.settle(None, error)
        finally:
            del self

    def _pull(self) -> int:
        _, wait_s = run(self.store._begin(self.timeout))
        until = time.monotonic() + wait_s
        if not self.twin.writing.once("a pull").acquire(timeout=wait_s):
            raise RpcTimeout(
                f"a cancelled prefetch from {self.store.name!r} still writes to the twin of this model after "
                f"{wait_s:.3g} s"
            )
        try:
            if not self.is_wanted:
                raise _cancelled(self.store.name)
            return self._pull_into_twin(until)
        finally:
            self.twin.writing.release()

    def _pull_into_twin(self, until: float) -> int:
        twin, store, options = self.twin, self.store, Options.of(**self.options)
        if self.since is not None or twin.reader is None:
            newest: int = store.wait(0, _seconds_until(until))  # binds the handle
            is_newest = self.since == (newest if self.version is None else self.version)
            if self.since is not None and is_newest and store._has_pulled(self.since, options):
                return self.since
        if twin.reader is None:
            twin.reader = copy.copy(store)  # of its own, so that it knows the layout of the version it pulled
        with twin.writable(self.specs) as held:
            known = held[0] if held is not None and held[1] == options else None
            pulled: int = twin.reader.pull(
                twin.as_model(), self.version, since=known, timeout=_seconds_until(until), **self.options
            )
        if pulled != known:
            twin.names = twin.reader._names_pulled()
        twin.held, self.has_brought = (pulled, options), True
        return pulled


def _seconds_until(until: float) -> float:
    return max(0.0, until - time.monotonic())


def _cancelled(store: str) -> ConfigurationError:
    return ConfigurationError(f"this prefetch from {store!r} was cancelled")


class WeightPrefetch:
    """A version on its way into the twin of a model. Made by ``WeightStore.prefetch``; awaitable. Thread-safe.

    ``await prefetch`` returns the version once it has arrived, and raises what ``wait`` raises.

    The twin belongs to the store's handle, and the next prefetch of the model writes to it.
    """

    def __init__(self, store: str, model: Model, pull: TwinPull) -> None:
        """Made by ``begin``."""
        self._store, self._model, self._pull = store, model, pull
        self._lock = Lock()
        self._is_swapped = self._is_cancelled = False

    def done(self) -> bool:
        """Whether ``wait`` would return or raise at once. Never blocks."""
        return self._pull.outcome.done()

    def wait(self, timeout: float | None = None) -> int:
        """Block until the version has arrived, in the GPU's memory too; returns its number. The model is unchanged.

        Args:
            timeout: seconds. None: until the pull ends, which it does by its own timeout.

        Raises:
            RpcTimeout: after ``timeout``; the prefetch goes on. Or the pull has raised it.
            PeerLost, NotFound, Empty, ConfigurationError: the pull has raised it; see ``WeightStore.pull``.
            ConfigurationError: the prefetch was cancelled.
        """
        fork.check_process()
        if not self.done():
            check_longest_wait(timeout)
            if timeout != 0:
                refuse_on_loop(f"waiting for the weights of {self._store!r}", "`await prefetch`")
            with allow_calls():
                concurrent.futures.wait((self._pull.outcome,), timeout)
        if not self.done():
            raise RpcTimeout(f"the weights of {self._store!r} have not arrived within {timeout:.3g} s; they still may")
        if self._is_cancelled:
            raise _cancelled(self._store)
        return int(self._pull.outcome.result())

    def __await__(self) -> Generator[Any, None, int]:
        fork.check_process()
        version: int = yield from asyncio.wrap_future(self._pull.outcome).__await__()
        if self._is_cancelled:
            raise _cancelled(self._store)
        return version

    def cancel(self) -> None:
        """Leave the model as it is. Never blocks. No effect after ``swap``.

        A pull that is under way continues to its end, and then releases its version. The next prefetch of this model
        waits for it.
        """
        with self._lock:
            if self._is_swapped:
                return
            self._is_cancelled = True
        self._pull.is_wanted = False
        self._pull.outcome.settle(None, _cancelled(self._store))

    def swap(self) -> int:
        """Copy the version into the model's tensors, within their device; returns its number.

        Blocks until the version has arrived, and until CPU tensors are copied. The tensors stay where they are, so
        optimizers, hooks, CUDA graphs and views continue to work. Names of one tensor continue to share it. A backward
        pass through an earlier forward pass raises torch's error.

        CUDA: this thread's current streams wait for the pull, and the next pull for them. The CPU does not.

        Raises:
            ConfigurationError: a tensor cannot be written, the model has other tensors than at the prefetch, or this
                prefetch was swapped or cancelled before. The model is unchanged.
            Others: see ``wait``. The model is unchanged.
        """
        version = self.wait()
        with self._lock:
            if self._is_cancelled:
                raise _cancelled(self._store)
            if self._is_swapped:
                raise ConfigurationError(
                    f"this prefetch from {self._store!r} was swapped already: prefetch again for the next version"
                )
            if self._pull.has_brought:
                with self._pull.twin.writing.once("swap"):
                    self._pull.twin.copy_into(ModelTensors(self._model, self._store))
            self._is_swapped = True
        return version

    @property
    def _is_open(self) -> bool:
        """Whether the twin is needed for ``swap``."""
        if self._is_swapped or self._is_cancelled:
            return False
        outcome = self._pull.outcome
        return not outcome.done() or (outcome.exception() is None and self._pull.has_brought)

    def __repr__(self) -> str:
        state = "arrived" if self.done() else "on its way"
        state = "swapped" if self._is_swapped else "cancelled" if self._is_cancelled else state
        return f"<raytorchrpc.WeightPrefetch from {self._store!r}: {state}>"


_workers = Workers("raytorchrpc-prefetch")
_beginning = Turn()


def begin(
    store: Any,
    twins: Twins,
    model: Model,
    version: int | None,
    since: int | None,
    timeout: float | None,
    options: dict[str, Any],
) -> WeightPrefetch:
    """Have a thread pull; see ``WeightStore.prefetch``."""
    fork.check_process()  # a child has none of the threads
    tensors, twin = ModelTensors(model, store.name), twins.of(model)
    pull = TwinPull(store, version, since, timeout, options, twin, twin.specs_for(tensors))
    del tensors
    handle = WeightPrefetch(store.name, model, pull)
    with _beginning.once("a prefetch"):
        before = twin.prefetch()
        if before is not None and before._is_open:
            raise ConfigurationError(
                f"a prefetch of this model from {store.name!r} was neither swapped nor cancelled: call swap() or "
                f"cancel() on its handle first"
            )
        twin.prefetch = weakref.ref(handle)
    _workers.submit(pull.run)
    return handle
