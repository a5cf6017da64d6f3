"""Queues and topics: the handles that users hold, and the iterators that they get from them."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, get_args

from raytorchrpc.calls.options import takes_timeout
from raytorchrpc.errors import Closed, ConfigurationError, Empty, NotFound, RayTorchRpcError
from raytorchrpc.patterns.handle import Steps, arun, checked_count, request_ids, run
from raytorchrpc.patterns.queues.channel import RETURNS, Channel
from raytorchrpc.patterns.queues.services import CANCEL, QUEUE_BUFFER, SUBSCRIBE
from raytorchrpc.patterns.queues.store import EMPTY, ENDED, Policy, Request


class Items:
    """Iterates over the items that arrive, by ``for`` or ``async for``, until the stream ends."""

    def __init__(self, take: Callable[[Request], Steps[Any]], limit: int, make: Callable[[deque[Any]], Any]) -> None:
        """``limit``: most items to take at once. ``make``: takes what a step yields from the items that are here."""
        self._take, self._limit, self._make = take, limit, make
        self._number = next(request_ids)
        self._taken: deque[Any] = deque()
        self._least = 1  # how many items the next step needs
        self._drop_last = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if len(self._taken) < self._least and not run(self._fill()):
            raise StopIteration
        return self._make(self._taken)

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        if len(self._taken) < self._least and not await arun(self._fill()):
            raise StopAsyncIteration
        return self._make(self._taken)

    def _fill(self) -> Steps[bool]:
        """Take the items of the next step; returns whether there is one."""
        while len(self._taken) < self._least:
            missing = self._least - len(self._taken)
            taken = yield from self._take(Request(self._limit - len(self._taken), missing, self._number))
            if taken is ENDED:
                self._least = 1  # the last batch is smaller
                if self._drop_last:
                    self._taken.clear()
                return bool(self._taken)
            self._taken.extend(taken or ())
        return True


class Batches(Items):
    """Iterates over the items that arrive as batches of equal size, collated."""

    def __init__(
        self,
        take: Callable[[Request], Steps[Any]],
        size: int,
        collate: Callable[[list[Any]], Any] | None,
        drop_last: bool,
    ) -> None:
        super().__init__(take, checked_count("size", size), self._collated)
        self._least, self._collate, self._drop_last = size, collate, drop_last

    def _collated(self, taken: deque[Any]) -> Any:
        items = list(taken)
        taken.clear()
        if self._collate is not None:
            return self._collate(items)
        from torch.utils.data import default_collate

        try:
            return default_collate(items)
        except (TypeError, RuntimeError, KeyError) as error:
            raise ConfigurationError(
                f"these {len(items)} items do not collate, and are lost: {error}; put items of like shapes, or pass "
                f"batches(..., collate=f), where f takes their list (collate=list leaves them as they are)"
            ) from error


class Consumer:
    """Takes items from one buffer at the home."""

    def _take(self, request: Request, timeout: float | None, keep: bool) -> Steps[Any]:
        """Take items: a list of values, EMPTY or ENDED; see ``Channel._take_from``."""
        raise NotImplementedError

    def _nothing(self, ended: bool) -> Exception:
        """The error for ENDED, or for EMPTY."""
        raise NotImplementedError

    @takes_timeout
    def get(self, timeout: float | None = None, *, keep: bool = False) -> Any:
        """Take the oldest item.

        Blocks until there is one. Raises Empty after the timeout, Closed at the end of the stream.

        Args:
            timeout: seconds; None: ``rpc_timeout_s``.
            keep: copy the item's tensors into memory of their own, see ``rpc_sync``.
        """
        return run(self._get_many(1, timeout, 1, keep))[0]

    @takes_timeout
    def get_many(self, limit: int, timeout: float | None = None, *, min: int = 1, keep: bool = False) -> list[Any]:
        """Take up to ``limit`` items, with few messages.

        Blocks until there are ``min`` items, by default one; then returns those that wait, at most 32 MiB beyond
        ``min``. Returns fewer than ``min`` at the end of the stream, or after the timeout, if there is at least one.
        ``timeout``, ``keep`` and errors are those of ``get``.
        """
        return run(self._get_many(limit, timeout, min, keep))

    def get_nowait_batch(self, count: int) -> list[Any]:
        """Take ``count`` items, or raise Empty at once and take none. Other errors are those of ``get``."""
        whole = Request(
            checked_count("count", count), count, next(request_ids)
        )  # as an iteration's, which gets no less
        taken = run(self._take(whole, 0, False))
        if taken is EMPTY or taken is ENDED:
            raise self._nothing(taken is ENDED)
        return list(taken)

    async def aget(self, timeout: float | None = None, *, keep: bool = False) -> Any:
        """Like ``get``, for coroutines. If it is cancelled, an item that arrives for it goes back to its place."""
        return (await arun(self._get_many(1, timeout, 1, keep)))[0]

    async def aget_many(
        self, limit: int, timeout: float | None = None, *, min: int = 1, keep: bool = False
    ) -> list[Any]:
        """Like ``get_many``, for coroutines. If it is cancelled, items that arrive for it go back to their place."""
        return await arun(self._get_many(limit, timeout, min, keep))

    def _get_many(self, limit: int, timeout: float | None, least: int, keep: bool) -> Steps[list[Any]]:
        if checked_count("min", least) > checked_count("limit", limit):
            raise ConfigurationError(f"min={least} exceeds limit={limit}, the most items to take")
        taken = yield from self._take(Request(limit, least), timeout, keep)
        if taken is EMPTY or taken is ENDED:
            raise self._nothing(taken is ENDED)
        return taken  # type: ignore[no-any-return]

    def items(self, *, batch: int = 1, keep: bool = False) -> Items:
        """Return an iterator, for ``for`` and ``async for``, that yields single items until the stream ends.

        Args:
            batch: most items that one message brings. This consumer then has all of them; no other one gets them.
            keep: as for ``get``.
        """
        return Items(lambda request: self._take(request, None, keep), checked_count("batch", batch), deque.popleft)

    def batches(
        self,
        size: int,
        *,
        collate: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        keep: bool = False,
    ) -> Batches:
        """Return an iterator, for ``for`` and ``async for``, that yields batches until the stream ends.

        Waits for ``size`` items and stacks them along a new first dimension: items ``{"x": tensor of shape (84, 84)}``
        become ``{"x": tensor of shape (size, 84, 84)}``.

        Args:
            size: items in a batch. The last one of the stream may be smaller.
            collate: makes the batch of a list of items. None: ``torch.utils.data.default_collate``, which takes
                tensors, arrays and numbers of like shapes, also in dicts, tuples and lists. ``list``: leave the items
                as they are.
            drop_last: leave out a last batch that is smaller.
            keep: as for ``get``; useful only with a ``collate`` that keeps the items.

        The iteration raises ConfigurationError for items that ``default_collate`` cannot collate; they are lost.
        """
        return Batches(lambda request: self._take(request, None, keep), size, collate, drop_last)

    def __iter__(self) -> Iterator[Any]:
        return self.items()

    def __aiter__(self) -> AsyncIterator[Any]:
        return self.items()


class Queue(Consumer, Channel):
    """A bounded queue with any number of producers and consumers among the members of a group.

    The queue lives in one member, its home, and ends with that process or with the group. Other members refer to it by
    its name, or by this handle, which can be pickled and sent anywhere. An item is anything that a call can carry,
    except RRefs, and crosses like the argument of a call. What a consumer takes is its own. Each item is taken at most
    once; an item in flight is lost if its consumer or the home dies. Items of one producer keep their order.

    An item crosses twice: from its producer to the home, and from there to its consumer. It does not cross where the
    home is one of them. A large CPU tensor costs one copy each time that it crosses within a host. The home copies what
    it puts itself, so that it can be changed afterwards. A waiting item may lie in shared memory of its producer; the
    home copies items beyond a quarter of that memory (``GroupConfig.shm_bytes``).

    A driver that formed the group, or fetched a detached one with ``get_group``, can use the queue without being a
    member. Its items then travel over a socket, and cannot hold CUDA tensors.

    The home serves the queue on threads of its own, beside its actor's methods. All operations block, at most
    ``timeout`` seconds (None: ``rpc_timeout_s``); inside a method that serves a call, they end with that call.
    Operations whose names begin with ``a`` are for coroutines. Thread-safe.

    Each operation may raise PeerLost if the home is lost, and RpcTimeout if the home has not answered 0.5 s after the
    timeout (1 s if the timeout is 0). It raises NotFound if this queue has ended: the home was restarted, or the group
    formed again, since this handle was first used.

    Examples:
        >>> jobs = rtr.Queue("jobs", home="learner", maxsize=100)
        >>> jobs.put({"seed": 1})
        >>> jobs.get(timeout=5)
        {'seed': 1}
    """

    kind: ClassVar[str] = "queue"

    def __init__(
        self,
        name: str,
        *,
        home: Any = None,
        maxsize: int = 1024,
        max_bytes: int | None = None,
        producers: int = 1,
        group: str | None = None,
    ) -> None:
        """Refer to the queue of this name, and create it if its home has none.

        The home creates it at once, any other process when it first uses the handle.

        Args:
            name: identifies the queue in its home.
            home: a member's name, rank or handle, or a Member. None: this member. A process that formed or fetched no
                group passes a name.
            maxsize: most items that may wait.
            max_bytes: most bytes that may wait. None: a quarter of the memory that the home may use. A larger message
                is accepted when nothing else waits.
            producers: how many calls of ``close`` end the stream, one for each producer.
            group: the name of the group that has the home, for a process in several groups. None: that of the call
                that this thread serves, or the only one that has the home.

        Raises:
            ConfigurationError: invalid settings, or settings that differ from the existing queue's (at the home; any
                other process gets this when it first uses the handle).
        """
        most = None if max_bytes is None else checked_count("max_bytes", max_bytes)
        settings = checked_count("maxsize", maxsize), most, checked_count("producers", producers)
        super().__init__(name, home, settings, group)

    @property
    def maxsize(self) -> int:
        """Most items that may wait."""
        return int(self._settings[0])

    @property
    def _message_length(self) -> int:
        return self.maxsize

    @takes_timeout
    def put(self, item: Any, timeout: float | None = None) -> None:
        """Put one item. The item may be changed afterwards.

        Blocks while there is no room. Raises Full after ``timeout`` seconds (None: ``rpc_timeout_s``), and Closed if
        the queue is closed. After RpcTimeout, PeerLost or a cancellation the item may be in the queue or not.
        """
        run(self._put((item,), timeout))

    def put_nowait(self, item: Any) -> None:
        """Like ``put``, but raise Full at once if there is no room."""
        run(self._put((item,), 0))

    @takes_timeout
    def put_many(self, items: Iterable[Any], timeout: float | None = None) -> None:
        """Put several items, in order, with few messages.

        Up to ``maxsize`` items and 32 MiB go in together, all of them or none; more items go in such parts. The
        ``accepted`` of Full and Closed says how many items, from the first on, are in the queue.
        """
        run(self._put(list(items), timeout))

    async def aput(self, item: Any, timeout: float | None = None) -> None:
        """Like ``put``, for coroutines. Raises PeerBusy if too many calls to the home are in flight."""
        await self._aput((item,), timeout)

    async def aput_many(self, items: Iterable[Any], timeout: float | None = None) -> None:
        """Like ``put_many``, for coroutines."""
        await self._aput(list(items), timeout)

    def get_nowait(self) -> Any:
        """Like ``get``, but raise Empty at once if there is no item."""
        return self.get(0)

    def qsize(self) -> int:
        """Return how many items wait. Blocks for an answer of the home."""
        return int(self.stats()["items"])

    def stats(self) -> dict[str, int | bool]:
        """Return counts from the home; blocks for its answer.

        ``items`` and ``bytes`` that wait; items ``put`` and ``taken`` so far; ``waiting_to_put`` and
        ``waiting_to_get``: operations that wait at the home; ``closed``.
        """
        return {key: value for key, value in self._stats(QUEUE_BUFFER).items() if key not in ("dropped", "buffers")}

    def _take(self, request: Request, timeout: float | None, keep: bool) -> Steps[Any]:
        return self._take_from(QUEUE_BUFFER, request, timeout, keep)

    def _nothing(self, ended: bool) -> Exception:
        if ended:
            return Closed(f"queue {self._name!r} in {self._home!r} is closed, and everything in it has been taken")
        return Empty(f"nothing came to queue {self._name!r} in {self._home!r} in time")


class Topic(Channel):
    """Delivers each published item to all current subscribers.

    A topic lives in one member, its home, like a ``Queue``; the rules for items, blocking and errors are the same.
    Every subscriber has a buffer at the home, so an item crosses to the home once, and from there once to each
    subscriber.

    Each subscriber gets an item at most once. If a subscriber dies, its buffer and the items in flight to it are lost.
    With policy ``block`` a slow subscriber holds up the publishers. With the other policies it holds up nothing, and
    loses items instead.

    Examples:
        >>> news = rtr.Topic("news", home="learner")
        >>> subscription = news.subscribe("latest")
        >>> news.publish("version 2")
        >>> subscription.get(timeout=5)
        'version 2'
    """

    kind: ClassVar[str] = "topic"
    #: An empty buffer takes all of a message, however small it is.
    _message_length = 64

    def __init__(self, name: str, *, home: Any = None, publishers: int = 1, group: str | None = None) -> None:
        """Refer to the topic of this name, and create it if its home has none; see ``Queue``.

        Args:
            name: identifies the topic in its home.
            home: as for ``Queue``.
            publishers: how many calls of ``close`` end the stream, one for each publisher.
            group: as for ``Queue``.
        """
        super().__init__(name, home, (checked_count("publishers", publishers),), group)

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
        await self._aput((item,), timeout)

    def subscribe(self, policy: Policy = "block", *, maxsize: int = 64, max_bytes: int | None = None) -> Subscription:
        """Subscribe to the items that are published from now on. Blocks for an answer of the home.

        Args:
            policy: what happens when the buffer is full. ``block``: publishers wait. ``drop_oldest``: its oldest item
                is dropped. ``latest``: the buffer only ever holds the newest item.
            maxsize: most items in the buffer; 1 for ``latest``. A buffer that is empty takes one message, which may
                have up to 64 items of ``publish_many``.
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
            cancel = partial(self._notify_home, local, CANCEL, (*self._address, key), RETURNS)
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

    Examples:
        >>> with rtr.Topic("progress", home="learner").subscribe("drop_oldest", maxsize=16) as progress:
        ...     rtr.Topic("progress", home="learner").publish(0.5)
        ...     progress.get(timeout=5)
        0.5
    """

    def __init__(self, topic: Topic, key: str) -> None:
        """``Topic.subscribe`` calls this."""
        self._topic, self._key = topic, key
        self._cancelled = False

    def _take(self, request: Request, timeout: float | None, keep: bool) -> Steps[Any]:
        if self._is_cancelled():
            return ENDED
        try:
            return (yield from self._topic._take_from(self._key, request, timeout, keep))
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
