"""A drop-in for ``ray.util.queue``: change the import, and items cross by raytorchrpc's lanes.

The actor behind a queue is its home, in a group of its own. Each process joins that group when it first uses the queue,
so that nobody forms one.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import ray
import ray.util.queue

import raytorchrpc as rtr
from raytorchrpc._compat.ray_internals import actor_id_of
from raytorchrpc.integrations.joined import Joined
from raytorchrpc.process.locks import Lock
from raytorchrpc.process.threads import in_thread
from raytorchrpc.process.threads import start as start_thread

_NAME = "queue"
_UNBOUNDED = 1 << 62
_DAY = 86400.0
#: For the actor to be placed and to start (seconds).
_START_S = 300.0


class Empty(rtr.Empty, ray.util.queue.Empty):
    """There are not so many items."""


class Full(rtr.Full, ray.util.queue.Full):
    """There is no room."""


class _Home:
    """The actor that has the queue. Its process forms the group, which ends with it."""

    def __init__(self, maxsize: int) -> None:
        config, group = rtr.GroupConfig.from_env(joinable_by="cluster"), f"_queue.{os.urandom(8).hex()}"
        self._group = rtr.init_group([], name=group, config=config, include_driver=True)
        self._queue = rtr.Queue(_NAME, maxsize=maxsize, group=group)

    def queue(self) -> tuple[str, rtr.Queue]:
        """The group, another one once Ray has restarted the actor, and the handle. Others may join."""
        return self._group.name, self._queue

    def empty(self) -> bool:
        """Whether no item waits."""
        return not self._queue.qsize()


class _Joined:
    """This process as a member of a queue's group, as long as it has a ``Queue`` of it, or had one of late."""

    of_actor: ClassVar[weakref.WeakValueDictionary[str, _Joined]] = weakref.WeakValueDictionary()
    recent: ClassVar[deque[_Joined]] = deque(maxlen=8)  # a queue that comes as an argument of each call joins once
    lock = Lock()

    def __init__(self, actor: Any) -> None:
        """Blocks until others can reach it. Raises BootstrapError; RayActorError, GetTimeoutError."""
        home: tuple[str, rtr.Queue] = ray.get(actor.queue.remote(), timeout=_START_S)
        self.group, self.handle = home
        self.member = Joined(self.group, "user")
        self.member.join()
        weakref.finalize(self, start_thread, self.member.leave, name="queue-leave").atexit = False


class Queue:
    """See ``ray.util.queue.Queue``: first in, first out; any process of the cluster may put and get.

    A handle: picklable, thread-safe. What ``get`` returns is the caller's own. Every operation blocks for an answer of
    the queue's actor, and may raise PeerLost, NotFound or RayActorError once that has ended.
    """

    def __init__(self, maxsize: int = 0, actor_options: dict[str, Any] | None = None) -> None:
        """
        Args:
            maxsize: most items that wait; 0: no limit. Beyond a quarter of the memory that the actor may use, puts wait
                as if the queue were full.
            actor_options: of the actor, such as ``{"num_cpus": 1}``.
        """
        home: Any = ray.remote(_Home).options(**(actor_options or {}))
        self.maxsize = maxsize
        self._joined: _Joined | None = None
        self.actor: Any = home.remote(maxsize if maxsize > 0 else _UNBOUNDED)

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Put an item; it may be changed afterwards. Raises Full if there is no room within ``timeout`` seconds.

        ``timeout=None`` waits for a day; ``block=False`` does not wait.
        """
        seconds = _seconds(block, timeout)
        with self._errors():
            self._handle().put(item, seconds)

    async def put_async(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Like ``put``, for coroutines."""
        seconds = _seconds(block, timeout)
        with self._errors():
            await (await in_thread(self._handle)).aput(item, seconds)

    def put_nowait(self, item: Any) -> None:
        """``put(item, block=False)``."""
        self.put(item, block=False)

    def put_nowait_batch(self, items: Iterable[Any]) -> None:
        """Put all items, in order, or raise Full and put none. Of more than 32 MiB some may be put."""
        if not isinstance(items, Iterable):
            raise TypeError(f"items is an iterable, not {items!r}")
        batch = [*items]
        if 0 < self.maxsize < len(batch):
            raise Full(f"{len(batch)} items do not fit in a queue of at most {self.maxsize}")
        with self._errors():
            self._handle().put_many(batch, 0)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Take the oldest item. Raises Empty if none comes within ``timeout`` seconds; see ``put``."""
        seconds = _seconds(block, timeout)
        with self._errors():
            return self._handle().get(seconds)

    async def get_async(self, block: bool = True, timeout: float | None = None) -> Any:
        """Like ``get``, for coroutines."""
        seconds = _seconds(block, timeout)
        with self._errors():
            return await (await in_thread(self._handle)).aget(seconds)

    aput, aget = put_async, get_async  # the names that errors of calls on an event loop advise

    def get_nowait(self) -> Any:
        """``get(block=False)``."""
        return self.get(block=False)

    def get_nowait_batch(self, num_items: int) -> list[Any]:
        """Take so many items, in order, or raise Empty and take none."""
        if not isinstance(num_items, int):
            raise TypeError(f"num_items is a whole number, not {num_items!r}")
        if num_items < 0:
            raise ValueError(f"num_items is at least 0, not {num_items}")
        with self._errors():
            return self._handle().get_nowait_batch(num_items) if num_items else []

    def qsize(self) -> int:
        """How many items wait."""
        with self._errors():
            return self._handle().qsize()

    size = __len__ = qsize

    def empty(self) -> bool:
        """Whether no item waits."""
        return not self.qsize()

    def full(self) -> bool:
        """Whether ``maxsize`` items wait."""
        return 0 < self.maxsize <= self.qsize()

    def shutdown(self, force: bool = False, grace_period_s: float = 5) -> None:
        """End the queue, its actor and its group. Operations that wait raise PeerLost.

        Args:
            force: kill the actor at once.
            grace_period_s: else it is killed after so many seconds.
        """
        actor, self.actor, self._joined = self.actor, None, None
        if actor is not None:
            if joined := _Joined.of_actor.pop(actor_id_of(actor), None):
                joined.member.leave()
            if force or not ray.wait([actor.__ray_terminate__.remote()], timeout=grace_period_s)[0]:
                ray.kill(actor)

    def _handle(self) -> rtr.Queue:
        if (joined := self._joined) is None:
            if (actor := self.actor) is None:
                raise rtr.NotFound("this queue was shut down")
            with _Joined.lock:
                if (joined := _Joined.of_actor.get(actor_id_of(actor))) is None:
                    _Joined.of_actor[actor_id_of(actor)] = joined = _Joined(actor)
                    _Joined.recent.append(joined)
            self._joined = joined
        return joined.handle

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Make them Ray's, too. After a loss the next operation joins again, as Ray may restart the actor."""
        try:
            yield
        except rtr.Empty as empty:
            raise Empty(str(empty)) from None
        except rtr.Full as full:
            raise Full(str(full), full.accepted) from None
        except (rtr.PeerLost, rtr.NotAMember):
            if (actor := self.actor) is not None and self._joined is not None:
                self._joined = None
                if joined := _Joined.of_actor.pop(actor_id_of(actor), None):
                    start_thread(joined.member.leave, name="queue-leave")
            raise

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_joined": None}


def _seconds(block: bool, timeout: float | None) -> float:
    if timeout is not None and timeout < 0:
        raise ValueError(f"timeout is a number of seconds from 0 on, not {timeout!r}")
    return 0.0 if not block else _DAY if timeout is None else timeout
