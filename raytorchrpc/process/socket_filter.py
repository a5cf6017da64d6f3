"""Who may open a connection to a listener of this process that does not ask for itself: TensorPipe's.

The kernel drops what comes from elsewhere before anybody accepts it, by a classic BPF program on the listening socket
(``SO_ATTACH_FILTER``, socket(7)). That needs no privilege and costs a connection a few instructions for each packet.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
import struct
from collections.abc import Collection, Iterable

from raytorchrpc.process.keepalive import detect_silence

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_SO_ATTACH_FILTER = 26  # asm-generic/socket.h; the socket module does not have it
# linux/filter.h: load a word, and with a constant, jump if equal, return.
_LOAD, _AND, _JUMP_EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06
# A load from this offset on reads the network header, whatever the program is attached to.
_NETWORK_HEADER = -0x100000
# Where the sender's address is in that header.
_SENDER = {4: 12, 6: 8}
_EVERYTHING, _NOTHING = 0xFFFFFFFF, 0
# The kernel counts programs against net.core.optmem_max, 20 KiB on older ones: 2,560 instructions.
_MAX_INSTRUCTIONS = 2500

#: Inode of a listening socket -> its descriptor.
Listeners = dict[int, int]


def listening() -> Listeners:
    """The TCP sockets on which this process listens."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        fd = int(entry)
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            inode = os.fstat(fd).st_ino
            sock = socket.socket(fileno=fd)
            try:
                of_internet = sock.family in (socket.AF_INET, socket.AF_INET6)
                if of_internet and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found[inode] = fd
            finally:
                sock.detach()
    return found


def networks(texts: Iterable[str]) -> list[Network]:
    """Addresses and networks in CIDR notation, as few as cover the same. Raises ValueError, naming a bad one."""
    each = {ipaddress.ip_network(text.partition("%")[0], strict=False) for text in texts}
    four = ipaddress.collapse_addresses(net for net in each if isinstance(net, ipaddress.IPv4Network))
    six = ipaddress.collapse_addresses(net for net in each if isinstance(net, ipaddress.IPv6Network))
    return [*four, *six]


def admit_only(listeners: Listeners, admitted: Collection[Network]) -> None:
    """From now on only senders in ``admitted`` can connect to these; connections that exist stay.

    A listener that has been closed since is passed over. Raises OSError where the kernel takes no such program, or none
    so long: the listener is then as open as it was.
    """
    for inode, fd in listeners.items():
        if not _is(fd, inode):
            continue  # its number is somebody else's now
        sock = socket.socket(fileno=fd)
        try:
            _attach(sock, _program(6 if sock.family == socket.AF_INET6 else 4, admitted))
        finally:
            sock.detach()


def notice_silence(listeners: Listeners) -> None:
    """What these accept from now on ends when the other host is silent for about 15 s, as after a power cut: accepted
    sockets inherit this. TensorPipe asks for nothing of the kind, and would keep such a connection for ever.
    """
    for inode, fd in listeners.items():
        if not _is(fd, inode):
            continue
        sock = socket.socket(fileno=fd)
        try:
            detect_silence(sock)
        finally:
            sock.detach()


def _is(fd: int, inode: int) -> bool:
    try:
        return os.fstat(fd).st_ino == inode
    except OSError:
        return False


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
                (_JUMP_EQUAL, 0, 3 * left + 1, word),  # else on to the next network
            ]
        program.append((_RETURN, 0, 0, _EVERYTHING))
    program.append((_RETURN, 0, 0, _NOTHING))
    return program


def _attach(sock: socket.socket, program: list[tuple[int, int, int, int]]) -> None:
    if len(program) > _MAX_INSTRUCTIONS:
        raise OSError(f"{len(program)} instructions are more than every kernel takes")
    steps = (struct.pack("HBBI", code, yes, no, value & _EVERYTHING) for code, yes, no, value in program)
    text = ctypes.create_string_buffer(b"".join(steps))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", len(program), ctypes.addressof(text)))


__all__ = ["Listeners", "Network", "admit_only", "listening", "networks", "notice_silence"]
