"""Taking items: what a queue and a subscription offer alike."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from raytorchrpc.errors import ConfigurationError
from raytorchrpc.patterns.handle import Steps, arun, run
from raytorchrpc.patterns.queues.store import EMPTY, ENDED


def checked_count(name: str, value: Any) -> int:
    """Return an argument that must be a whole number of at least 1. Raises ConfigurationError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{name}= must be a whole number of at least 1, not {value!r}")
    return value


class Items:
    """Iterates over the items that arrive, by ``for`` or ``async for``, until the stream ends."""

    def __init__(self, take: Callable[[int], Steps[Any]], batch: int) -> None:
        self._take, self._batch = take, checked_count("batch", batch)
        self._taken: deque[Any] = deque()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while not self._taken:
            taken = run(self._take(self._batch))
            if taken is ENDED:
                raise StopIteration
            self._taken.extend(taken or ())
        return self._taken.popleft()

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        while not self._taken:
            taken = await arun(self._take(self._batch))
            if taken is ENDED:
                raise StopAsyncIteration
            self._taken.extend(taken or ())
        return self._taken.popleft()


class Consumer:
    """Takes items from one buffer at the home."""

    def _take(self, limit: int, timeout: float | None, keep: bool) -> Steps[Any]:
        """Take items: a list of values, EMPTY or ENDED."""
        raise NotImplementedError

    def _empty(self) -> Exception:
        """The error for EMPTY."""
        raise NotImplementedError

    def _ended(self) -> Exception:
        """The error for ENDED."""
        raise NotImplementedError

    def get(self, timeout: float | None = None, *, keep: bool = False) -> Any:
        """Take the oldest item.

        Blocks until there is one. Raises Empty after the timeout, Closed at the end of the stream.

        Args:
            timeout: seconds; None: ``rpc_timeout_s``.
            keep: copy the item's tensors into memory of their own, see ``rpc_sync``.
        """
        return self._checked(run(self._take(1, timeout, keep)))[0]

    def get_many(self, limit: int, timeout: float | None = None, *, keep: bool = False) -> list[Any]:
        """Take up to ``limit`` items with one message.

        Blocks until there is at least one item; then returns those that wait, at most 32 MiB. ``timeout``, ``keep``
        and errors are those of ``get``.
        """
        taken: list[Any] = self._checked(run(self._take(checked_count("limit", limit), timeout, keep)))
        return taken

    async def aget(self, timeout: float | None = None, *, keep: bool = False) -> Any:
        """Like ``get``, for coroutines. If it is cancelled, an item that arrives for it goes back to its place."""
        return self._checked(await arun(self._take(1, timeout, keep)))[0]

    async def aget_many(self, limit: int, timeout: float | None = None, *, keep: bool = False) -> list[Any]:
        """Like ``get_many``, for coroutines. If it is cancelled, items that arrive for it go back to their place."""
        taken: list[Any] = self._checked(await arun(self._take(checked_count("limit", limit), timeout, keep)))
        return taken

    def _checked(self, taken: Any) -> Any:
        if taken is EMPTY:
            raise self._empty()
        if taken is ENDED:
            raise self._ended()
        return taken

    def items(self, *, batch: int = 1, keep: bool = False) -> Items:
        """Return an iterator, for ``for`` and ``async for``, that waits for items until the stream ends.

        Args:
            batch: most items that one message brings. This consumer then has all of them; no other one gets them.
            keep: as for ``get``.
        """
        return Items(lambda limit: self._take(limit, None, keep), batch)

    def __iter__(self) -> Iterator[Any]:
        return self.items()

    def __aiter__(self) -> AsyncIterator[Any]:
        return self.items()
