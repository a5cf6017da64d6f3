"""Publish and subscribe between members."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, ClassVar, get_args

from raytorchrpc.calls.member import LocalMember
from raytorchrpc.errors import (
    Closed,
    ConfigurationError,
    Empty,
    NotFound,
    PeerBusy,
    PeerLost,
    RayTorchRpcError,
    RpcTimeout,
)
from raytorchrpc.patterns import handle
from raytorchrpc.patterns.handle import Steps, arun, membership, new_ticket, run
from raytorchrpc.patterns.queues.channel import RETURNS, Channel, Items
from raytorchrpc.patterns.queues.home import Home
from raytorchrpc.patterns.queues.outlet import Outlet, Policy
from raytorchrpc.patterns.queues.queue import counted
from raytorchrpc.patterns.queues.store import EMPTY, ENDED

#: Items in one message of ``publish_many``. A buffer that is empty takes all of them, however small it is.
_MOST = 64


class Topic(Channel):
    """What is published goes to everybody who has subscribed by then.

    It lives in one member, its home, as a ``Queue`` does, with the same rules for items, blocking and errors. Every
    subscriber has a buffer there, so an item crosses to the home once and from there once to each subscriber. Each gets
    it at most once: what is on its way to a subscriber that dies is lost, and so is its buffer. With ``block`` a slow
    subscriber holds the publishers up; with the other policies nobody is held up, and it misses items.
    """

    kind: ClassVar[str] = "topic"

    def __init__(self, name: str, *, home: Any = None, publishers: int = 1) -> None:
        """The topic of that name, as for ``Queue``. ``publishers``: how many calls of ``close`` end the stream."""
        super().__init__(name, home, (counted("publishers", publishers),))

    @property
    def _most(self) -> int:
        return _MOST

    def publish(self, item: Any, timeout: float | None = None) -> None:
        """Give an item to all subscribers; with none, it is gone.

        Blocks while the buffer of one with ``block`` is full; then raises Full, and nobody gets it. Closed if it is.
        """
        run(self._put((item,), timeout))

    def publish_many(self, items: Iterable[Any], timeout: float | None = None) -> None:
        """Several, in order, with few messages; see ``Queue.put_many``."""
        run(self._put(list(items), timeout))

    async def apublish(self, item: Any, timeout: float | None = None) -> None:
        """As ``publish``, for coroutines."""
        await arun(self._put((item,), timeout, in_turn=True))

    def subscribe(self, policy: Policy = "block", *, maxsize: int = 64, max_bytes: int | None = None) -> Subscription:
        """Get what is published from now on. Blocks for an answer of the home's.

        Args:
            policy: what happens when the buffer is full. ``block``: publishers wait. ``drop_oldest``: its oldest item
                goes. ``latest``: only the newest item is ever there.
            maxsize: items in the buffer; 1 for ``latest``.
            max_bytes: likewise; None: a quarter of the memory that the home may use.
        """
        return run(self._subscribe(policy, maxsize, max_bytes))

    async def asubscribe(
        self, policy: Policy = "block", *, maxsize: int = 64, max_bytes: int | None = None
    ) -> Subscription:
        """As ``subscribe``, for coroutines."""
        return await arun(self._subscribe(policy, maxsize, max_bytes))

    def _subscribe(self, policy: Policy, maxsize: int, max_bytes: int | None) -> Steps[Subscription]:
        if policy not in get_args(Policy):
            raise ConfigurationError(f"policy= is one of {', '.join(get_args(Policy))}, not {policy!r}")
        size = 1 if policy == "latest" else counted("maxsize", maxsize)
        most = None if max_bytes is None else counted("max_bytes", max_bytes)
        local, _ = yield from membership()
        route = yield from self._ready(local)
        key = f"{local.incoming.token}.{new_ticket()}"  # the token says whose it is, see _subscribe
        args = (self._name, self._life, key, policy, size, most)
        if route is None:
            _subscribe(local, local.me.rank, *args)
        else:
            asked = self._sent(local, _SUBSCRIBE, args, None)
            try:
                yield from self._answered(asked)
            except BaseException:  # the buffer may have been made, or will be: it is not to hold up anybody
                call: Any = asked._call

                def cancel() -> None:
                    self._tell_home(local, _CANCEL, (self._name, self._life, key), RETURNS)

                call.add_done_callback(lambda: local.workers.submit(cancel))
                raise
            finally:
                del asked  # it holds what it raised, which holds this frame
        return Subscription(self, key)

    def close(self, *, force: bool = False) -> None:
        """This publisher has published its last item; see ``Queue.close``. What waits for subscribers stays theirs."""
        run(self._end(force))

    async def aclose(self, *, force: bool = False) -> None:
        """As ``close``, for coroutines."""
        await arun(self._end(force))

    def stats(self) -> dict[str, int | bool]:
        """``subscribers``; ``items`` and ``bytes`` that wait, ``taken`` and ``dropped`` so far, of all of them
        together; items ``put`` (published); ``waiting_to_put``, ``waiting_to_get``; ``closed``.
        """
        numbers: dict[str, int | bool] = run(self._numbers(None))
        return {"subscribers" if key == "outlets" else key: value for key, value in numbers.items()}


class Subscription:
    """One subscriber's end of a topic; belongs to the process that made it. A context manager: leaving cancels it."""

    def __init__(self, topic: Topic, key: str) -> None:
        """Made by ``Topic.subscribe``."""
        self._topic, self._key = topic, key
        self._cancelled = False

    def get(self, timeout: float | None = None, *, keep: bool = False) -> Any:
        """The oldest item in the buffer; as ``Queue.get``. Closed at the end of the stream, or once cancelled."""
        return self._checked(run(self._take(1, timeout, keep)))[0]

    def get_many(self, limit: int, timeout: float | None = None, *, keep: bool = False) -> list[Any]:
        """As ``Queue.get_many``."""
        taken: list[Any] = self._checked(run(self._take(counted("limit", limit), timeout, keep)))
        return taken

    async def aget(self, timeout: float | None = None, *, keep: bool = False) -> Any:
        """As ``get``, for coroutines."""
        return self._checked(await arun(self._take(1, timeout, keep)))[0]

    def _take(self, limit: int, timeout: float | None, keep: bool) -> Steps[Any]:
        if self._was_cancelled():
            return ENDED
        try:
            return (yield from self._topic._take(self._key, limit, timeout, keep))
        except NotFound:
            if self._was_cancelled():  # meanwhile
                return ENDED
            raise

    def _was_cancelled(self) -> bool:
        return self._cancelled

    def _checked(self, taken: Any) -> Any:
        if taken is EMPTY:
            raise Empty(f"nothing was published to topic {self._topic.name!r} in time")
        if taken is ENDED:
            raise Closed(f"topic {self._topic.name!r} is closed, or this subscription was cancelled")
        return taken

    def items(self, *, batch: int = 1, keep: bool = False) -> Items:
        """Iterate over what comes; as ``Queue.items``."""
        return Items(lambda limit: self._take(limit, None, keep), batch)

    def __iter__(self) -> Iterator[Any]:
        return self.items()

    def __aiter__(self) -> AsyncIterator[Any]:
        return self.items()

    def stats(self) -> dict[str, int | bool]:
        """``items`` and ``bytes`` in the buffer; ``taken`` and ``dropped`` so far."""
        numbers = run(self._topic._numbers(self._key))
        return {key: numbers[key] for key in ("items", "bytes", "taken", "dropped")}

    def cancel(self) -> None:
        """Get nothing more; what waits is dropped. Idempotent; also if the home is gone, or away for a while."""
        self._cancelled = True
        with suppress(RayTorchRpcError):
            run(self._cancel())

    def _cancel(self) -> Steps[None]:
        (local, _), topic = (yield from membership()), self._topic
        args = (topic.name, topic._life, self._key)
        if topic._route(local) is None:
            _cancel(local, local.me.rank, *args)
            return
        try:
            yield from topic._ask(local, _CANCEL, args, None)
        except (PeerBusy, PeerLost, RpcTimeout):
            topic._tell_home(local, _CANCEL, args, RETURNS)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a subscription belongs to the process that made it: send the Topic, and subscribe there")


# --- at home -------------------------------------------------------------------------------------------------

_SUBSCRIBE, _CANCEL = "raytorchrpc.subscribe", "raytorchrpc.cancel"


def _make(local: LocalMember, name: str, settings: Any) -> Home:
    return Home(local, f"topic {name!r}", settings, settings[0], shared=True)


def _subscribe(
    local: LocalMember,
    caller: int,
    name: str,
    life: int | None,
    key: str,
    policy: Policy,
    maxsize: int,
    max_bytes: int | None,
) -> None:
    home: Home = local.services.find(Topic.kind, name, life, local.me.name)
    process = key.rpartition(".")[0]
    home.add(key, Outlet(maxsize, max_bytes or local.max_bytes, policy, caller, process))


def _cancel(local: LocalMember, caller: int, name: str, life: int | None, key: str) -> None:
    with suppress(NotFound):
        local.services.find(Topic.kind, name, life, local.me.name).remove(key)


handle.makes(Topic.kind, _make)
handle.serve(_SUBSCRIBE, _subscribe)
handle.serve(_CANCEL, _cancel)
