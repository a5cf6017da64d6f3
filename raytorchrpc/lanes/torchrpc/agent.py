"""The torchrpc agent of this process: start, meet peers, part from them. No other file manages agents.

torch allows one agent at a time, and its RRef bookkeeping keeps the first agent a process ever had (a C++
singleton that no shutdown resets): after a second start every RRef of that process fails. So the agent
outlives the group. Leaving a group parts from the peers and parks the agent; the next group takes it again
unless it needs something an agent can only be given at its start.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import resource
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple

from raytorchrpc._compat import torch_internals
from raytorchrpc.errors import BootstrapError, LaneUnavailable, PeerLost
from raytorchrpc.process import fork, socket_filter, threads

logger = logging.getLogger(__name__)

#: How long a stop waits for torchrpc's threads (seconds). torch itself would wait for ever.
STOP_TIMEOUT_S = 2.0

#: Numbers of torchrpc's that no process has in a group; each uses them for itself (torch's numbers have 16 bits).
OWN_NUMBERS = range(3 << 13, 1 << 15)
#: What one connection of TensorPipe's to another host takes at most, and some for what is opened beside it: with the
#: channels that are used here 19 were counted.
_CONNECTION_FDS = 32

_INTERFACE = "TP_SOCKET_IFNAME"

DeviceDict = Mapping[int, int]


class AgentSpec(NamedTuple):
    """What an agent is given at its start and keeps for its life."""

    name: str
    """torchrpc's name of this process (``Member.rpc_name``): of the actor, so that a restart keeps it."""
    worker_id: int
    """Never used before in the group: peers keep the broken pipe of an agent that is gone under its id."""
    interface: str | None
    transports: tuple[str, ...]
    channels: tuple[str, ...]
    threads: int
    timeout_s: float
    device_maps: Mapping[str, DeviceDict]
    """By peer's torchrpc name: my gpu -> the peer's gpu, for arguments."""
    devices: tuple[int, ...]
    admitted: tuple[str, ...] = ()
    """Addresses and networks (CIDR) from which one may connect; TensorPipe itself asks nobody who he is. Empty: from
    everywhere. The only thing here that a running agent can change."""


class FabricPeer(NamedTuple):
    """A peer's agent, as it described itself."""

    name: str
    worker_id: int
    url: str
    inverse_map: DeviceDict
    """My gpu -> the peer's gpu, for results: the inverse of the peer's own map to me."""


class AgentIdentity(NamedTuple):
    """Of the agent that runs in this process, told to the driver before it plans."""

    name: str
    worker_id: int


