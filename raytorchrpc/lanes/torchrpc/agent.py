"""The torchrpc agent of this process: starts and stops it, adds and removes peers. No other module manages agents.

torch allows one agent at a time, and its RRef bookkeeping keeps the first agent that a process started (a C++ singleton
that no shutdown resets): after a second start every RRef of the process fails. So the agent outlives the
group. Leaving a group removes the peers and keeps the agent idle. The next group reuses it, unless it needs what can
only be set at the start. Several groups at a time share it if they fit; one that does not goes without torchrpc.

It starts when this process first needs it, or when a member connects. Until then a listener of the guard's stands for
it, at the address that peers know; see ``process.guard``.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import io
import logging
import operator
import os
import pickle
import resource
import select
import socket
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, NamedTuple

from raytorchrpc._compat import ray_internals, torch_internals
from raytorchrpc.errors import BootstrapError, LaneUnavailable, PeerLost
from raytorchrpc.process import fork, guard, tcp, threads
from raytorchrpc.process.locks import Lock

logger = logging.getLogger(__name__)

#: How long a restart waits for torchrpc's threads (seconds). torch itself would wait without end.
_STOP_TIMEOUT_S = 2.0
#: Most descriptors for one TensorPipe connection to another host, with a margin: the channels used here took 19.
_CONNECTION_FDS = 32
_INTERFACE = "TP_SOCKET_IFNAME"
#: The request that finds the connections closed fails at once; this is for one that does not (seconds).
_FAILS_S = 10.0
#: How often to look whether the agent's threads poll its listeners, a millisecond apart. Not a time: the process may be
#: suspended, or get no core, while those threads are about to.
_LOOKS = 1000

#: What a group may need that a running agent does not have.
_ANOTHER_ID, _OTHER_SETTINGS = "another worker id", "other devices, transports or another interface"
#: Worker ids that no member of a group has; each process assigns them locally (torch's worker ids have 16 bits).
OWN_NUMBERS = range(3 << 13, 1 << 15)
#: What init_rpc raises in a member.
_NO_INIT_RPC = (
    "init_rpc: raytorchrpc runs the torchrpc agent of this process, for the groups that it joins, and torch allows one "
    "agent per process. Leave out init_rpc and rpc.shutdown(): rpc.rpc_sync(member.rpc_name, ...) and "
    "rpc.rpc_sync(rank, ...) reach the members of the group. Workers outside the group need processes of their own"
)

DeviceDict = Mapping[int, int]


class AgentSpec(NamedTuple):
    """The settings of an agent, fixed for its life but for ``admitted``."""

    name: str
    """torchrpc's name of this process (``Member.rpc_name``). It belongs to the actor, so a restart keeps it."""
    worker_id: int
    """Above all ids that its peers' agents have known: they keep the pipe of a former agent under its id."""
    interface: str | None
    address: str
    """Of the interface, or of the node."""
    transports: tuple[str, ...]
    channels: tuple[str, ...]
    threads: int
    timeout_s: float
    device_maps: Mapping[str, DeviceDict]
    """By the peer's torchrpc name: own GPU -> the peer's GPU, for arguments."""
    devices: tuple[int, ...]
    admitted: tuple[str, ...] = ()
    """Addresses and networks (CIDR) of members, of which one may ask to connect. Empty: all. Can change."""
    at_once: bool = False
    """Start it with the member."""


class AgentPeer(NamedTuple):
    """A peer's agent, as the peer describes it."""

    name: str
    worker_id: int
    url: str
    inverse_map: DeviceDict
    """Own GPU -> the peer's GPU, for results: the inverse of the peer's map to this process."""

    @property
    def host(self) -> str:
        """The address in the URL."""
        return self.url.partition("//")[2].rpartition(":")[0].strip("[]")


class AgentIdentity(NamedTuple):
    """Identity of the agent that runs in this process. The driver receives it before it plans the group."""

    name: str
    worker_id: int
    highest_id: int = -1
    """The highest worker id that this process has known, its own included."""


