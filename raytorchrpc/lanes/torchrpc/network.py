"""The sockets of a torchrpc agent: what it listens on, and whether it can connect."""

from __future__ import annotations

import os
import resource
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from raytorchrpc.errors import LaneUnavailable, PeerLost
from raytorchrpc.process import fork

#: Most descriptors for one TensorPipe connection to another host, with a margin: the channels used here took 19.
_CONNECTION_FDS = 32

_INTERFACE = "TP_SOCKET_IFNAME"


def check_can_open(name: str, url: str) -> None:
    """Raise LaneUnavailable or PeerLost if a connection cannot be opened, where TensorPipe would abort the process."""
    try:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = sys.maxsize if limit == resource.RLIM_INFINITY else limit
        left = limit - sum(int(fd) < limit for fd in os.listdir("/proc/self/fd"))
    except OSError:
        left = 0  # not even to list them
    if left < _CONNECTION_FDS:
        needed = f"a connection to {name} takes up to {_CONNECTION_FDS} descriptors"
        raise LaneUnavailable("torchrpc", f"{needed} and this process has {left} left; raise its limit (ulimit -n)")
    for host, port in fork.addresses_in(url):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((host, port))  # sends nothing, but fails if the kernel has no route
        except OSError as error:
            raise PeerLost(name, f"there is no route to it at {host}: {error}", may_have_run=False) from error


def host_of(fd: int) -> str:
    """The address that a listening socket is bound to."""
    sock = socket.socket(fileno=fd)
    try:
        return str(sock.getsockname()[0])
    finally:
        sock.detach()


@contextmanager
def listening_on(interface: str | None) -> Iterator[None]:
    """Set TensorPipe's interface in the environment, where it reads it when an agent starts.

    By default it takes the address of the host name, which is often 127.0.x.x.
    """
    before = os.environ.get(_INTERFACE)
    if interface is not None:
        os.environ[_INTERFACE] = interface
    try:
        yield
    finally:
        if before is not None:
            os.environ[_INTERFACE] = before
        elif interface is not None:
            del os.environ[_INTERFACE]
