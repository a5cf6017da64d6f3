"""Accepts and dials the nng lane's connections. Both ends authenticate each other before anything is served.

An nng pair socket takes one peer. A peer therefore asks a member's request socket, in a few bytes, for a connection;
the member opens a pair socket for it and answers with the URL to dial.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import NamedTuple

from raytorchrpc.errors import PeerLost, RayTorchRpcError
from raytorchrpc.lanes.common import handshake
from raytorchrpc.lanes.common.acceptor import CONNECT_TIMEOUT_S, Admit, PendingHandshakes, retry_if_hung_up
from raytorchrpc.lanes.common.credentials import Credentials, Identity, Instance
from raytorchrpc.lanes.common.protection import Protection, secure_accepted, secure_stream
from raytorchrpc.lanes.nng import sockets
from raytorchrpc.lanes.nng.connection import HandshakeStream
from raytorchrpc.process import fork

logger = logging.getLogger(__name__)

_LOCAL, _TCP = b"raytorchrpc/1 local", b"raytorchrpc/1 tcp"


class NngAddress(NamedTuple):
    """URLs of a member's request socket."""

    local: str
    """In Linux's abstract socket namespace, which leaves no file behind."""
    tcp: str | None
    instance: Instance
    """The process that listens there."""


class Acceptor:
    """The request socket of one member, and the connections that it opens. One thread calls ``answer``."""

    def __init__(
        self, me: str, credentials: Credentials, peers: Callable[[], int], admit: Admit[sockets.PairSocket]
    ) -> None:
        """See PendingHandshakes."""
        self._me, self._credentials = me, credentials
        self._handshakes = PendingHandshakes(me, peers, sockets.PairSocket.hang_up, admit)
        self._tcp_host: str | None = None
        self._requests: sockets.RequestSocket | None = None
        self.address = NngAddress("", None, credentials.instance)

    def open(self, tcp_host: str | None) -> NngAddress:
        """Listen, for other hosts too if ``tcp_host`` is given. Raises OSError."""
        self._requests = sockets.RequestSocket()
        try:
            self.address = self.address._replace(local=self._requests.listen(_local_url()))
            return self.address if tcp_host is None else self.open_tcp(tcp_host)
        except OSError:
            self._requests.close()
            raise

    def open_tcp(self, host: str) -> NngAddress:
        """Also listen for other hosts. Raises OSError."""
        assert self._requests is not None
        self.address = self.address._replace(tcp=self._requests.listen(_tcp_url(host)))
        self._tcp_host = host
        return self.address

    @property
    def fd(self) -> int:
        """Readable when requests have arrived; -1 if this does not listen."""
        return -1 if self._requests is None else self._requests.fd

    def answer(self) -> None:
        """Answer the requests that have arrived. Never blocks."""
        assert self._requests is not None
        self._requests.answer(self._offer_connection)

    def _offer_connection(self, question: bytes) -> bytes | None:
        by_tcp = question == _TCP
        if question not in (_LOCAL, _TCP) or (by_tcp and self._tcp_host is None):
            return None
        sock: sockets.PairSocket | None = None
        try:
            sock = sockets.PairSocket()
            url = sock.listen(_tcp_url(self._tcp_host or "") if by_tcp else _local_url())
            started = self._handshakes.start(sock, lambda sock: self._secure(sock, by_tcp))
            return url.encode("ascii") if started else None
        except (OSError, RayTorchRpcError) as error:
            if sock is not None:
                sock.close()
            logger.warning("%s cannot accept a connection: %s", self._me, error)
            return None

    def _secure(self, sock: sockets.PairSocket, by_tcp: bool) -> tuple[Identity, Protection | None]:
        me = listener_identity(self._credentials, self.address, by_tcp)
        stream = HandshakeStream(sock)
        secured = secure_accepted(stream, self._credentials, me, CONNECT_TIMEOUT_S, exposed=by_tcp)
        _check_user(sock, self._credentials, by_tcp)
        return secured

    def drop_pending(self) -> None:
        """Drop pending handshakes, and accept no more connections. Idempotent."""
        self._handshakes.close()

    def close(self) -> None:
        """Stop listening."""
        if self._requests is not None:
            self._requests.close()


def dial(
    credentials: Credentials, own: NngAddress, peer: str, address: NngAddress, by_tcp: bool, deadline: float
) -> tuple[sockets.PairSocket, Protection | None]:
    """Connect, and authenticate both ends. ``own``: where this process listens.

    Returns the socket and what protects it. Blocks until the deadline at most. Raises PeerLost.
    """
    url, question = (address.tcp, _TCP) if by_tcp else (address.local, _LOCAL)
    if url is None:
        raise PeerLost(peer, "it does not listen for other hosts", may_have_run=False)
    me, its = (listener_identity(credentials, each, by_tcp) for each in (own, address))

    def connect() -> tuple[sockets.PairSocket, Protection | None]:
        where = sockets.request(url, question, deadline).decode("ascii")
        sock = sockets.PairSocket()
        try:
            sock.dial(where, deadline)
            _check_user(sock, credentials, by_tcp)
            left = max(0.001, deadline - time.monotonic())
            return sock, secure_stream(HandshakeStream(sock), credentials, me, its, left, exposed=by_tcp)
        except BaseException:
            sock.close()
            raise

    try:
        return retry_if_hung_up(connect)
    except (OSError, ValueError, handshake.Refused) as error:
        raise PeerLost(peer, f"no connection to it: {error}", may_have_run=False) from error


def listener_identity(credentials: Credentials, address: NngAddress, by_tcp: bool) -> Identity:
    """Return the identity of a listener as seen by a process that connects in this way."""
    where = f"{address.local} {address.tcp}" if by_tcp else address.local
    return credentials.peer(address.instance, f"nng {where}")


def _check_user(sock: sockets.PairSocket, credentials: Credentials, by_tcp: bool) -> None:
    if not by_tcp and not credentials.across_users:
        handshake.check_uid(-1 if sock.peer_uid is None else sock.peer_uid)


def _local_url() -> str:
    return f"abstract://{fork.ABSTRACT}{os.urandom(12).hex()}"


def _tcp_url(host: str) -> str:
    return f"tcp://[{host}]:0" if ":" in host else f"tcp://{host}:0"