class Fabric:
    """One per process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._agent: Any = None
        self._store: Any = None
        self._spec: AgentSpec | None = None
        self._url = ""
        self._peers: dict[str, FabricPeer] = {}
        self._workers: dict[str, Any] = {}
        self._unopened: dict[str, str] = {}
        """URLs of peers that have not been called yet: to those the next call opens connections."""
        self._renewed: set[str] = set()
        """Peers that have a number here which is not their own."""
        self._numbers = iter(OWN_NUMBERS)
        self._spoilt: set[int] = set()
        """Numbers under which the agent keeps a broken connection."""
        self._listeners: socket_filter.Listeners = {}
        self._agents_started = 0

    @property
    def identity(self) -> AgentIdentity | None:
        """Of the running agent, parked or not."""
        return AgentIdentity(self._spec.name, self._spec.worker_id) if self._spec else None

    @property
    def address(self) -> FabricPeer:
        """How peers reach the running agent; each fills in its own map. Raises LaneUnavailable if none runs."""
        identity = self.identity
        if identity is None:
            raise LaneUnavailable("torchrpc", "no torchrpc agent runs in this process")
        return FabricPeer(identity.name, identity.worker_id, self._url, {})

    def start(self, spec: AgentSpec, *, renew: bool = False) -> str:
        """Have an agent that fits ``spec``, the parked one (with its own id) if it does; returns its URL.

        ``renew`` starts a new one in any case. Raises BootstrapError when torch cannot start one. An interrupt
        (Ctrl-C) ends the wait and not the start: torch would keep an agent that nobody here knows of.
        """
        begun: Future[str] = Future()

        def begin() -> None:
            try:
                begun.set_result(self._have(spec, renew))
            except BaseException as error:
                begun.set_exception(error)

        try:
            threads.start(begin, name="raytorchrpc-start")
        except threads.ThreadShortage as error:
            raise BootstrapError(f"torchrpc's agent cannot be started: {error}") from error
        return begun.result()

    def _have(self, spec: AgentSpec, renew: bool) -> str:
        with self._lock:
            if self._agent is not None and (renew or not _fits(self._spec, spec)):
                logger.warning(
                    "restarting the torchrpc agent %s: the new group needs other devices, transports or "
                    "interface; RRefs of this process stop working (torch keeps the first agent for them)",
                    spec.name,
                )
                self._stop()
            if self._agent is None:
                self._start(spec)
            self._admit(spec.admitted)
            return self._url

    def _start(self, spec: AgentSpec) -> None:
        if torch_internals.agent_is_set():
            raise BootstrapError(
                "this process already runs torch.distributed.rpc on its own (init_rpc); torch allows one agent "
                "per process: call torch.distributed.rpc.shutdown() before joining a group"
            )
        before = socket_filter.listening()
        try:
            with _listening_on(spec.interface):
                self._agent, self._store, self._url = torch_internals.start_agent(
                    spec.name,
                    spec.worker_id,
                    threads=spec.threads,
                    timeout_s=spec.timeout_s,
                    transports=spec.transports,
                    channels=spec.channels,
                    device_maps=spec.device_maps,
                    devices=spec.devices,
                )
        except (RuntimeError, ValueError) as error:
            raise BootstrapError(f"torchrpc could not start its agent: {error}") from error
        hosts = {host for host, _ in fork.addresses_in(self._url)}
        now = socket_filter.listening()
        self._listeners = {inode: fd for inode, fd in now.items() if inode not in before and _host_of(fd) in hosts}
        socket_filter.notice_silence(self._listeners)
        if torch_internals.init_autograd(spec.worker_id) != spec.worker_id and self._agents_started == 0:
            self._agents_started = 1  # an agent of the user's own was here first: RRefs stay with that one
        self._spec = spec
        self._workers[spec.name] = self._agent.get_worker_info()  # an RRef to a result of one's own
        self._agents_started += 1
        if self._agents_started == 1:
            atexit.register(self._stop_at_exit)
            fork.register(self)

    def after_fork(self) -> list[fork.Address]:
        """See fork.ForkAware. The agent is never freed here: its end would wait for threads that are not here."""
        self._lock = threading.Lock()
        if self._agent is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._agent))
        urls = (self._url, *(peer.url for peer in self._peers.values()))
        return [address for url in urls for address in fork.addresses_in(url)]

    def add_peers(self, peers: Sequence[FabricPeer]) -> None:
        """Make these peers callable. Quick: connections are opened by the first call."""
        with self._lock:
            agent, spec = self._agent, self._spec
            if agent is None or spec is None:
                raise BootstrapError("no torchrpc agent runs in this process")
            for peer in peers:
                if self._peers.get(peer.name) == peer:
                    continue
                self._remove_peer(peer.name)
                self._renewed.discard(peer.name)
                if peer.worker_id in self._spoilt:
                    self._renew(agent, spec, peer)
                else:
                    self._add_peer(agent, spec, peer)

    def _add_peer(self, agent: Any, spec: AgentSpec, peer: FabricPeer) -> None:
        torch_internals.add_peer(
            agent,
            self._store,
            peer.name,
            peer.worker_id,
            peer.url,
            devices=spec.devices,
            inverse_map=peer.inverse_map,
        )
        self._peers[peer.name] = peer
        self._unopened[peer.name] = peer.url
        self._workers[peer.name] = agent.get_worker_info(peer.name)

    def renew(self, name: str, broken: Any) -> None:
        """Have the next call to a peer open new connections; ``broken``: the WorkerInfo by which they are broken.

        torch keeps a broken pipe under its peer's number for ever, so the peer gets another one, in this process alone.
        """
        with self._lock:
            peer, agent, spec = self._peers.get(name), self._agent, self._spec
            if peer is None or agent is None or spec is None or self._workers.get(name) is not broken:
                return  # it is gone, or somebody else was here before
            self._spoilt.add(peer.worker_id)
            self._remove_peer(name)
            self._renew(agent, spec, peer)

    def distrust(self, name: str) -> None:
        """A peer is out of reach: connections to it that exist may be broken by the time it can be called again, so it
        gets new ones then.
        """
        with self._lock:
            peer = self._peers.get(name)
            if peer is not None and name not in self._unopened:
                self._spoilt.add(peer.worker_id)

    def _renew(self, agent: Any, spec: AgentSpec, peer: FabricPeer) -> None:
        number = next(self._numbers, None)
        if number is None:
            logger.warning("%s: connections were made anew %d times; no more", peer.name, len(OWN_NUMBERS))
            number = peer.worker_id
        self._renewed.add(peer.name)
        self._add_peer(agent, spec, peer._replace(worker_id=number))

    def admit(self, hosts: Sequence[str]) -> None:
        """From now on these may connect, and nobody else; see AgentSpec.admitted. Connections that exist stay."""
        with self._lock:
            self._admit(hosts)

    def _admit(self, hosts: Sequence[str]) -> None:
        if not hosts or not self._listeners:
            return
        try:
            socket_filter.admit_only(self._listeners, socket_filter.networks(hosts))
        except OSError as error:
            logger.warning(
                "everybody who can route to this process can reach its torchrpc listener, which asks nobody who he is: "
                "the kernel does not take a filter for it (%s); keep strangers off with a firewall",
                error,
            )

    def worker(self, name: str) -> Any:
        """torch's WorkerInfo of a peer. Raises PeerLost for one that was never met, has parted, or has no route to it,
        and LaneUnavailable where this process lacks the descriptors for a first connection.
        """
        if (url := self._unopened.get(name)) is not None:
            _check_can_open(name, url)
            self._unopened.pop(name, None)
        try:
            return self._workers[name]
        except KeyError:
            raise PeerLost(name, "it is not a peer of this process", may_have_run=False) from None

    def can_rref(self) -> bool:
        """Whether torch's RRefs work here: only as long as the first agent lives."""
        return self._agent is not None and self._agents_started == 1

    def is_renewed(self, name: str) -> bool:
        """Whether a peer's connections broke and were made anew, under a number that no other process knows."""
        return name in self._renewed

    def remove_peers(self, names: Sequence[str]) -> None:
        """Forget these peers; calls under way to them end by their deadline."""
        with self._lock:
            for name in names:
                self._remove_peer(name)

    def _remove_peer(self, name: str) -> None:
        peer = self._peers.pop(name, None)
        self._workers.pop(name, None)
        self._unopened.pop(name, None)
        if peer is not None and self._agent is not None and self._spec is not None:
            kept = {other.name: other.inverse_map for other in self._peers.values() if other.inverse_map}
            devices = self._spec.devices
            torch_internals.remove_peer(self._agent, peer.name, peer.worker_id, devices=devices, inverse_maps=kept)

    def stop(self) -> None:
        """End the agent for good. Waits at most ``STOP_TIMEOUT_S``; a forked child does nothing."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._stop()

    def _stop_at_exit(self) -> None:
        # No thread can be started any more; none is needed, as no user code runs on torchrpc's own.
        if os.getpid() == self._pid and self._agent is not None:
            torch_internals.stop_agent()

    def _stop(self) -> None:
        if self._agent is None:
            return
        # torch waits for running handlers without a limit, so it waits on a thread that may be left behind.
        try:
            stopper = threads.start(torch_internals.stop_agent, name="raytorchrpc-stop")
        except threads.ThreadShortage as error:
            raise BootstrapError(f"torchrpc's agent cannot be stopped: {error}") from error
        stopper.join(STOP_TIMEOUT_S)
        if stopper.is_alive():
            logger.warning("torchrpc's agent did not stop within %.0f s; leaving it behind", STOP_TIMEOUT_S)
        self._agent = self._store = self._spec = None
        self._listeners = {}
        self._peers.clear()
        self._workers.clear()
        self._unopened.clear()
        self._spoilt.clear()


def _check_can_open(name: str, url: str) -> None:
    """TensorPipe ends the process when it cannot begin a connection; raises LaneUnavailable or PeerLost instead."""
    try:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = sys.maxsize if limit == resource.RLIM_INFINITY else limit
        left = limit - sum(int(fd) < limit for fd in os.listdir("/proc/self/fd"))
    except OSError:
        left = 0  # not even for this
    if left < _CONNECTION_FDS:
        raise LaneUnavailable(
            "torchrpc",
            f"a connection to {name} takes up to {_CONNECTION_FDS} descriptors and this process has {left} left of its "
            f"limit (ulimit -n)",
        )
    for host, port in fork.addresses_in(url):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((host, port))  # sends nothing: the kernel looks for a route
        except OSError as error:
            raise PeerLost(name, f"there is no route to it at {host}: {error}", may_have_run=False) from error


def _host_of(fd: int) -> str:
    sock = socket.socket(fileno=fd)
    try:
        return str(sock.getsockname()[0])
    finally:
        sock.detach()


@contextmanager
def _listening_on(interface: str | None) -> Iterator[None]:
    """TensorPipe reads its interface from the environment, when an agent starts.

    Without it the host name's address is taken, which is often 127.0.x.x.
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


def _fits(running: AgentSpec | None, wanted: AgentSpec) -> bool:
    """Whether the running agent can serve a new group. Peers come and go; the rest was fixed at its start."""
    if running is None:
        return False
    return (
        (running.name, running.interface, running.transports, running.channels)
        == (wanted.name, wanted.interface, wanted.transports, wanted.channels)
        and set(wanted.devices) <= set(running.devices)
        and all(running.device_maps.get(peer, {}) == mapping for peer, mapping in wanted.device_maps.items())
    )


_fabric: Fabric | None = None
_fabric_lock = threading.Lock()


def process_fabric() -> Fabric:
    """The one Fabric of this process; a forked child gets one of its own."""
    global _fabric
    with _fabric_lock:
        if _fabric is None or _fabric._pid != os.getpid():
            _fabric = Fabric()
        return _fabric
