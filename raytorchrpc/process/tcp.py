"""Options of TCP sockets: which hosts may connect to a listener, and when a silent connection ends.

A classic BPF program on the listening socket (``SO_ATTACH_FILTER``, socket(7)) makes the kernel drop packets from other
hosts. That needs no privilege, and costs a few instructions for each packet.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import ipaddress
import os
import socket
import struct
from collections.abc import Collection, Iterable, Sequence

from raytorchrpc.process import fork

#: A connection ends after the other host has been silent for this long (seconds), as after a power cut. Otherwise an
#: idle connection would stay open without end, and Linux retransmits unacknowledged data for 15 minutes. A network that
#: recovers within five seconds costs nothing: the kernel doubles the time between retransmissions, so one falls within
#: the limit. A live peer that does not read counts as silent too, but only once its buffers are full.
SILENCE_S = 15
_PROBE_AFTER_S, _PROBE_EVERY_S = 5, 2

#: The first part of Linux's ``struct tcp_info``, up to how long ago an acknowledgement came (milliseconds).
_LAST_ACK = struct.Struct("=56xI")
#: The least time for data that is sent (milliseconds).
_SHORTEST_MS = 1000

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # asm-generic/socket.h; the socket module does not have them
# linux/filter.h: load a word, load a half word, and with a constant, jump if equal, return.
_LOAD, _LOAD_HALF, _AND, _JUMP_EQUAL, _RETURN = 0x20, 0x28, 0x54, 0x15, 0x06
# A load from there reads the TCP header.
_SENDER_PORT = 0
# A load at this offset reads the network header, for any socket type.
_NETWORK_HEADER = -0x100000
# Offset of the sender's address in that header.
_SENDER = {4: 12, 6: 8}
_EVERYTHING, _NOTHING = 0xFFFFFFFF, 0
# The kernel counts programs against net.core.optmem_max, 20 KiB on older ones: 2,560 instructions.
_MAX_INSTRUCTIONS = 2500


def detect_silence(sock: socket.socket) -> None:
    """Probe the other host while this TCP connection is idle. Sockets accepted by a listener inherit this."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_AFTER_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_EVERY_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, (SILENCE_S - _PROBE_AFTER_S) // _PROBE_EVERY_S)


def limit_unacknowledged(sock: socket.socket) -> None:
    """Also end this TCP connection if sent data stays unacknowledged. Takes the place of the number of idle probes."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000)


def count_silence(sock: socket.socket) -> None:
    """Have what is sent next end this TCP connection ``SILENCE_S`` after the other host was heard last. Otherwise data
    that is sent to a silent host restarts that time: the kernel sends no probes while data is unacknowledged.
    """
    if not is_tcp(sock):
        return
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_ACK.size)
    (silent_ms,) = _LAST_ACK.unpack(info)
    # A host that answers is probed at least this often, and keeps all of the time.
    is_silent = silent_ms > (_PROBE_AFTER_S + _PROBE_EVERY_S) * 1000
    left_ms = max(_SHORTEST_MS, SILENCE_S * 1000 - silent_ms) if is_silent else SILENCE_S * 1000
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, left_ms)


def is_tcp(sock: socket.socket) -> bool:
    """Whether this is a TCP socket. Raises OSError if it is closed."""
    kind = sock.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE)
    return sock.family in (socket.AF_INET, socket.AF_INET6) and kind == socket.SOCK_STREAM


def listening() -> dict[int, int]:
    """Return the TCP sockets on which this process listens: descriptor by inode."""
    listeners = {}
    for fd, sock in fork.own_sockets():
        with contextlib.suppress(OSError):  # another thread has closed it
            if is_tcp(sock) and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                listeners[os.fstat(fd).st_ino] = fd
    return listeners


def networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """Parse addresses and networks in CIDR notation, merged. Raises ValueError, which names a bad one."""
    return _networks(tuple(texts))


@functools.lru_cache(maxsize=8)  # a member's next group has mostly the same hosts
def _networks(texts: tuple[str, ...]) -> tuple[Network, ...]:
    each = {ipaddress.ip_network(text.partition("%")[0], strict=False) for text in texts}
    four = ipaddress.collapse_addresses(net for net in each if isinstance(net, ipaddress.IPv4Network))
    six = ipaddress.collapse_addresses(net for net in each if isinstance(net, ipaddress.IPv6Network))
    return *four, *six


def admit_only(listener: socket.socket, admitted: Collection[Network]) -> None:
    """Allow only senders in ``admitted`` to connect to this listener. Existing connections stay.

    Raises OSError if the kernel rejects the program, or its length; the listener then keeps its previous filter.
    """
    _attach(listener, _program(_version(listener), tuple(admitted)))


def admit_one(listener: socket.socket, sender: tuple[str, int]) -> None:
    """Allow only the socket at this address and port to connect. Raises OSError as ``admit_only`` does."""
    host, port = sender
    rest = _program(_version(listener), networks([host]))
    _attach(listener, [(_LOAD_HALF, 0, 0, _SENDER_PORT), (_JUMP_EQUAL, 1, 0, port), (_RETURN, 0, 0, _NOTHING), *rest])


def admit_all(sock: socket.socket) -> None:
    """Take the filter off a listener, or off a connection that has it from its listener."""
    with contextlib.suppress(OSError):  # it has none
        sock.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


def _version(sock: socket.socket) -> int:
    return 6 if sock.family == socket.AF_INET6 else 4


@functools.lru_cache(maxsize=8)
def _program(version: int, admitted: tuple[Network, ...]) -> tuple[tuple[int, int, int, int], ...]:
    program = []
    for network in admitted:
        if network.version != version:
            continue
        size = network.max_prefixlen // 32
        words = struct.unpack(f"!{size}I", network.network_address.packed)
        masks = struct.unpack(f"!{size}I", network.netmask.packed)
        compared = [(index, word, mask) for index, (word, mask) in enumerate(zip(words, masks, strict=True)) if mask]
        for remaining, (index, word, mask) in zip(range(len(compared) - 1, -1, -1), compared, strict=True):
            program += [
                (_LOAD, 0, 0, _NETWORK_HEADER + _SENDER[version] + 4 * index),
                (_AND, 0, 0, mask),
                (_JUMP_EQUAL, 0, 3 * remaining + 1, word),  # else continue with the next network
            ]
        program.append((_RETURN, 0, 0, _EVERYTHING))
    program.append((_RETURN, 0, 0, _NOTHING))
    return tuple(program)


def _attach(sock: socket.socket, program: Sequence[tuple[int, int, int, int]]) -> None:
    if len(program) > _MAX_INSTRUCTIONS:
        raise OSError(f"{len(program)} instructions exceed the limit of some kernels")
    steps = (struct.pack("HBBI", code, yes, no, value & _EVERYTHING) for code, yes, no, value in program)
    text = ctypes.create_string_buffer(b"".join(steps))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", len(program), ctypes.addressof(text)))