@dataclass(eq=False)
class KnownPeer:
    """A peer that calls can reach."""

    peer: AgentPeer
    worker: Any
    """torch's WorkerInfo."""
    opened: bool = False
    """Otherwise the next call opens its connections."""


class _Started:
    """An agent that torch has started, and its peers. Its owner's ``_changing`` is held to change it."""

    def __init__(self, owner: ProcessAgent, agent: Any, store: Any, devices: tuple[int, ...], me: AgentPeer) -> None:
        self.agent, self._owner, self._store, self._devices = agent, owner, store, devices
        self.me = KnownPeer(me, agent.get_worker_info(), opened=True)
        """This process, for RRefs to its own results."""
        self.peers: dict[str, KnownPeer] = {}
        self._removed: set[str] = set()
        """Names of removed peers that the agent still has."""
        self.spoilt: set[int] = set()
        """Worker ids under which the agent keeps a broken connection."""
        self._urls: dict[int, str] = {}
        """By worker id: the one peer that the agent connects to under it."""

    def add(self, peer: AgentPeer, *, renew: bool = False) -> None:
        """``renew``: calls open new connections."""
        # torch would send to the process that it has connected to under this id before.
        is_elsewhere = self._urls.setdefault(peer.worker_id, peer.url) != peer.url
        if renew or is_elsewhere or peer.worker_id in self.spoilt:
            if (fresh := next(self._owner.own_numbers, None)) is None:
                text = "%s: its connections broke %d times; they cannot be renewed again"
                logger.warning(text, peer.name, len(OWN_NUMBERS))
            else:
                peer = peer._replace(worker_id=fresh)
        name, number, url, inverse = peer
        if name in self._removed:
            self._removed.discard(name)
            maps = {other: each.peer.inverse_map for other, each in self.peers.items() if each.peer.inverse_map}
            with self._owner.sending:
                torch_internals.forget_name(self.agent, name, devices=self._devices, inverse_maps=maps)
        torch_internals.add_peer(self.agent, self._store, name, number, url, devices=self._devices, inverse_map=inverse)
        self.peers[name] = KnownPeer(peer, self.agent.get_worker_info(name))

    def remove(self, name: str) -> None:
        known = self.peers.pop(name, None)
        if known is None:
            return
        if known.opened and known.peer.worker_id in self.spoilt:
            close_connections(known.worker, known.peer.url, [each.peer.url for each in self.peers.values()])
        torch_internals.remove_peer(name)
        self._removed.add(name)


