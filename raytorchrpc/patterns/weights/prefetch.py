"""Prefetched weights: a thread pulls a version into buffers beside a model, which then takes it in one step."""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import time
import traceback
import weakref
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from raytorchrpc.calls.scope import refuse_on_loop
from raytorchrpc.calls.server.gates import allow_calls
from raytorchrpc.calls.server.services import DeferredReply
from raytorchrpc.errors import ConfigurationError, RpcTimeout
from raytorchrpc.patterns.handle import begin as begin_operation
from raytorchrpc.patterns.handle import run
from raytorchrpc.patterns.weights.model_buffers import BuffersByModel, BufferSpec, ModelBuffers, ModelTensors
from raytorchrpc.patterns.weights.model_tensors import Model
from raytorchrpc.patterns.weights.plan import Options
from raytorchrpc.process import fork
from raytorchrpc.process.locks import Lock, Turn
from raytorchrpc.process.threads import ThreadShortage
from raytorchrpc.process.workers import Workers


@dataclass(eq=False)
class Transfer:
    """One pull into buffers, by a thread of its own."""

    store: Any  # a ``WeightStore``
    version: int | None
    since: int | None
    timeout: float | None
    options: dict[str, Any]  # see ``WeightStore.pull``
    buffers: ModelBuffers
    wanted: bool = True
    brought: bool = False  # whether the buffers have the version; False if the model has it already
    handle: Callable[[], WeightPrefetch | None] = lambda: None  # returns None once no handle refers to this
    outcome: DeferredReply = field(default_factory=DeferredReply)

    def __post_init__(self) -> None:
        self.outcome.set_running_or_notify_cancel()  # a cancelled coroutine does not cancel it

    def run(self) -> None:
        """Pull, and settle ``outcome``."""
        try:
            self.outcome.settle(self._pull())
        except BaseException as error:
            # The error holds these frames, and ``outcome`` the error: only the garbage collector could free them.
            traceback.clear_frames(error.__traceback__)
            self.outcome.settle(None, error)
        finally:
            del self

    def version_of_model(self) -> int | None:
        """The version that the model holds bit for bit, according to ``since``; None if that is not certain."""
        has_all = self.options["strict"] and not self.options["only"]
        return self.since if has_all and self._has_since() else None

    def _has_since(self) -> bool:
        """Whether the model may have the version that ``since`` says."""
        return self.since is not None and self.store._has_pulled(self.since, Options.of(**self.options))

    def _pull(self) -> int:
        local, wait_s = run(begin_operation(self.timeout, self.store.home))
        until = time.monotonic() + wait_s
        del local
        if not self.buffers.writing.once("a pull").acquire(timeout=wait_s):
            raise RpcTimeout(
                f"a cancelled prefetch from {self.store.name!r} still writes to the buffers of this model after "
                f"{wait_s:.3g} s"
            )
        try:
            handle = self.handle()
            if not self.wanted or handle is None:
                raise _cancelled(self.store.name)
            specs = handle.tensors().specs
            del handle
            return self._pull_into_buffers(until, specs)
        finally:
            self.buffers.writing.release()

    def _pull_into_buffers(self, until: float, specs: dict[str, BufferSpec]) -> int:
        buffers, store, options = self.buffers, self.store, Options.of(**self.options)
        if self.since is not None or buffers.reader is None:
            newest: int = store.wait(0, _left(until))  # binds the handle
            if self.since == (newest if self.version is None else self.version) and self._has_since():
                return self.since
        if buffers.reader is None:
            buffers.reader = copy.copy(store)  # of its own, so that it knows the layout of the version it pulled
        with buffers.writable(specs) as held:
            tensors, held = buffers.as_model(), held if options == buffers.options and not options.only else None
            pulled: int = buffers.reader.pull(tensors, self.version, since=held, timeout=_left(until), **self.options)
        names = buffers.names
        if pulled != held:
            brings_all = options.strict and not options.only
            names = frozenset(tensors) if brings_all else frozenset(tensors) & buffers.reader._names_pulled()
        buffers.version, buffers.options, buffers.names = None if options.only else pulled, options, names
        self.brought = True
        if (handle := self.handle()) is not None:
            handle.check_replaceable()  # which ``swap`` then need not do
        return pulled


def _left(until: float) -> float:
    return max(0.0, until - time.monotonic())


def _cancelled(store: str) -> ConfigurationError:
    return ConfigurationError(f"this prefetch from {store!r} was cancelled")


