"""One-shot offers over nng: a process serves data to any process that has the secret."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from raytorchrpc.errors import LaneUnavailable, PeerLost, RayTorchRpcError, RpcTimeout
from raytorchrpc.lanes.base import Message, PeerAddress, Reply
from raytorchrpc.lanes.common.credentials import Credentials
from raytorchrpc.lanes.nng.connection import check_carried
from raytorchrpc.lanes.nng.lane import _SERVER, _SERVING, NngAddress, NngLane
from raytorchrpc.process.workers import Workers
from raytorchrpc.tensors.codec import NOTHING, Encoded

logger = logging.getLogger(__name__)


class OfferAddress(NamedTuple):
    """Where offered values are; picklable."""

    nng: NngAddress
    network: str
    """The host's boot, the network namespace and the user: who shares them connects by abstract Unix sockets."""


class NngServer:
    """Offers values under keys to any process that has the secret, a member or not. Thread-safe."""

    def __init__(self, name: str, secret: bytes, *, tcp_host: str | None) -> None:
        """``name``: for threads and logs. ``tcp_host``: address to listen on for other hosts, None for none.

        Raises ThreadShortage.
        """
        self._lane = NngLane(name, Credentials(secret), tcp_host=tcp_host, by_tcp=frozenset())
        self._workers = Workers(f"raytorchrpc-{name}-offers", _SERVING, keep=True)
        self._offers: dict[str, Encoded | Callable[[], Encoded]] = {}

    def open(self) -> OfferAddress:
        """Start to listen; returns the address for ``fetch``. Raises LaneUnavailable."""
        return OfferAddress(self._lane.open(self._serve, self._spawn), _network())

    def offer(self, key: str, value: Encoded | Callable[[], Encoded]) -> None:
        """Let anybody fetch this value, any number of times, until ``withdraw``. Its tensors are on the CPU and must
        not change meanwhile: each fetch sends what they hold then. Raises LaneUnavailable for what cannot be sent.

        A function is called for each fetch, on a thread of the server's, and returns the value; what it raises, the
        fetch raises as LaneUnavailable.
        """
        if not callable(value):
            check_carried(value)
        self._offers[key] = value

    def withdraw(self, key: str) -> None:
        """Let go of a value; fetches under way still get it."""
        self._offers.pop(key, None)

    def close(self) -> None:
        """Leave nothing behind. Fetches under way fail with PeerLost. Idempotent."""
        self._lane.close()
        self._workers.stop()
        self._offers.clear()

    def _spawn(self, work: Callable[[], None]) -> None:
        self._workers.submit(work)

    def _serve(self, message: Message, reply: Reply) -> Callable[[], None]:
        return partial(_answer, reply, self._offers.get(message.header[0]))


def _answer(reply: Reply, offered: Encoded | Callable[[], Encoded] | None) -> None:
    message = Message((False, ""), NOTHING)
    try:
        if offered is not None:
            value = offered() if callable(offered) else offered
            check_carried(value)
            message = Message((True,), value)
    except Exception as error:
        message = Message((False, f"{type(error).__name__}: {error}"), NOTHING)
    try:
        reply(message)
    except RayTorchRpcError as error:
        logger.debug("a fetched value was not taken: %s", error)


def fetch(address: OfferAddress, secret: bytes, key: str, timeout_s: float) -> Encoded:
    """Get a value that an NngServer offers; its tensors are private copies. Works in any process; blocks.

    Raises LaneUnavailable if nothing is offered under this key (any more), PeerLost, RpcTimeout.
    """
    line = _Fetching(address, secret)
    try:
        return line.fetch(key, timeout_s)
    finally:
        line.close()


class _Fetching:
    """A connection to one NngServer, made when it is first needed."""

    def __init__(self, address: OfferAddress, secret: bytes) -> None:
        near = address.network == _network()
        by_tcp: frozenset[str] = frozenset() if near else frozenset({_SERVER})
        self._lane = NngLane("fetch", Credentials(secret), tcp_host=None, by_tcp=by_tcp)
        self._lane._start_reader()
        self._lane.connect([PeerAddress(_SERVER, address.nng)])
        self.close = self._lane.close

    def fetch(self, key: str, timeout_s: float) -> Encoded:
        deadline = time.monotonic() + timeout_s
        pending = self._lane.call(_SERVER, Message((key,), NOTHING), timeout_s)
        if not pending.wait(deadline - time.monotonic()):
            raise RpcTimeout(f"{key!r} did not arrive within {timeout_s:.3g} s")
        message = pending.take()
        if not message.header[0]:
            raise LaneUnavailable("nng", message.header[1] or f"nothing is offered under {key!r} (any more)")
        return message.body


class NngClient:
    """Fetches again and again, as ``fetch`` does, and keeps the connections that it made last. Thread-safe."""

    def __init__(self, connections: int = 16) -> None:
        """``connections``: most to keep; a thread and three descriptors each."""
        self._most = connections
        self._open: OrderedDict[tuple[OfferAddress, bytes], _Fetching] = OrderedDict()  # oldest first
        self._lock = threading.Lock()

    def fetch(self, address: OfferAddress, secret: bytes, key: str, timeout_s: float) -> Encoded:
        """See the function of that name."""
        evicted = None
        with self._lock:
            line = self._open.pop((address, secret), None) or _Fetching(address, secret)
            self._open[address, secret] = line
            if len(self._open) > self._most:
                _, evicted = self._open.popitem(last=False)
        if evicted is not None:
            evicted.close()
        try:
            return line.fetch(key, timeout_s)
        except (PeerLost, RpcTimeout):  # it is gone, or so slow that a new connection can only be better
            with self._lock:
                if self._open.get((address, secret)) is line:
                    del self._open[address, secret]
            line.close()
            raise


def _network() -> str:
    host = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{host} {os.readlink('/proc/self/ns/net')} {os.geteuid()}"
