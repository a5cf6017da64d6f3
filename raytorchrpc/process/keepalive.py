"""Ends TCP connections whose other host has become silent."""

from __future__ import annotations

import socket

#: A connection ends after the other host has been silent for this long (seconds), as after a power cut. Otherwise an
#: idle connection would stay open without end, and Linux retransmits unacknowledged data for 15 minutes. A network that
#: recovers within five seconds costs nothing: the kernel doubles the time between retransmissions, so one falls within
#: the limit. A live peer that does not read counts as silent too, but only once its buffers are full.
SILENCE_S = 15
_PROBE_AFTER_S, _PROBE_EVERY_S = 5, 2


def detect_silence(sock: socket.socket) -> None:
    """Probe the other host while this TCP connection is idle. Sockets accepted by a listener inherit this."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_AFTER_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_EVERY_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, (SILENCE_S - _PROBE_AFTER_S) // _PROBE_EVERY_S)


def limit_unacknowledged(sock: socket.socket) -> None:
    """Also end this TCP connection if sent data stays unacknowledged. Takes the place of the number of idle probes."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000)