class ProcessAgent:
    """The TensorPipe agent of this process: prepared, so that peers can know its address, started, or neither.

    Thread-safe. It has two locks, of which a thread takes ``_changing`` first. Both are re-entrant, since what torch
    does under them may run a finalizer that sends a request, or starts the agent for one.
    """

    def __init__(self) -> None:
        self._changing = threading.RLock()
        """Orders what changes this object, the agent and its peers. Held for up to seconds, to start or stop it: a call
        takes it only if its peer is not there."""
        self.sending = threading.RLock()
        """Orders requests and the removal of names: torch looks up the URL of a request's peer in a table from which it
        erases others without a lock. Held while torch sends a request."""
        self._pid = os.getpid()
        self._spec: AgentSpec | None = None
        """None before ``prepare``."""
        self._started: _Started | None = None
        self._url = ""
        self._front: socket.socket | None = None
        """Listens at ``_url``."""
        self._doors: list[guard.Takeover] = []
        """The agent's own listeners and its channels'; the first is that of calls."""
        self._coming: dict[str, AgentPeer] = {}
        """Peers of an agent that has not started yet, or is about to add them."""
        self.own_numbers = iter(OWN_NUMBERS)
        self._highest_id = -1
        self.shares_autograd_id = False
        """Another member may have the same id in distributed autograd, which has one id for the life of a process."""
        self._agents_started = 0
        self._users: dict[str, Sequence[str]] = {}
        """By the generation of each group that uses it, where the present members may connect from; see
        AgentSpec.admitted."""
        self._needs: dict[str, set[str]] = {}
        """By the name of a peer, the groups that have it."""
        self._starter = 0
        """The thread that starts the agent."""
        fork.register(self)

    @property
    def identity(self) -> AgentIdentity | None:
        """Identity of the agent, idle or not started yet included."""
        return AgentIdentity(self._spec.name, self._spec.worker_id, self._highest_id) if self._spec else None

    @property
    def address(self) -> AgentPeer:
        """How peers reach the agent; each fills in its own map. Raises LaneUnavailable if there is none."""
        if self._spec is None:
            raise LaneUnavailable("torchrpc", "this process has no torchrpc agent")
        return AgentPeer(self._spec.name, self._spec.worker_id, self._url, {})

    @property
    def is_running(self) -> bool:
        """Whether the agent has started."""
        return self._started is not None

    def prepare(self, spec: AgentSpec, user: str = "", *, renew: bool = False) -> str:
        """Have a place for an agent that fits ``spec``, and listen for it: the agent that is there, with its own id, if
        it fits. Returns the URL. The agent itself starts when it is needed, or now if ``spec`` says so.

        ``user``: the generation of the group. ``renew``: no agent of before will do. Raises LaneUnavailable if another
        group uses one that does not fit, and BootstrapError if torch cannot start one. An interrupt (Ctrl-C) ends the
        wait, but not the start: torch would otherwise keep an agent unknown to this object.
        """
        with self._changing:
            if (running := self._spec) is not None and self._users.keys() - {user}:
                if renew or not _fits(running, spec, self._started is not None):
                    needed = _ANOTHER_ID if renew else _OTHER_SETTINGS
                    raise LaneUnavailable("torchrpc", f"this process's agent serves another group; this needs {needed}")
                maps = {**running.device_maps, **spec.device_maps}
                devices = tuple(sorted({*running.devices, *spec.devices}))
                self._spec = running._replace(device_maps=maps, devices=devices)
                self.admit(spec.admitted, user)
            else:
                self._prepare(spec, user, renew)
        if spec.at_once:
            try:
                self.start()
            except BootstrapError:
                self.rest(user)
                raise
        return self._url

    def _prepare(self, spec: AgentSpec, user: str, renew: bool) -> None:
        if self._started is not None and not torch_internals.agent_is_set():
            logger.warning(
                "the program has called torch.distributed.rpc.shutdown(): starting another torchrpc agent; RRefs "
                "of this process no longer work, because torch uses the first agent for them"
            )
            self._forget_agent()
        if self._started is not None and self._spec is not None and (renew or not _fits(self._spec, spec, True)):
            logger.warning(
                "restarting the torchrpc agent %s: the new group needs %s; RRefs of this process no longer work, "
                "because torch uses the first agent for them",
                spec.name,
                _ANOTHER_ID if renew else _OTHER_SETTINGS,
            )
            self._stop()
        self.shares_autograd_id |= renew
        if self._started is None:
            self._check_alone()
            if torch_internals.autograd_id() is not None and self._spec is None and self._agents_started == 0:
                self._agents_started = 1  # the program had its own agent before, which RRefs stay with
            torch_internals.init_autograd(spec.worker_id)
            torch_internals.adapt_rpc(RpcPickler, _NO_INIT_RPC, self._start_for_torch)
            self._highest_id = max(self._highest_id, spec.worker_id)
            self._spec = spec
            self._listen(spec.address)
        self.admit(spec.admitted, user)

    def _check_alone(self) -> None:
        if torch_internals.agent_is_set():
            raise BootstrapError(
                "this process already runs torch.distributed.rpc on its own (init_rpc); torch allows one agent "
                "per process: call torch.distributed.rpc.shutdown() before joining a group"
            )

    def _listen(self, host: str) -> None:
        if self._front is not None and self._front.getsockname()[0] == host:
            return
        self._close_front()
        try:
            self._front = guard.process_guard().listen(host, self._deliver, _first_message)
        except OSError as error:
            raise BootstrapError(f"torchrpc cannot listen on {host}: {error}") from error
        shown = f"[{host}]" if ":" in host else host
        self._url = f"uv://{shown}:{self._front.getsockname()[1]}"

    def _deliver(self, sock: socket.socket) -> None:
        """Have the agent accept a member's connection."""
        self.start()
        self._doors[0].deliver(sock)

    def start(self) -> None:
        """Start the agent, if it does not run yet. Blocks for about 50 ms. Raises BootstrapError."""
        if self._started is not None and not self._coming:
            return
        begun: Future[None] = Future()

        def begin() -> None:
            with self._changing:
                self._starter = threading.get_ident()
                if self._started is None:
                    self._start()

        threads.start(threads.settle, begun, begin, name="raytorchrpc-start")
        begun.result()

    def _start_for_torch(self) -> None:
        """torch's own API is about to be used."""
        if self._users and threading.get_ident() != self._starter and os.getpid() == self._pid:
            self.start()

    def _start(self) -> None:
        spec = self._spec
        if spec is None or not self._users:
            raise BootstrapError("this process has no torchrpc agent to start: it is in no group")
        self._check_alone()
        before, polled = tcp.listening(), guard.registered()
        try:
            with listening_on(spec.interface):
                agent, store, url = torch_internals.start_agent(
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
        self._guard_listeners(before, polled, set(fork.addresses_in(url)))
        me = AgentPeer(spec.name, spec.worker_id, self._url, {})
        started = _Started(self, agent, store, spec.devices, me)
        self._agents_started += 1
        if self._agents_started == 1:
            atexit.register(self._stop_at_exit)
        self._started = started
        try:
            for peer in self._coming.values():
                started.add(peer)
        finally:
            self._coming = {}  # from now on other threads need not wait

    def _guard_listeners(
        self, before: Collection[int], polled: Mapping[int, guard.Registered], own: Collection[fork.Address]
    ) -> None:
        """Take over what the agent listens on: until then it admits anybody, for about a millisecond.

        ``before``, ``polled``: what this process listened on and polled before. Other threads may open listeners too.
        """
        hosts = {host for host, _ in own}
        opened = {fd: _name_of(fd) for inode, fd in tcp.listening().items() if inode not in before}
        opened = {fd: name for fd, name in opened.items() if name[0] in hosts}
        try:
            for fd in opened:
                with fork.borrowed(fd) as listener:
                    tcp.admit_only(listener, ())
            registered = _registered(opened)
            others = {entry[0] for fd, entry in registered.items() if entry == polled.get(fd)}
            for fd in [fd for fd in opened if fd not in registered or registered[fd][0] in others]:
                if opened[fd] not in own:
                    del opened[fd]
                    with fork.borrowed(fd) as listener:
                        tcp.admit_all(listener)
            for _, sock in fork.own_sockets():
                with suppress(OSError):  # it is not connected
                    if sock.getsockname() in opened.values() and sock.getpeername():
                        tcp.admit_only(sock, ())  # a stranger was faster: nothing more of it comes in
            for fd in sorted(opened, key=lambda fd: opened[fd] not in own):
                door = guard.Takeover(fd, registered.get(fd))
                self._doors.append(door)
                guard.process_guard().watch(door.public, door.deliver, _first_message)
            self._filter()
        except OSError as error:
            torch_internals.stop_agent()
            self._forget_doors()
            raise BootstrapError(
                f"torchrpc's listener, which authenticates nobody, cannot be guarded on this kernel: {error}"
            ) from error

    def after_fork(self) -> list[fork.Address]:
        """See fork.ForkAware. The agent is never freed in the child, where that would wait for missing threads."""
        self._changing, self.sending = threading.RLock(), threading.RLock()
        urls = [self._url]
        if self._started is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._started.agent))
            urls += [known.peer.url for known in self._started.peers.values()]
        return [address for url in urls for address in fork.addresses_in(url)]

    def add_peers(self, peers: Sequence[AgentPeer], user: str = "") -> None:
        """Make peers of a group callable. Quick: the first call opens connections."""
        with self._changing:
            numbers = [peer.worker_id for peer in peers if peer.worker_id not in OWN_NUMBERS]
            self._highest_id = max(self._highest_id, *numbers, -1)
            for peer in peers:
                self._needs.setdefault(peer.name, set()).add(user)
                if self._started is None:
                    self._coming[peer.name] = peer
                elif (known := self._started.peers.get(peer.name)) is None or known.peer != peer:
                    if known is not None and known.peer.url == peer.url and self._needs[peer.name] != {user}:
                        continue  # another group has it, and the same connections
                    self._started.remove(peer.name)
                    self._started.add(peer)

    def renew(self, name: str, broken: Any) -> None:
        """Have the next call to a peer open new connections. ``broken``: the WorkerInfo with the broken ones.

        torch keeps a broken pipe under its worker id without end, so the peer gets another id, in this process only.
        """
        with self._changing:
            if (started := self._started) is None or (known := started.peers.get(name)) is None:
                return
            if known.worker is broken:  # else another thread has renewed it
                started.spoilt.add(known.peer.worker_id)
                started.remove(name)
                started.add(known.peer, renew=True)

    def distrust(self, name: str) -> None:
        """Note that a peer is unreachable: its connections may be broken once it returns, so it gets new ones then."""
        with self._changing:
            started = self._started
            if started is not None and (known := started.peers.get(name)) is not None and known.opened:
                started.spoilt.add(known.peer.worker_id)

    def admit(self, hosts: Sequence[str], user: str = "") -> None:
        """Listen to these hosts of a group too; see AgentSpec.admitted. Existing connections stay."""
        with self._changing:
            self._users[user] = hosts
            self._filter()

    def rest(self, user: str = "") -> None:
        """The group has ended: listen to nobody of it. Idempotent."""
        with self._changing:
            if self._users.pop(user, None) is not None:
                if not self._users:
                    self._coming.clear()
                    self._needs.clear()
                self._filter()

    def _filter(self) -> None:
        hosts = [host for admitted in self._users.values() for host in (admitted or ("0.0.0.0/0", "::/0"))]
        networks = tcp.networks(hosts)
        for listener in (*((self._front,) if self._front else ()), *(door.public for door in self._doors)):
            try:
                tcp.admit_only(listener, networks)
            except OSError as error:
                threads.report(error, "torchrpc's listener asks members about connections from any host")

    def peer(self, name: str) -> KnownPeer:
        """Return a peer with torch's WorkerInfo for it. Send requests to it within ``sending``.

        Raises PeerLost; or LaneUnavailable if descriptors are short, or the program has stopped the agent.
        """
        if self._started is None:
            try:
                self.start()
            except BootstrapError as error:
                raise LaneUnavailable("torchrpc", str(error)) from error
        elif not torch_internals.agent_is_set():
            raise LaneUnavailable(
                "torchrpc",
                "this process has called torch.distributed.rpc.shutdown(), which a member must not do: leave that out, "
                "and form the group again",
            )
        known = self._find(name)
        if known is None:
            with self._changing:  # another thread may be about to add those of before the start
                known = self._find(name)
        if known is None:
            raise PeerLost(name, "it is not a peer of this process", may_have_run=False)
        if not known.opened:
            check_can_open(name, known.peer.url)
            known.opened = True
        return known

    def _find(self, name: str) -> KnownPeer | None:
        if (started := self._started) is None:
            return None
        return started.peers.get(name) or (started.me if name == started.me.peer.name else None)

    def rref_obstacle(self, known: KnownPeer) -> str | None:
        """Why torch's RRefs to a peer do not work; None if they do."""
        if self._started is None or self._agents_started != 1:
            return (
                "torch's RRefs only work with the first agent of a process, and this process restarted its agent for "
                "another group (other devices, transports, interface or worker id); restart the actor"
            )
        if known.peer.worker_id in OWN_NUMBERS:
            return (
                "the connections to this member broke and were renewed, and torch's RRefs only work with the first "
                "ones; restart either actor"
            )
        return None

    def remove_peer(self, name: str, user: str = "") -> None:
        """Remove a peer that no other group has. Calls to it in flight end by their deadline."""
        with self._changing:
            needs = self._needs.get(name, set())
            needs.discard(user)
            if needs:
                return
            self._needs.pop(name, None)
            self._coming.pop(name, None)
            if self._started is not None:
                self._started.remove(name)

    def _stop_at_exit(self) -> None:
        # No thread can be started now. None is needed, as no user code runs on torchrpc's threads.
        if os.getpid() == self._pid and self._started is not None:
            torch_internals.stop_agent()

    def _stop(self) -> None:
        self._forget_doors()
        # torch waits for running handlers without a limit, so it does that on a thread that may be left behind.
        stopper = threads.start(torch_internals.stop_agent, name="raytorchrpc-stop")
        stopper.join(_STOP_TIMEOUT_S)
        if stopper.is_alive():
            logger.warning("torchrpc's agent did not stop within %.0f s; its threads keep running", _STOP_TIMEOUT_S)
        self._forget_agent()

    def _forget_agent(self) -> None:
        self._started = self._spec = None
        self._forget_doors()

    def _forget_doors(self) -> None:
        for door in self._doors:
            guard.process_guard().close(door.public)
            door.close()
        self._doors.clear()

    def _close_front(self) -> None:
        if self._front is not None:
            guard.process_guard().close(self._front)
            self._front = None


