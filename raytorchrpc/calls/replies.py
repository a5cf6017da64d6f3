"""Replies of one member, and the results that it keeps until their callers fetch them over another lane."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from raytorchrpc.calls.protocol import CALL, KEPT, OK, RAISED, REMOTE
from raytorchrpc.errors import LaneUnavailable, PeerLost, RpcTimeout
from raytorchrpc.lanes.base import Message, Reply
from raytorchrpc.process import threads
from raytorchrpc.process.workers import Deadlines
from raytorchrpc.tensors.codec import NOTHING, Codec, Encoded
from raytorchrpc.tensors.cuda_streams import handoff_streams
from raytorchrpc.tensors.exceptions import encode_exception

logger = logging.getLogger(__name__)

#: A member without memory for a reply tries for this long to report that (seconds).
_REPORT_SHORTAGE_S = 10.0


class _Kept(NamedTuple):
    message: Message
    fetched: Callable[[], None]
    """Cancels the drop at the deadline."""


class Replies:
    """Answers requests, with results or exceptions. Thread-safe."""

    def __init__(self, name: str, codec: Codec, deadlines: Deadlines) -> None:
        """``name``: of this member."""
        self._name, self._codec, self._deadlines = name, codec, deadlines
        self._kept: dict[int, _Kept] = {}
        self._numbers = itertools.count()
        # Encoded now: it is for when there is no memory to encode anything.
        starved = MemoryError(f"{name} has no memory for its answer; the call may have run there")
        self._starved = Message((RAISED,), encode_exception(codec, starved))
        self._starved_remote = Message((True, starved), NOTHING)

    def refusal(self, kind: int, error: BaseException) -> Message:
        """The reply with an exception, to a request of that kind."""
        if kind == REMOTE:
            return Message((True, error), NOTHING)
        return Message((RAISED,), encode_exception(self._codec, error))

    def refuse(self, kind: int, error: BaseException, reply: Reply) -> None:
        """Reply with an exception. Blocks while it is sent; does not raise."""
        self.send(reply, lambda: self.refusal(kind, error), kind)

    def send(self, reply: Reply, make: Callable[[], Message], kind: int = CALL) -> None:
        """Reply with what ``make`` returns. Blocks while it is sent; does not raise."""
        try:
            try:
                reply(make())
            except LaneUnavailable as error:  # a kept result that no lane takes
                reply(self.refusal(CALL, error))
        except PeerLost as lost:
            logger.debug("%s could not answer a call: %s", self._name, lost)  # the caller's lane reports it
        except Exception as error:
            threads.report(error, f"{self._name} could not answer a call")
            if threads.is_shortage(error):
                self.report_shortage(kind, reply)

    def report_shortage(self, kind: int, reply: Reply) -> None:
        """Reply that there is no memory for the result, as soon as there is memory for that. Blocks."""
        starved = self._starved_remote if kind == REMOTE else self._starved
        try:
            threads.persist(lambda: reply(starved), _REPORT_SHORTAGE_S)
        except Exception as error:
            logger.debug("%s could not answer a call: %s", self._name, error)

    # --- results that another lane has to carry --------------------------------------------------------------

    def keep(self, body: Encoded, seconds: float) -> Message:
        """Keep a result until the caller fetches it, or for ``seconds``; returns the reply that announces it."""
        number = next(self._numbers)
        fetched = self._deadlines.at(time.monotonic() + seconds, partial(self._drop, number))
        self._kept[number] = _Kept(Message((OK,), body, handoff_streams(body.tensors)), fetched)
        return Message((KEPT, number), NOTHING)

    def _drop(self, number: int) -> None:
        self._kept.pop(number, None)

    def take(self, number: int) -> Message:
        """Take a kept result. Raises RpcTimeout if it was dropped."""
        kept = self._kept.pop(number, None)
        if kept is None:
            raise RpcTimeout(f"the result was kept for {self._name!r}'s caller until its deadline, and dropped")
        kept.fetched()
        return kept.message

    def kept(self) -> int:
        """How many results are kept."""
        return len(self._kept)

    def close(self) -> None:
        """Drop all kept results."""
        self._kept.clear()
