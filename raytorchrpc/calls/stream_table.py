"""The streams that one member serves."""

from __future__ import annotations

import itertools
from typing import Any, Protocol


class Served(Protocol):
    """See ``served_streams.StreamJob``."""

    @property
    def caller(self) -> int:
        """The caller's rank."""

    def request(self, position: int, request: Any) -> bool:
        """Take a request for an item; False if the stream is closed."""

    def close(self) -> None:
        """End the stream. Quick."""


class StreamTable:
    """The streams that are open, by number; see ``services.Served``. Thread-safe."""

    instance_id = 0

    def __init__(self) -> None:
        self._streams: dict[int, Served] = {}
        self._numbers = itertools.count(1)

    def add(self, stream: Served) -> int:
        """Returns its number."""
        number = next(self._numbers)
        self._streams[number] = stream
        return number

    def find(self, number: int) -> Served | None:
        """The stream of that number, if it is open."""
        return self._streams.get(number)

    def remove(self, number: int) -> None:
        """The stream has ended. Idempotent."""
        self._streams.pop(number, None)

    def end(self, number: int) -> None:
        """Its caller has closed it."""
        if (stream := self._streams.get(number)) is not None:
            stream.close()

    def lose(self, rank: int) -> None:
        """Close the streams of a member that is away or gone."""
        for stream in list(self._streams.values()):
            if stream.caller == rank:
                stream.close()

    def keep_only(self, rank: int, process: str | None) -> None:
        """A member that was away has no streams."""

    def close(self, error: Exception) -> None:
        """Close all streams."""
        for stream in list(self._streams.values()):
            stream.close()