def _fits(running: AgentSpec, wanted: AgentSpec, has_started: bool) -> bool:
    """Whether the agent can serve a new group. Its peers can change; once it has started, its other settings cannot."""
    maps = {**({} if has_started else wanted.device_maps), **running.device_maps}
    return (
        (running.name, running.interface, running.transports, running.channels)
        == (wanted.name, wanted.interface, wanted.transports, wanted.channels)
        and (not has_started or set(wanted.devices) <= set(running.devices))
        and all(maps.get(peer, {}) == mapping for peer, mapping in wanted.device_maps.items())
    )


def check_can_open(name: str, url: str) -> None:
    """Raise LaneUnavailable or PeerLost if a connection cannot be opened, where TensorPipe would abort the process."""
    try:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = sys.maxsize if limit == resource.RLIM_INFINITY else limit
        available = limit - sum(int(fd) < limit for fd in os.listdir("/proc/self/fd"))
    except OSError:
        available = 0  # not even to list them
    if available < _CONNECTION_FDS:
        needed = f"a connection to {name} takes up to {_CONNECTION_FDS} descriptors"
        raise LaneUnavailable(
            "torchrpc", f"{needed} and this process has {available} left; raise its limit (ulimit -n)"
        )
    for host, port in fork.addresses_in(url):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((host, port))  # sends nothing, but fails if the kernel has no route
        except OSError as error:
            raise PeerLost(name, f"there is no route to it at {host}: {error}", may_have_run=False) from error


