"""Objects that live in a member beside its actor, by kind and name: queues, topics, weight stores.

Their methods are services (``Exposed.service``). A service runs on a thread of the member's own, without an admission
of the actor. If it has to wait, it returns a ``DeferredReply`` and frees its thread.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Protocol, TypeVar

from raytorchrpc.errors import ConfigurationError, NotAMember, NotFound
from raytorchrpc.process.locks import Lock
from raytorchrpc.tensors.kept_errors import again, untraced

T = TypeVar("T", bound="Served")

#: How many objects that have ended a member remembers, the last ones; about five kilobytes each.
ENDED_KEPT = 2_000


def _unchanged(value: Any) -> Any:
    return value


class DeferredReply(Future[Any]):
    """A reply that is not ready. The request is answered once this is settled."""

    convert: Callable[[Any], Any] = staticmethod(_unchanged)
    """Converts the value into the reply, on the sending thread."""
    context: Callable[[], AbstractContextManager[Any]] = staticmethod(nullcontext)
    """Entered by the sending thread while it converts the value and sends the reply."""

    def settle(self, value: Any, error: BaseException | None = None) -> bool:
        """Settle it; False if it was settled or cancelled before. Runs the callbacks on this thread."""
        try:
            if error is None:
                self.set_result(value)
            else:
                self.set_exception(untraced(error))
        except InvalidStateError:
            return False
        vars(self)[
            "_done_callbacks"
        ].clear()  # called by now; they lead to this, and only the collector could free both
        return True

    def result(self, timeout: float | None = None) -> Any:
        """As that of its class, but the error stays without a traceback."""
        error = self.exception(timeout)
        if error is not None:
            raise again(error)
        return super().result(0)

    def wait(self, timeout_s: float) -> bool:
        """Block until it is settled, at most ``timeout_s``; whether it is."""
        with suppress(FutureTimeoutError):
            self.exception(timeout_s)  # returns the error, if there is one
        return self.done()

    def outcome(self) -> Any:
        """The converted value, or raises the error; only once it is done."""
        return self.convert(self.result(0))


class Served(Protocol):
    """An object that lives in a member."""

    instance_id: int
    """Set by ``Services.open``; differs for each object of the same name."""

    def lose(self, rank: int) -> None:
        """That member is away or gone: stop waiting for it. Quick."""

    def keep_only(self, rank: int, process: str | None) -> None:
        """Drop everything on behalf of that member's other processes. Quick.

        ``process``: the token of its present process, which may be the one that was away; None: it has none.
        """

    def close(self, error: Exception) -> None:
        """This member leaves the group: fail all waits with the error."""


class Services:
    """The objects that live in one member, by kind and name. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._served: dict[tuple[str, str], Any] = {}
        self._ended: dict[tuple[str, str], Any] = {}
        """Objects that have nothing to do but to answer those who come late. The oldest come first."""
        self._closed = False

    def open(self, kind: str, name: str, make: Callable[[], T]) -> T:
        """The object of that name, which is made if there is none."""
        with self._lock:
            if self._closed:
                raise NotAMember("this process has left the group")
            served: Any = self._there(kind, name)
            if served is None:
                served = make()
                served.instance_id = secrets.randbits(62)
                self._served[kind, name] = served  # last: ``find`` takes no lock
            return served  # type: ignore[no-any-return]

    def find(self, kind: str, name: str, instance_id: int | None, me: str) -> Any:
        """The object of that name and instance (``instance_id`` None: of any instance). Hot path.

        Raises NotFound. ``me``: this member's name, for the message.
        """
        served = self._there(kind, name)
        if served is None or (instance_id is not None and served.instance_id != instance_id):
            raise NotFound(self._why_not(kind, name, instance_id, me))
        return served

    def _there(self, kind: str, name: str) -> Any:
        """The object of that name, or None."""
        return self._served.get((kind, name)) or self._ended.get((kind, name))

    def retire(self, kind: str, name: str, served: Served) -> None:
        """Keep an object only to answer those who come late, and not for ever. No effect if it is not there."""
        with self._lock:
            if self._served.get((kind, name)) is served:
                self._ended[kind, name] = served  # first: ``_there`` takes no lock, and looks there last
                del self._served[kind, name]
                if len(self._ended) > ENDED_KEPT:
                    del self._ended[next(iter(self._ended))]

    def revive(self, kind: str, name: str, served: Served) -> None:
        """Have a retired object again. Raises NotFound if it is not kept any more."""
        with self._lock:
            if self._ended.get((kind, name)) is not served:
                raise NotFound(f"{kind} {name!r} is not kept any more")
            self._served[kind, name] = self._ended[kind, name]
            del self._ended[kind, name]

    def delete(self, kind: str, name: str, instance_id: int | None, me: str) -> None:
        """End an object; see ``find``. What waits for it raises NotFound."""
        with self._lock:
            served = self._there(kind, name)
            if served is None or (instance_id is not None and served.instance_id != instance_id):
                raise NotFound(self._why_not(kind, name, instance_id, me))
            if readers := getattr(served, "readers", 0):
                raise ConfigurationError(
                    f"{kind} {name!r} in member {me!r} is being read ({readers} pulls or views): let them end, then "
                    f"delete it again"
                )
            self._served.pop((kind, name), None)
            self._ended.pop((kind, name), None)
        served.close(NotFound(f"{kind} {name!r} in member {me!r} was deleted"))

    def _why_not(self, kind: str, name: str, instance_id: int | None, me: str) -> str:
        there = ", ".join(sorted(name for of_kind, name in list(self._served) if of_kind == kind)) or "none"
        if instance_id is None:
            return (
                f"member {me!r} has no {kind} {name!r}: it was never created there, or was deleted, or its process has "
                f"restarted since (there: {there})"
            )
        new = f"; the {kind} {name!r} that is there now is a new one" if (kind, name) in self._served else ""
        return (
            f"member {me!r} has no {kind} {name!r} for this handle any more: the one that the handle belongs to ended "
            f"when its home was restarted or another group was formed, or was deleted{new}. Make a handle by name "
            f"again, or find() one (there: {there})"
        )

    def get(self, kind: str, name: str) -> Any:
        """The object of that name, or None."""
        return self._there(kind, name)

    def metric_rows(self) -> list[Any]:
        """What the objects that have a ``metric_rows(kind, name)`` show in the metrics: ``QueueStats``."""
        with self._lock:
            served = [(*key, each) for key, each in self._served.items() if hasattr(each, "metric_rows")]
        return [row for kind, name, each in served for row in each.metric_rows(kind, name)]

    def names(self, kind: str) -> list[str]:
        with self._lock:
            return [name for of_kind, name in self._served if of_kind == kind]

    def lose(self, rank: int, ended: bool) -> None:
        """A member is away; ``ended``: it can only come back as another process."""
        with self._lock:
            everything = list(self._served.values())
        for served in everything:
            served.lose(rank)
            if ended:
                served.keep_only(rank, None)

    def activate(self, rank: int, process: str) -> None:
        """A member is present (again), as the process with that token."""
        with self._lock:
            everything = list(self._served.values())
        for served in everything:
            served.keep_only(rank, process)

    def close(self) -> None:
        """Drop everything. Idempotent."""
        with self._lock:
            self._closed = True
            everything, self._served = list(self._served.values()), {}
            self._ended.clear()
        for served in everything:
            served.close(NotAMember("this process has left the group (it was shut down)"))
