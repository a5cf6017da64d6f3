"""Bounded queues between members."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any, ClassVar

from raytorchrpc.calls.member import LocalMember
from raytorchrpc.errors import Closed, ConfigurationError, Empty
from raytorchrpc.patterns import handle
from raytorchrpc.patterns.handle import Steps, arun, membership, run
from raytorchrpc.patterns.queues.channel import Channel, Items
from raytorchrpc.patterns.queues.home import Home
from raytorchrpc.patterns.queues.outlet import Outlet
from raytorchrpc.patterns.queues.store import EMPTY, ENDED

_KEY = ""


def counted(what: str, value: Any) -> int:
    """A number of 1 or more. Raises ConfigurationError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{what}= is a whole number from 1 on, not {value!r}")
    return value


class Queue(Channel):
    """A bounded queue with any number of producers and consumers among the members of a group.

    It lives in one member, its home, and ends with that process or the group. Everybody else refers to it by its
    name, or by this handle, which can be pickled and sent anywhere. Items are what calls can carry, RRefs excepted,
    and cross as arguments of calls do; what is taken is private to who takes it. Each item is taken at most once: one
    on its way to a consumer that dies, or whose home does, is lost. Items of one producer keep their order.

    An item crosses twice, from its producer to the home and from there to its consumer, and not at all where one of
    them is the home. A large CPU tensor costs one copy for each time that it crosses within a host; one put by the
    home itself is copied once, so that it can be changed afterwards. While it waits it may lie in shared memory of its
    producer; the home copies it where this would be more than a quarter of that (``GroupConfig.shm_bytes``).

    Operations of the home's are served beside its actor's methods and take no turn of theirs. All of them block, at
    most ``timeout`` seconds (None: ``rpc_timeout_s``; a call that is being served ends its own operations with it);
    those that begin with ``a`` are for coroutines. Each may raise PeerLost if the home is lost, NotFound if this queue
    has ended (the home was restarted, or the group formed again, since this handle was first used), and RpcTimeout if
    the home has not answered 0.2 s after the timeout (it has 0.5 s at least, and 1 s where that is 0). Thread-safe.
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
    ) -> None:
        """The queue of that name; it is made if its home has none. At once if this is the home, else when first used.

        Args:
            home: a member's name, rank or handle, or a Member. None: this member. A process that is in no group gives
                a name: the first member that uses the handle has the queue made.
            maxsize: items that may wait.
            max_bytes: likewise; None: a quarter of the memory that the home may use. A larger message is taken in when
                nothing else waits.
            producers: how many calls of ``close`` it takes to end the stream: one for each producer.

        Raises ConfigurationError for settings that are none, or are not those of the queue that is there.
        """
        most = None if max_bytes is None else counted("max_bytes", max_bytes)
        super().__init__(name, home, (counted("maxsize", maxsize), most, counted("producers", producers)))

    @property
    def maxsize(self) -> int:
        """Items that may wait."""
        return int((self._known or run(self._settled()))[0])

    def _settled(self) -> Steps[Any]:
        local, _ = yield from membership()
        yield from self._ready(local)
        return self._known

    @property
    def _most(self) -> int:
        return int(self._known[0])

    # --- putting -------------------------------------------------------------------------------------------------

    def put(self, item: Any, timeout: float | None = None) -> None:
        """Put one item. Blocks while there is no room; then raises Full. Closed if the queue is.

        The item may be changed afterwards. After RpcTimeout, PeerLost or a cancellation it may be in the queue or not.
        """
        run(self._put((item,), timeout))

    def put_nowait(self, item: Any) -> None:
        """As ``put``, without waiting for room: raises Full."""
        run(self._put((item,), 0))

    def put_many(self, items: Iterable[Any], timeout: float | None = None) -> None:
        """Put several, in order, with few messages. Full and Closed say how many were ``accepted``: the first so many.

        Up to ``maxsize`` items and 32 MiB go in together, all of them or none; more go in such parts.
        """
        run(self._put(list(items), timeout))

    async def aput(self, item: Any, timeout: float | None = None) -> None:
        """As ``put``, for coroutines. Raises PeerBusy if too much is under way to the home already."""
        await arun(self._put((item,), timeout, in_turn=True))

    async def aput_many(self, items: Iterable[Any], timeout: float | None = None) -> None:
        """As ``put_many``, for coroutines."""
        await arun(self._put(list(items), timeout, in_turn=True))

    # --- getting -------------------------------------------------------------------------------------------------

    def get(self, timeout: float | None = None, *, keep: bool = False) -> Any:
        """Take the oldest item. Blocks while there is none; then raises Empty. Closed at the end of the stream.

        ``keep``: its tensors arrive in memory of their own, see ``rpc_sync``.
        """
        return self._checked(run(self._take(_KEY, 1, timeout, keep)))[0]

    def get_nowait(self) -> Any:
        """As ``get``, without waiting: raises Empty."""
        return self.get(0)

    def get_many(self, limit: int, timeout: float | None = None, *, keep: bool = False) -> list[Any]:
        """Take what is there with one message: at most ``limit`` items, and 32 MiB. Blocks until there is one."""
        taken: list[Any] = self._checked(run(self._take(_KEY, counted("limit", limit), timeout, keep)))
        return taken

    async def aget(self, timeout: float | None = None, *, keep: bool = False) -> Any:
        """As ``get``, for coroutines. If it is cancelled, an item that comes all the same goes back to the front."""
        return self._checked(await arun(self._take(_KEY, 1, timeout, keep)))[0]

    async def aget_many(self, limit: int, timeout: float | None = None, *, keep: bool = False) -> list[Any]:
        """As ``get_many``, for coroutines."""
        taken: list[Any] = self._checked(await arun(self._take(_KEY, counted("limit", limit), timeout, keep)))
        return taken

    def _checked(self, taken: Any) -> Any:
        if taken is EMPTY:
            raise Empty(f"nothing came to queue {self._name!r} in {self._home!r} in time")
        if taken is ENDED:
            raise Closed(f"queue {self._name!r} in {self._home!r} is closed, and everything in it has been taken")
        return taken

    def items(self, *, batch: int = 1, keep: bool = False) -> Items:
        """Iterate over what comes, by ``for`` or ``async for``, up to the end of the stream; waits as long as it takes.

        ``batch``: items that come in one message, at most. This consumer has them then, and the others do not.
        """
        return Items(lambda limit: self._take(_KEY, limit, None, keep), batch)

    def __iter__(self) -> Iterator[Any]:
        return self.items()

    def __aiter__(self) -> AsyncIterator[Any]:
        return self.items()

    # --- the rest ------------------------------------------------------------------------------------------------

    def close(self, *, force: bool = False) -> None:
        """This producer has put its last item. With the last producer's (or ``force``) the stream ends: what waits can
        still be taken, then consumers' iterations end and ``get`` raises Closed. ``put`` raises Closed at once.
        """
        run(self._end(force))

    async def aclose(self, *, force: bool = False) -> None:
        """As ``close``, for coroutines."""
        await arun(self._end(force))

    def qsize(self) -> int:
        """How many items wait."""
        return int(self.stats()["items"])

    def stats(self) -> dict[str, int | bool]:
        """``items`` and ``bytes`` that wait; ``put`` and ``taken`` so far; ``waiting_to_put``, ``waiting_to_get``;
        ``closed``.
        """
        numbers = run(self._numbers(_KEY))
        return {key: value for key, value in numbers.items() if key not in ("dropped", "outlets")}


def _make(local: LocalMember, name: str, settings: Any) -> Home:
    maxsize, max_bytes, producers = settings
    home = Home(local, f"queue {name!r}", settings, producers, shared=False)
    home.add(_KEY, Outlet(maxsize, max_bytes or local.max_bytes, "block"))
    return home


handle.makes(Queue.kind, _make)
