"""Bounded queues between members."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from raytorchrpc.calls.member import LocalMember
from raytorchrpc.errors import Closed, Empty
from raytorchrpc.patterns.handle import Steps, arun, checked_count, run
from raytorchrpc.patterns.home import Kind
from raytorchrpc.patterns.queues.buffer import Buffer
from raytorchrpc.patterns.queues.channel import Channel, Consumer
from raytorchrpc.patterns.queues.services import HomeStore

_KEY = ""


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

        Raises:
            ConfigurationError: invalid settings, or settings that differ from the existing queue's (at the home; any
                other process gets this when it first uses the handle).
        """
        most = None if max_bytes is None else checked_count("max_bytes", max_bytes)
        super().__init__(name, home, (checked_count("maxsize", maxsize), most, checked_count("producers", producers)))

    @property
    def maxsize(self) -> int:
        """Most items that may wait."""
        return int(self._settings[0])

    @property
    def _message_length(self) -> int:
        return self.maxsize

    def put(self, item: Any, timeout: float | None = None) -> None:
        """Put one item. The item may be changed afterwards.

        Blocks while there is no room. Raises Full after ``timeout`` seconds (None: ``rpc_timeout_s``), and Closed if
        the queue is closed. After RpcTimeout, PeerLost or a cancellation the item may be in the queue or not.
        """
        run(self._put((item,), timeout))

    def put_nowait(self, item: Any) -> None:
        """Like ``put``, but raise Full at once if there is no room."""
        run(self._put((item,), 0))

    def put_many(self, items: Iterable[Any], timeout: float | None = None) -> None:
        """Put several items, in order, with few messages.

        Up to ``maxsize`` items and 32 MiB go in together, all of them or none; more items go in such parts. The
        ``accepted`` of Full and Closed says how many items, from the first on, are in the queue.
        """
        run(self._put(list(items), timeout))

    async def aput(self, item: Any, timeout: float | None = None) -> None:
        """Like ``put``, for coroutines. Raises PeerBusy if too many calls to the home are in flight."""
        await arun(self._put((item,), timeout, in_turn=True))

    async def aput_many(self, items: Iterable[Any], timeout: float | None = None) -> None:
        """Like ``put_many``, for coroutines."""
        await arun(self._put(list(items), timeout, in_turn=True))

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
        return {key: value for key, value in self._stats(_KEY).items() if key not in ("dropped", "buffers")}

    def _take(self, limit: int, timeout: float | None, keep: bool, least: int = 1) -> Steps[Any]:
        return self._take_from(_KEY, limit, timeout, keep, least)

    def _nothing(self, ended: bool) -> Exception:
        if ended:
            return Closed(f"queue {self._name!r} in {self._home!r} is closed, and everything in it has been taken")
        return Empty(f"nothing came to queue {self._name!r} in {self._home!r} in time")


def _create(local: LocalMember, name: str, settings: Any) -> HomeStore:
    maxsize, max_bytes, producers = settings
    store = HomeStore(local, f"queue {name!r}", settings, producers, shared=False)
    store.add_buffer(_KEY, Buffer(maxsize, max_bytes or local.max_bytes, "block"))
    return store


KINDS = {Queue.kind: Kind(_create, ("maxsize", "max_bytes", "producers"))}
