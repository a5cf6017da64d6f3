"""The scope of the running code: its chain of calls, its deadline and its admission."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, NamedTuple

from raytorchrpc.calls.event_loops import Token, is_of_this_process, token_of_threads
from raytorchrpc.calls.gates import Admission


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
    admission: Admission | None = None

    @property
    def deadline(self) -> float | None:
        """The deadline in force, if any (``time.monotonic``)."""
        return None if self.limit is None or self.limit.over else self.limit.at

    @property
    def holds_a_thread(self) -> bool:
        """Whether a method in this process may be waiting for this call."""
        return any(map(is_of_this_process, self.path))

    def on_a_thread(self, admission: Admission | None) -> Scope:
        """As ``inside``; the path also marks a method without an admission."""
        if admission is not None or (token := token_of_threads()) in self.path:
            return self.inside(admission)
        return Scope((*self.path, token), self.limit)

    def inside(self, admission: Admission | None) -> Scope:
        """The scope of a method that runs inside ``admission`` on behalf of this scope."""
        if admission is None or admission.token in self.path:
            return self._replace(admission=admission)
        return Scope((*self.path, admission.token), self.limit, admission)


NO_SCOPE = Scope()


current_scope: ContextVar[Scope] = ContextVar("raytorchrpc_scope", default=NO_SCOPE)
