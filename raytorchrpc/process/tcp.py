"""Options of TCP sockets: which hosts may connect to a listener, and when a silent connection ends.

A classic BPF program on the listening socket (``SO_ATTACH_FILTER``, socket(7)) makes the kernel drop packets from other
hosts. That needs no privilege, and costs a few instructions for each packet.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
import struct
from collections.abc import Collection, Iterable, Iterator

from raytorchrpc.process import fork

#: A connection ends after the other host has been silent for this long (seconds), as after a power cut. Otherwise an
#: idle connection would stay open without end, and Linux retransmits unacknowledged data for 15 minutes. A network that
#: recovers within five seconds costs nothing: the kernel doubles the time between retransmissions, so one falls within
#: the limit. A live peer that does not read counts as silent too, but only once its buffers are full.
SILENCE_S = 15
_PROBE_AFTER_S, _PROBE_EVERY_S = 5, 2

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_SO_ATTACH_FILTER = 26  # asm-generic/socket.h; the socket module does not have it
# linux/filter.h: load a word, and with a constant, jump if equal, return.
_LOAD, _AND, _JUMP_EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06
# A load at this offset reads the network header, for any socket type.
_NETWORK_HEADER = -0x100000
# Offset of the sender's address in that header.
_SENDER = {4: 12, 6: 8}
_EVERYTHING, _NOTHING = 0xFFFFFFFF, 0
# The kernel counts programs against net.core.optmem_max, 20 KiB on older ones: 2,560 instructions.
_MAX_INSTRUCTIONS = 2500

#: Inode of a listening socket -> its descriptor.
Listeners = dict[int, int]


def detect_silence(sock: socket.socket) -> None:
    """Probe the other host while this TCP connection is idle. Sockets accepted by a listener inherit this."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_AFTER_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_EVERY_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, (SILENCE_S - _PROBE_AFTER_S) // _PROBE_EVERY_S)


def limit_unacknowledged(sock: socket.socket) -> None:
    """Also end this TCP connection if sent data stays unacknowledged. Takes the place of the number of idle probes."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000)


def listening() -> Listeners:
    """Return the TCP sockets on which this process listens."""
    found = {}
    for fd, sock in fork.own_sockets():
        with contextlib.suppress(OSError):  # another thread has closed it
            of_internet = sock.family in (socket.AF_INET, socket.AF_INET6)
            if of_internet and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found[os.fstat(fd).st_ino] = fd
    return found


def _still_open(listeners: Listeners) -> Iterator[socket.socket]:
    """Yield those that have not been closed, each for use until the next."""
    for inode, fd in listeners.items():
        try:
            if os.fstat(fd).st_ino != inode:
                continue  # the descriptor has been reused
        except OSError:
            continue
        with fork.borrowed(fd) as sock:
            yield sock


def networks(texts: Iterable[str]) -> list[Network]:
    """Parse addresses and networks in CIDR notation, merged. Raises ValueError, which names a bad one."""
    each = {ipaddress.ip_network(text.partition("%")[0], strict=False) for text in texts}
    four = ipaddress.collapse_addresses(net for net in each if isinstance(net, ipaddress.IPv4Network))
    six = ipaddress.collapse_addresses(net for net in each if isinstance(net, ipaddress.IPv6Network))
    return [*four, *six]


def admit_only(listeners: Listeners, admitted: Collection[Network]) -> None:
    """Allow only senders in ``admitted`` to connect to these listeners. Existing connections stay.

    Skips listeners that have been closed. Raises OSError if the kernel rejects the program, or its length; the listener
    then keeps its previous filter.
    """
    for sock in _still_open(listeners):
        _attach(sock, _program(6 if sock.family == socket.AF_INET6 else 4, admitted))


def notice_silence(listeners: Listeners) -> None:
    """Have connections accepted from now on end when the other host is silent for about 15 s, as after a power cut.

    TensorPipe does not do this itself, and would keep such a connection without end.
    """
    for sock in _still_open(listeners):
        detect_silence(sock)


def _program(version: int, admitted: Collection[Network]) -> list[tuple[int, int, int, int]]:
    program = []
    for network in admitted:
        if network.version != version:
            continue
        size = network.max_prefixlen // 32
        words = struct.unpack(f"!{size}I", network.network_address.packed)
        masks = struct.unpack(f"!{size}I", network.netmask.packed)
        compared = [(index, word, mask) for index, (word, mask) in enumerate(zip(words, masks, strict=True)) if mask]
        for left, (index, word, mask) in zip(range(len(compared) - 1, -1, -1), compared, strict=True):
            program += [
                (_LOAD, 0, 0, _NETWORK_HEADER + _SENDER[version] + 4 * index),
                (_AND, 0, 0, mask),
                (_JUMP_EQUAL, 0, 3 * left + 1, word),  # else continue with the next network
            ]
        program.append((_RETURN, 0, 0, _EVERYTHING))
    program.append((_RETURN, 0, 0, _NOTHING))
    return program


def _attach(sock: socket.socket, program: list[tuple[int, int, int, int]]) -> None:
    if len(program) > _MAX_INSTRUCTIONS:
        raise OSError(f"{len(program)} instructions exceed the limit of some kernels")
    steps = (struct.pack("HBBI", code, yes, no, value & _EVERYTHING) for code, yes, no, value in program)
    text = ctypes.create_string_buffer(b"".join(steps))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", len(program), ctypes.addressof(text)))
