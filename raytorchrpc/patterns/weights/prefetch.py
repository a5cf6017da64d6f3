"""Prefetched weights: a thread pulls a version into the twin of a model, which then takes it by one copy."""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import time
import weakref
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from raytorchrpc.calls.options import check_longest_wait
from raytorchrpc.calls.scope import refuse_on_loop
from raytorchrpc.calls.server.gates import allow_calls
from raytorchrpc.calls.server.services import DeferredReply
from raytorchrpc.errors import ConfigurationError, RpcTimeout
from raytorchrpc.patterns.handle import begin as begin_operation
from raytorchrpc.patterns.handle import run
from raytorchrpc.patterns.weights.model_tensors import Model, ModelTensors
from raytorchrpc.patterns.weights.slices import Options
from raytorchrpc.patterns.weights.twins import Twin, TwinForm, Twins, TwinSpec
from raytorchrpc.process import fork
from raytorchrpc.process.locks import Lock, Turn
from raytorchrpc.process.workers import Workers


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
        _, wait_s = run(begin_operation(self.timeout, self.store.home))
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
    form = TwinForm.of(tensors, twin.form)
    del tensors
    pull = TwinPull(store, version, since, timeout, options, twin, form.specs)
    handle = WeightPrefetch(store.name, model, pull)
    with _beginning.once("a prefetch"):
        before = twin.prefetch()
        if before is not None and before._is_open:
            raise ConfigurationError(
                f"a prefetch of this model from {store.name!r} was neither swapped nor cancelled: call swap() or "
                f"cancel() on its handle first"
            )
        twin.prefetch, twin.form = weakref.ref(handle), form
    _workers.submit(pull.run)
    return handle
