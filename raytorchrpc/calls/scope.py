"""The scope of the running code: its chain of calls, its deadline and its admission."""

from __future__ import annotations

import asyncio
import itertools
import sys
from contextvars import ContextVar
from typing import Any, NamedTuple

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
        self.windows: dict[int, Any] = {}
        """Credit windows by the peer's rank, for the calls made on behalf of this one; see ``flow_control``."""


class Scope(NamedTuple):
    """The scope of the code that runs in this context. Calls that it makes inherit it."""

    path: tuple[Token, ...] = ()
    """Tokens of the admissions held along the chain of calls, oldest first, with this process's own."""
    limit: Limit | None = None
    """Of the served call; calls made on its behalf end by then too."""
    admission: Any = None
    """The ``gates.Admission`` that the running method holds, if any."""

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
        return Scope((*self.path, token), self.limit, admission)

    def inside(self, admission: Any) -> Scope:
        """The scope of a method that runs inside ``admission`` on behalf of this scope."""
        if admission is None or admission.token in self.path:
            return self._replace(admission=admission)
        return Scope((*self.path, admission.token), self.limit, admission)


NO_SCOPE = Scope()


current_scope: ContextVar[Scope] = ContextVar("raytorchrpc_scope", default=NO_SCOPE)