class WeightPrefetch:
    """A version on its way into buffers beside a model. Made by ``WeightStore.prefetch``; awaitable. Thread-safe.

    ``await prefetch`` returns the version once it has arrived, and raises what ``wait`` raises.

    The buffers belong to the store's handle: after ``swap`` they are the memory that the model had, and the next
    prefetch writes to them.
    """

    def __init__(self, store: str, model: Model, buffers: ModelBuffers, transfer: Transfer) -> None:
        """Made by ``begin``."""
        self._store, self._model, self._buffers, self._transfer = store, model, buffers, transfer
        self._tensors: ModelTensors | None = None
        self._lock = Lock()
        self._swapped = self._is_cancelled = False

    def done(self) -> bool:
        """Whether ``wait`` would return or raise at once. Never blocks."""
        return self._transfer.outcome.done()

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
            if timeout != 0:
                refuse_on_loop(f"waiting for the weights of {self._store!r}", "`await prefetch`")
            with allow_calls():
                concurrent.futures.wait((self._transfer.outcome,), timeout)
        if not self.done():
            raise RpcTimeout(f"the weights of {self._store!r} have not arrived within {timeout:.3g} s; they still may")
        if self._is_cancelled:
            raise _cancelled(self._store)
        return int(self._transfer.outcome.result())

    def __await__(self) -> Generator[Any, None, int]:
        fork.check_process()
        version: int = yield from asyncio.wrap_future(self._transfer.outcome).__await__()
        if self._is_cancelled:
            raise _cancelled(self._store)
        return version

    def cancel(self) -> None:
        """Leave the model as it is. Never blocks. No effect after ``swap``.

        A pull that is under way continues to its end, and then releases its version. The next prefetch of this model
        waits for it.
        """
        with self._lock:
            if self._swapped:
                return
            self._is_cancelled = True
        self._transfer.wanted = False
        self._transfer.outcome.settle(None, _cancelled(self._store))

    def swap(self, *, in_place: bool = False) -> int:
        """Have the model take the version; returns its number. Blocks until the version has arrived.

        By default, parameters and buffers of the module exchange their memory with the buffers, without a copy. They
        remain the same objects, so optimizers and hooks continue to work. Names of one tensor continue to share it.
        Other tensors that refer to the model's old memory, such as ``parameter.detach()`` or a state dict, keep it, and
        see it overwritten by the next prefetch. A backward pass through an earlier forward pass raises torch's error.

        CUDA: this thread's current streams wait for the pull, and the next pull for them. The CPU does not.

        Args:
            in_place: copy into the model's tensors, within their device. For tensors that have to stay where they are:
                those of CUDA graphs, views of a flat tensor, or a mapping of tensors. Blocks until CPU tensors are
                copied.

        Raises:
            ConfigurationError: a tensor cannot be replaced, the model has other tensors than at the prefetch, or this
                prefetch was swapped or cancelled before. The model is unchanged.
            Others: see ``wait``. The model is unchanged.
        """
        version = self.wait()
        with self._lock:
            if self._is_cancelled:
                raise _cancelled(self._store)
            if self._swapped:
                raise ConfigurationError(
                    f"this prefetch from {self._store!r} was swapped already: prefetch again for the next version"
                )
            if self._transfer.brought:
                with self._buffers.writing.once("swap"):
                    before = self.tensors()
                    tensors = before.now()
                    if in_place:
                        self._buffers.copy_into(tensors)
                    else:
                        held = self._transfer.version_of_model()
                        if held is not None and (tensors is not before or not tensors.is_unwritten()):
                            held = None
                        self._buffers.exchange(tensors, held)
            self._swapped = True
        return version

    def check_replaceable(self) -> None:
        """Note whether the model's tensors can be replaced, on the thread that pulls."""
        with suppress(ConfigurationError):  # ``swap`` raises it, unless it is to copy
            self.tensors().replaceable(self._buffers.names)

    def tensors(self) -> ModelTensors:
        """The model's tensors, as they were when this was first called. Raises ConfigurationError."""
        if self._tensors is None:
            buffers = self._buffers
            buffers.may_look_aside = False  # unless it succeeds
            self._tensors = ModelTensors(self._model, self._store, buffers.known)
            buffers.known, buffers.may_look_aside = self._tensors.known, not self._tensors.runs_code
        return self._tensors

    @property
    def _is_open(self) -> bool:
        """Whether the buffers are needed for ``swap``."""
        if self._swapped or self._is_cancelled:
            return False
        outcome = self._transfer.outcome
        return not outcome.done() or (outcome.exception() is None and self._transfer.brought)

    def __repr__(self) -> str:
        state = "arrived" if self.done() else "on its way"
        state = "swapped" if self._swapped else "cancelled" if self._is_cancelled else state
        return f"<raytorchrpc.WeightPrefetch from {self._store!r}: {state}>"


_workers = Workers("raytorchrpc-prefetch")
_beginning = Turn()


def begin(
    store: Any,
    models: BuffersByModel,
    model: Model,
    version: int | None,
    since: int | None,
    timeout: float | None,
    options: dict[str, Any],
) -> WeightPrefetch:
    """Have a thread pull; see ``WeightStore.prefetch``."""
    fork.check_process()  # a child has none of the threads
    buffers = models.of(model)
    transfer = Transfer(store, version, since, timeout, options, buffers)
    handle = WeightPrefetch(store.name, model, buffers, transfer)
    if since is not None or not buffers.may_look_aside:  # else the pull's thread looks at the model: that takes long
        handle.tensors()
    with _beginning.once("a prefetch"):
        before = buffers.prefetch()
        if before is not None and before._is_open:
            raise ConfigurationError(
                f"a prefetch of this model from {store.name!r} was neither swapped nor cancelled: call swap() or "
                f"cancel() on its handle first"
            )
        buffers.prefetch = transfer.handle = weakref.ref(handle)
    try:
        _workers.submit(transfer.run)
    except ThreadShortage as shortage:
        transfer.outcome.settle(None, shortage)
        raise
    return handle
