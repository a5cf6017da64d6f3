"""Logs the failures of calls whose futures were dropped before anybody asked for the outcome."""

from __future__ import annotations

import logging
import threading
import time

from raytorchrpc.calls import protocol
from raytorchrpc.calls.peers import PeerTable
from raytorchrpc.calls.protocol import ReplyHeader
from raytorchrpc.errors import RayTorchRpcError, RpcTimeout
from raytorchrpc.lanes.base import Message, Pending
from raytorchrpc.process.workers import Deadlines, DeferredCleanup, Workers
from raytorchrpc.tensors.codec import Codec
from raytorchrpc.tensors.exceptions import decode_exception

logger = logging.getLogger(__name__)

#: After a failure was logged, others of this kind, of the same method, are only counted for this time (seconds).
_QUIET_S = 10.0


class UnretrievedFailures:
    """Those of one member's calls. Thread-safe."""

    def __init__(
        self, peers: PeerTable, codec: Codec, workers: Workers, deadlines: Deadlines, cleanup: DeferredCleanup
    ) -> None:
        self._peers, self._codec = peers, codec
        self._workers, self._deadlines, self._cleanup = workers, deadlines, cleanup
        self._lock = threading.Lock()
        self._logged: dict[tuple[str, type[BaseException]], tuple[float, int]] = {}
        """By call and kind of failure: when it was logged last, and how many were not since."""

    def watch(self, pending: Pending, peer: str, method: str, deadline: float) -> None:
        """Log the failure of a call when it fails, or did. For finalizers: takes no lock."""
        self._cleanup.leave(self._watch, pending, f"{peer}.{method}", deadline)

    def report(self, label: str, error: BaseException) -> None:
        """Log a failure. For finalizers: takes no lock."""
        self._cleanup.leave(self._log, label, error)

    def _watch(self, pending: Pending, label: str, deadline: float) -> None:
        if pending.wait(0):
            self._check(pending, label)
            return
        late = RpcTimeout(f"{label} did not answer by its deadline; it may still run there")
        cancel = self._deadlines.at(deadline, lambda: self._workers.submit(self._log, label, late))

        def done() -> None:
            cancel()
            self._check(pending, label)

        pending.add_done_callback(done)

    def _check(self, pending: Pending, label: str) -> None:
        try:
            message = pending.take()
        except Exception as error:
            self._workers.submit(self._log, label, error.with_traceback(None))
            return
        if ReplyHeader(*message.header).kind == protocol.RAISED:
            self._workers.submit(self._log, label, message)  # unpickling it may run any code

    def _log(self, label: str, failure: Message | BaseException) -> None:
        try:
            self._peers.check_open()  # a call that ends with the group has not failed
        except RayTorchRpcError:
            return
        if not isinstance(failure, BaseException):
            failure = decode_exception(self._codec, failure.body, label)
        key, now = (label, type(failure)), time.monotonic()
        with self._lock:
            last, more = self._logged.get(key, (0.0, 0))
            quiet = last and now < last + _QUIET_S
            self._logged[key] = (last, more + 1) if quiet else (now, 0)
        if not quiet:
            others = f" (and {more} more such failures before)" if more else ""
            text = "the exception of a call of %s was never retrieved: its future was dropped%s"
            logger.error(text, label, others, exc_info=failure)