def unreachable(urls: Mapping[str, str], until: float) -> dict[str, str]:
    """Connect to each listener, and hang up; by the same key, why one cannot be reached. Starts no agent there.

    Blocks until all have answered, at most until that time (``time.monotonic``).
    """
    reasons: dict[str, str] = {}
    with ExitStack() as opened:
        waiting: dict[int, tuple[str, socket.socket, str]] = {}
        poll = select.poll()
        for key, url in urls.items():
            for host, port in fork.addresses_in(url):
                sock = opened.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
                sock.setblocking(False)
                failed = sock.connect_ex((host, port))
                if failed in (0, errno.EINPROGRESS):
                    waiting[sock.fileno()] = key, sock, f"{host}:{port}"
                    poll.register(sock, select.POLLOUT)
                else:
                    reasons[key] = f"torchrpc at {host}:{port}: {os.strerror(failed)}"
        while waiting and (remaining_s := until - time.monotonic()) > 0:
            for fd, _ in poll.poll(remaining_s * 1000):
                poll.unregister(fd)
                key, sock, where = waiting.pop(fd)
                if failed := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    reasons[key] = f"torchrpc at {where}: {os.strerror(failed)}"
        reasons.update({key: f"no answer from torchrpc at {where} in time" for key, _, where in waiting.values()})
    return reasons


