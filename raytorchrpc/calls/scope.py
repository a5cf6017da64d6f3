"""The scope of the running code: its chain of calls, its deadline and its admission, which it lends while it waits."""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from typing import Any, NamedTuple, Protocol, TypeVar

from raytorchrpc.errors import RayTorchRpcError
from raytorchrpc.process import this_process

Token = str

_tokens = itertools.count()


def new_token() -> Token:
    """A token that is unique among all processes."""
    return f"{this_process.unique}.{next(_tokens)}"


def token_of_threads() -> Token:
    """The token of all methods that run on a thread here without an admission."""
    return f"{this_process.unique}.thread"


def is_of_this_process(token: Token) -> bool:
    return token.startswith(this_process.unique)


def on_loop() -> bool:
    """Whether this thread is running an event loop."""
    return asyncio._get_running_loop() is not None  # get_running_loop would raise in most calls


def refuse_on_loop(operation: str, instead: str) -> None:
    """Raise RayTorchRpcError if this thread runs an event loop, which waiting for ``operation`` would block.

    Cells of a notebook run on the loop of IPython, which waits for them anyway.
    """
    if on_loop() and not _runs_cells():
        raise RayTorchRpcError(f"{operation} would block this thread's event loop: use {instead}")


def _runs_cells() -> bool:
    ipython = sys.modules.get("IPython")
    return ipython is not None and ipython.get_ipython() is not None


class Limit:
    """The deadline of a served call (``time.monotonic``); no longer in force once the call is over.

    Tasks and threads that a method leaves behind inherit its context and may outlive its deadline.
    """

    __slots__ = ("at", "over", "windows")

    def __init__(self, at: float) -> None:
        self.at = at
        self.over = False
        self.windows: dict[str, dict[int, Any]] = {}
        """Credit windows by the group's generation and the peer's rank, for the calls made on behalf of this one; see
        ``flow_control``."""


class AdmissionState(Enum):
    """Of a ``gates.Admission``."""

    HELD = "its method runs"
    LENT = "its method waits, and others may run until it goes on"
    GIVEN_UP = "its method is over"


HELD, LENT, GIVEN_UP = AdmissionState


class Scope(NamedTuple):
    """The scope of the code that runs in this context. Calls that it makes inherit it."""

    path: tuple[Token, ...] = ()
    """Tokens of the admissions held along the chain of calls, oldest first, with this process's own."""
    limit: Limit | None = None
    """Of the served call; calls made on its behalf end by then too."""
    admission: Any = None
    """The ``gates.Admission`` that the running method holds, if any."""
    group: str = ""
    """The generation of the group whose call this serves."""

    @property
    def deadline(self) -> float | None:
        """The deadline in force, if any (``time.monotonic``)."""
        return None if self.limit is None or self.limit.over else self.limit.at

    @property
    def holds_a_thread(self) -> bool:
        """Whether a method in this process may be waiting for this call."""
        return any(map(is_of_this_process, self.path))

    def on_a_thread(self, admission: Any) -> Scope:
        """As ``inside``; the path also marks a method without an admission."""
        token = token_of_threads() if admission is None else admission.token
        if token in self.path:
            return self if admission is self.admission else self._replace(admission=admission)
        return Scope((*self.path, token), self.limit, admission, self.group)

    def inside(self, admission: Any) -> Scope:
        """The scope of a method that runs inside ``admission`` on behalf of this scope."""
        if admission is None or admission.token in self.path:
            return self._replace(admission=admission)
        return Scope((*self.path, admission.token), self.limit, admission, self.group)


NO_SCOPE = Scope()


current_scope: ContextVar[Scope] = ContextVar("raytorchrpc_scope", default=NO_SCOPE)


# --- waits of a method that let others run ---------------------------------------------------------------------------

F = TypeVar("F", bound=Callable[..., Any])


class Waitable(Protocol):
    """Something to wait for: a call in flight, a Completion."""

    def wait(self, timeout_s: float) -> bool:
        """Block until done, at most ``timeout_s``; whether it is done."""


def wait_serving(pending: Waitable, timeout_s: float) -> bool:
    """Block until ``pending`` is done, and let other methods of this actor run meanwhile; see ``gates``.

    False if ``timeout_s`` passes first. Returns only when it is this method's turn again.
    """
    if current_scope.get().admission is None or timeout_s <= 0 or (admission := _held_admission()) is None:
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

    Examples:
        >>> def act(self):  # a method of a sync actor
        ...     with rtr.allow_calls():  # others may call it meanwhile
        ...         return ray.get(self.environment.step.remote())
    """
    if (admission := _held_admission()) is None:
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


def _held_admission() -> Any:
    """The admission that the method on this thread holds, if any.

    None on a thread that the method has started in a copy of its context; and in a signal handler, if the method that
    it has interrupted has lent the admission already.
    """
    admission = current_scope.get().admission
    is_own = admission is not None and admission.owner == threading.get_ident()
    return admission if is_own and admission.state is HELD else None
