"""Waits for a call, and lends the admission of the waiting method meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from raytorchrpc.calls.gates import Admission
from raytorchrpc.calls.scope import current_scope

F = TypeVar("F", bound=Callable[..., Any])


class Waitable(Protocol):
    """Something to wait for, as a call in flight."""

    def wait(self, timeout_s: float) -> bool:
        """Block until done, at most ``timeout_s``; whether it is done."""


def wait_serving(pending: Waitable, timeout_s: float) -> bool:
    """Block until ``pending`` is done, and let other methods of this actor run meanwhile; see ``gates``.

    False if ``timeout_s`` passes first. Returns only when it is this method's turn again.
    """
    admission = _own_admission()
    if admission is None or timeout_s <= 0:
        return pending.wait(timeout_s)
    admission.lend()
    try:
        return pending.wait(timeout_s)
    finally:
        admission.regain()


@contextmanager
def allow_calls() -> Iterator[None]:
    """Let direct calls run in this sync actor while the block runs: ``with raytorchrpc.allow_calls(): ray.get(ref)``.

    The blocking operations of this package do so by themselves. Use it around other waits (``ray.get``,
    ``time.sleep``, a lock, a long computation that touches nothing of the actor), and with ``pass`` as the block to let
    in, in the order of their arrival, the calls that wait already. The block must not use the actor's state. Its end
    blocks until no other method of the actor runs.

    No effect in threaded and async actors, in methods with ``concurrent=True``, and outside a method.
    """
    admission = _own_admission()
    if admission is None or not admission.held:
        yield
        return
    admission.lend()
    try:
        yield
    finally:
        admission.regain()


@contextmanager
def keep_admission() -> Iterator[Callable[[F], F]]:
    """Keep the admission during waits, for an operation that leaves the actor's state incomplete in between.

    Yields a decorator for functions in which it is lent all the same.
    """
    scope = current_scope.get()

    def lending(function: F) -> F:
        def call(*args: Any, **kwargs: Any) -> Any:
            before = current_scope.set(scope)
            try:
                return function(*args, **kwargs)
            finally:
                current_scope.reset(before)

        return call  # type: ignore[return-value]

    before = current_scope.set(scope._replace(admission=None))
    try:
        yield lending
    finally:
        current_scope.reset(before)


def _own_admission() -> Admission | None:
    """The admission of the method that runs on this thread; a thread that it started may have copied its context."""
    admission = current_scope.get().admission
    return None if admission is None or admission.owner != threading.get_ident() else admission