def _first_message(head: bytes) -> int:
    """Bytes of TensorPipe's first message on a connection: its length, in eight bytes, and so many bytes.

    That of ibv has no length, and begins with an address.
    """
    length = int.from_bytes(head, "little") if len(head) == 8 else 0
    return 8 + length if length < guard.LONGEST_BYTES else 8


def _registered(listeners: Collection[int]) -> dict[int, guard.Registered]:
    """See guard.registered. The agent's threads may be about to register its listeners; another's may not be polled."""
    for _ in range(_LOOKS):
        registered = guard.registered()
        if not registered or registered.keys() >= set(listeners):
            break
        threads.pause(0.001)
    return registered


def _name_of(fd: int) -> fork.Address:
    with fork.borrowed(fd) as listener:
        return guard.address(listener.getsockname())


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


def close_connections(worker: Any, url: str, others: Collection[str]) -> None:
    """Close the connections to a peer that nothing uses any more.

    An idle pipe of TensorPipe reads nothing, so it would keep its descriptors until this process ends. One request
    fails on the closed connections, and the pipe gives all of its descriptors back. Nothing is sent.

    Args:
        worker: torch's WorkerInfo of the peer, which the agent still has.
        url: where the peer listens.
        others: where other peers listen, to which connections stay.
    """
    elsewhere = {address for other in others for address in fork.addresses_in(other)}
    if _shut(set(fork.addresses_in(url)) - elsewhere):
        with suppress(RuntimeError):
            torch_internals.invoke_async(worker, operator.not_, (True,), _FAILS_S)


