"""Values that a process offers over nng to any process that has the secret, member of a group or not."""

from __future__ import annotations

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from raytorchrpc.errors import LaneUnavailable, PeerLost, RayTorchRpcError, RpcTimeout
from raytorchrpc.lanes.base import Message, PeerAddress, Reply
from raytorchrpc.lanes.common.acceptor import SocketAddress
from raytorchrpc.lanes.common.handshake import Credentials
from raytorchrpc.lanes.nng.lane import NngLane, check_carried
from raytorchrpc.process.locks import Lock
from raytorchrpc.process.workers import Workers
from raytorchrpc.tensors.codec import NOTHING, Encoded

logger = logging.getLogger(__name__)

#: Values that an NngServer sends at a time.
_SENDING = 4
#: Connections that an NngClient keeps, each with a thread and three descriptors.
_CONNECTIONS = 16
_SERVER = "the process that offers values"


class OfferAddress(NamedTuple):
    """Where a process offers values; picklable."""

    nng: SocketAddress
    network: str
    """Host boot id, network namespace and user id. Processes that share all three connect over Unix sockets."""


class NngServer:
    """Offers values under keys to any process that has the secret, a member or not. Thread-safe."""

    def __init__(self, name: str, secret: bytes, *, tcp_host: str | None) -> None:
        """``name``: for threads and logs. ``tcp_host``: address to listen on for other hosts, None for none.

        Raises ThreadShortage.
        """
        self._lane = NngLane(name, Credentials(secret), tcp_host=tcp_host, by_tcp=frozenset())
        self._workers = Workers(f"raytorchrpc-{name}-offers", _SENDING)
        self._offers: dict[str, Encoded | Callable[[], Encoded]] = {}

    def open(self) -> OfferAddress:
        """Start to listen; returns the address for ``fetch``. Raises LaneUnavailable."""
        return OfferAddress(self._lane.open(self._serve, self._workers.submit), _network())

    def offer(self, key: str, value: Encoded | Callable[[], Encoded]) -> None:
        """Offer a value, for any number of fetches, until ``withdraw``. Its tensors are on the CPU and must not change
        meanwhile: each fetch sends their current content. Raises LaneUnavailable for a value that cannot be sent.

        A function is called for each fetch, on a thread of the server, and returns the value. If it raises, the fetch
        raises LaneUnavailable with that error's text.
        """
        if not callable(value):
            check_carried(value)
        self._offers[key] = value

    def withdraw(self, key: str) -> None:
        """Stop offering a value; fetches in progress still complete."""
        self._offers.pop(key, None)

    def close(self) -> None:
        """Close all connections and end all threads. Fetches in progress fail with PeerLost. Idempotent."""
        self._lane.close()
        self._workers.stop()
        self._offers.clear()

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
        logger.debug("a requested value could not be delivered: %s", error)


class NngClient:
    """Fetches values that NngServers offer, and keeps the connections used last. Works in any process. Thread-safe."""

    def __init__(self) -> None:
        self._open: OrderedDict[tuple[OfferAddress, bytes], NngLane] = OrderedDict()  # oldest first
        self._lock = Lock()

    def fetch(self, address: OfferAddress, secret: bytes, key: str, timeout_s: float) -> Encoded:
        """Fetch a value; its tensors are private copies. Blocks.

        Raises LaneUnavailable if no value is offered under this key, PeerLost, RpcTimeout.
        """
        deadline = time.monotonic() + timeout_s
        lane = self._lane(address, secret)
        try:
            pending = lane.call(_SERVER, Message((key,), NOTHING), timeout_s)
            if not pending.wait(deadline - time.monotonic()):
                raise RpcTimeout(f"{key!r} did not arrive within {timeout_s:.3g} s")
            message = pending.take()
        except (PeerLost, RpcTimeout):  # it is lost, or too slow to keep
            with self._lock:
                if self._open.get((address, secret)) is lane:
                    del self._open[address, secret]
            lane.close()
            raise
        if not message.header[0]:
            raise LaneUnavailable("nng", message.header[1] or f"nothing is offered under {key!r} (any more)")
        return message.body

    def _lane(self, address: OfferAddress, secret: bytes) -> NngLane:
        """A lane to one NngServer, to which it connects when it is first used."""
        evicted = None
        with self._lock:
            lane = self._open.pop((address, secret), None)
            if lane is None:
                by_tcp = frozenset[str]() if address.network == _network() else frozenset({_SERVER})
                lane = NngLane("fetch", Credentials(secret), tcp_host=None, by_tcp=by_tcp)
                lane.start_reader()
                lane.connect([PeerAddress(_SERVER, address.nng)])
            self._open[address, secret] = lane
            if len(self._open) > _CONNECTIONS:
                _, evicted = self._open.popitem(last=False)
        if evicted is not None:
            evicted.close()
        return lane


def _network() -> str:
    host = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{host} {os.readlink('/proc/self/ns/net')} {os.geteuid()}"
