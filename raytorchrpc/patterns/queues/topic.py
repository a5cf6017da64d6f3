"""Publish and subscribe between members."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any, ClassVar, get_args

from raytorchrpc.calls.member import LocalMember
from raytorchrpc.errors import Closed, ConfigurationError, Empty, NotFound, RayTorchRpcError
from raytorchrpc.patterns.handle import Steps, arun, checked_count, request_ids, run
from raytorchrpc.patterns.home import Kind
from raytorchrpc.patterns.queues.buffer import Policy
from raytorchrpc.patterns.queues.channel import RETURNS, Channel, Consumer
from raytorchrpc.patterns.queues.services import CANCEL, SUBSCRIBE, HomeStore
from raytorchrpc.patterns.queues.store import ENDED


class Topic(Channel):
    """Delivers each published item to all current subscribers.

    A topic lives in one member, its home, like a ``Queue``; the rules for items, blocking and errors are the same.
    Every subscriber has a buffer at the home, so an item crosses to the home once, and from there once to each
    subscriber.

    Each subscriber gets an item at most once. If a subscriber dies, its buffer and the items in flight to it are lost.
    With policy ``block`` a slow subscriber holds up the publishers. With the other policies it holds up nothing, and
    loses items instead.
    """

    kind: ClassVar[str] = "topic"
    #: An empty buffer takes all of a message, however small it is.
    _message_length = 64

    def __init__(self, name: str, *, home: Any = None, publishers: int = 1) -> None:
        """Refer to the topic of this name, and create it if its home has none; see ``Queue``.

        Args:
            name: identifies the topic in its home.
            home: as for ``Queue``.
            publishers: how many calls of ``close`` end the stream, one for each publisher.
        """
        super().__init__(name, home, (checked_count("publishers", publishers),))

    def publish(self, item: Any, timeout: float | None = None) -> None:
        """Deliver an item to all subscribers; without subscribers it is dropped.

        Blocks while the buffer of a subscriber with policy ``block`` is full. Raises Full after ``timeout`` seconds
        (None: ``rpc_timeout_s``), and then no subscriber gets the item; Closed if the topic is closed.
        """
        run(self._put((item,), timeout))

    def publish_many(self, items: Iterable[Any], timeout: float | None = None) -> None:
        """Deliver several items, in order, with few messages; see ``Queue.put_many``."""
        run(self._put(list(items), timeout))

    async def apublish(self, item: Any, timeout: float | None = None) -> None:
        """Like ``publish``, for coroutines."""
        await arun(self._put((item,), timeout, in_turn=True))

    def subscribe(self, policy: Policy = "block", *, maxsize: int = 64, max_bytes: int | None = None) -> Subscription:
        """Subscribe to the items that are published from now on. Blocks for an answer of the home.

        Args:
            policy: what happens when the buffer is full. ``block``: publishers wait. ``drop_oldest``: its oldest item
                is dropped. ``latest``: the buffer only ever holds the newest item.
            maxsize: most items in the buffer; 1 for ``latest``.
            max_bytes: most bytes in the buffer. None: a quarter of the memory that the home may use.
        """
        return run(self._subscribe(policy, maxsize, max_bytes))

    async def asubscribe(
        self, policy: Policy = "block", *, maxsize: int = 64, max_bytes: int | None = None
    ) -> Subscription:
        """Like ``subscribe``, for coroutines."""
        return await arun(self._subscribe(policy, maxsize, max_bytes))

    def _subscribe(self, policy: Policy, maxsize: int, max_bytes: int | None) -> Steps[Subscription]:
        if policy not in get_args(Policy):
            raise ConfigurationError(f"policy= must be one of {', '.join(get_args(Policy))}, not {policy!r}")
        size = 1 if policy == "latest" else checked_count("maxsize", maxsize)
        most = None if max_bytes is None else checked_count("max_bytes", max_bytes)
        local, _ = yield from self._begin()
        at_home = yield from self._bind(local)
        process = local.incoming.token
        key = f"{process}.{next(request_ids)}"
        args = (*self._address, key, policy, size, most, process)
        if at_home:
            yield from self._request(local, SUBSCRIBE, args)
            return Subscription(self, key)
        sent = self._send(local, SUBSCRIBE, args, None)
        try:
            yield from self._response(sent)
        except BaseException:  # the home may have made the buffer, or will: it must not hold up publishers
            call: Any = sent._call

            def cancel() -> None:
                self._notify_home(local, CANCEL, (*self._address, key), RETURNS)

            call.add_done_callback(lambda: local.workers.submit(cancel))
            raise
        finally:
            del sent  # see _response
        return Subscription(self, key)

    def stats(self) -> dict[str, int | bool]:
        """Return counts from the home; blocks for its answer.

        ``subscribers``; of all of them together, ``items`` and ``bytes`` that wait and items ``taken`` and ``dropped``
        so far; items ``put`` (published); ``waiting_to_put`` and ``waiting_to_get``: operations that wait at the home;
        ``closed``.
        """
        return {"subscribers" if key == "buffers" else key: value for key, value in self._stats(None).items()}


class Subscription(Consumer):
    """One subscriber's end of a topic. ``Topic.subscribe`` makes it.

    It belongs to the process that made it, and cannot be pickled. It is a context manager: leaving it cancels it. Its
    operations behave like those of a ``Queue``; ``get`` also raises Closed once the subscription is cancelled.
    """

    def __init__(self, topic: Topic, key: str) -> None:
        """``Topic.subscribe`` calls this."""
        self._topic, self._key = topic, key
        self._cancelled = False

    def _take(self, limit: int, timeout: float | None, keep: bool, least: int = 1) -> Steps[Any]:
        if self._is_cancelled():
            return ENDED
        try:
            return (yield from self._topic._take_from(self._key, limit, timeout, keep, least))
        except NotFound:
            if self._is_cancelled():  # meanwhile
                return ENDED
            raise

    def _is_cancelled(self) -> bool:
        return self._cancelled

    def _nothing(self, ended: bool) -> Exception:
        if ended:
            return Closed(f"topic {self._topic.name!r} is closed, or this subscription was cancelled")
        return Empty(f"nothing was published to topic {self._topic.name!r} in time")

    def stats(self) -> dict[str, int | bool]:
        """Return ``items`` and ``bytes`` in the buffer, and items ``taken`` and ``dropped`` so far."""
        stats = self._topic._stats(self._key)
        return {key: stats[key] for key in ("items", "bytes", "taken", "dropped")}

    def cancel(self) -> None:
        """End the subscription and drop the items in its buffer.

        Idempotent. Raises nothing if the home is gone, or cannot be reached for a while.
        """
        self._cancelled = True
        with suppress(RayTorchRpcError):
            run(self._cancel())

    def _cancel(self) -> Steps[None]:
        topic = self._topic
        local, _ = yield from topic._begin()
        args = (*topic._address, self._key)
        try:
            yield from topic._request(local, CANCEL, args)
        except NotFound:
            return
        except RayTorchRpcError:
            topic._notify_home(local, CANCEL, args, RETURNS)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *raised: object) -> None:
        self.cancel()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a subscription belongs to the process that made it: send the Topic, and subscribe there")


def _create(local: LocalMember, name: str, settings: Any) -> HomeStore:
    return HomeStore(local, f"topic {name!r}", settings, settings[0], shared=True)


KINDS = {Topic.kind: Kind(_create, ("publishers",))}