def _shut(addresses: Collection[fork.Address]) -> bool:
    """Shut all connections of this process to these addresses; whether there is any."""
    any_shut = False
    with suppress(OSError):  # no descriptor left, even to list them
        for _, connection in fork.own_sockets() if addresses else ():
            with suppress(OSError):  # it is not connected
                if tcp.is_tcp(connection) and connection.getpeername()[:2] in addresses:
                    connection.shutdown(socket.SHUT_RDWR)
                    any_shut = True
    return any_shut


class RpcPickler(pickle.Pickler):
    """Pickles the arguments of torch's RPC in a member: classes and functions of the driver's ``__main__`` by value.

    torch pickles them by name, which the receiver would look up in its own ``__main__``: Ray's worker script. From the
    first one on, Ray's cloudpickle decides what is pickled by value.

    It does not pickle twice: pickling an RRef registers a reference with its owner.
    """

    _by_value: Any = None

    def reducer_override(self, obj: Any) -> Any:
        if (refuse := ray_internals.refusals().get(type(obj))) is not None:
            return refuse(obj)
        if self._by_value is None:
            if not isinstance(obj, (type, FunctionType)) or obj.__module__ != "__main__":
                return NotImplemented
            self._by_value = ray_internals.cloudpickler()(io.BytesIO())
        kind = type(obj)
        if kind is MethodType:  # cloudpickle would pickle class methods by value, torch's own included
            return NotImplemented
        if kind not in self.dispatch_table and (reduce := self._by_value.dispatch_table.get(kind)) is not None:
            return reduce(obj)  # what functions and classes consist of: code, cells, modules
        return self._by_value.reducer_override(obj)


_process_agent: ProcessAgent | None = None
_process_lock = Lock()


def process_agent() -> ProcessAgent:
    """Return the TensorPipe agent of this process. A forked child gets a new one."""
    global _process_agent
    with _process_lock:
        if _process_agent is None or _process_agent._pid != os.getpid():
            _process_agent = ProcessAgent()
        return _process_agent
