"""The NIXL agent of this process: memory that peers may read, other agents, reads and notices.

Only this module uses NIXL. The first agent loads its library directly, not through NIXL's Python package: importing
that package reconfigures logging for the whole process, which closes handlers that a program has made.

NIXL runs on UCX. One NIXL thread makes progress for peers that read; it sleeps until the kernel reports an event, and
checks every 10 ms besides. (With NIXL's own Python class it would spin, and use a whole core even when idle.) A thread
that reads makes progress itself.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import itertools
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from operator import index
from typing import Any, Literal, NamedTuple

import numpy

from raytorchrpc._compat import nixl_package
from raytorchrpc.errors import LaneUnavailable
from raytorchrpc.lanes.setup import LaneSetup
from raytorchrpc.process.locks import Lock
from raytorchrpc.topology import rdma

LANE = "nixl"
Kind = Literal["cpu", "cuda"]

_POLL_US = 10_000
#: A read is polled without a pause for this time, and then with pauses that grow with the time it has taken (seconds).
_BRIEF_S, _LONGEST_PAUSE_S = 100e-6, 1e-3


def ucx_settings(setup: LaneSetup) -> dict[str, str] | None:
    """UCX's settings in a group, by name without ``UCX_``; None: LIBFABRIC is to be used instead.

    UCX's TCP ports answer reads from anybody who reaches them, so it opens them only where ``GroupConfig.lanes`` names
    the lane.
    """
    endpoint = setup.endpoint()
    if rdma.nixl_backend(endpoint) != "UCX":
        return None
    if LANE not in (setup.config.lanes or ()):
        port = rdma.near_port(endpoint) if setup.config.near_adapters else None
        return {"TLS": "^tcp"} | ({"NET_DEVICES": f"{port[0].name}:{port[1].number}"} if port else {})
    is_active = any(port.state == "ACTIVE" for hca in endpoint.hcas for port in hca.ports)
    return {} if is_active or not setup.interface else {"NET_DEVICES": setup.interface}


class Lost(ConnectionError):
    """The other agent cannot be reached, or the connection to it broke."""


class Registered(NamedTuple):
    """Memory that peers may read, and that reads may write."""

    number: int
    """Unique in this process. It takes the place of the device number in NIXL's tables (UCX examines the pointer
    itself), so that an address which is freed and registered again is not confused with the earlier registration.
    """
    kind: Kind
    address: int
    size: int
    blob: bytes  # what a peer needs to read it; a few hundred bytes
    handle: Any


#: A piece of a message, for its receiver: number and blob of its memory, address, bytes.
Place = tuple[int, bytes, int, int]


#: A range of registered memory: (address, bytes, its number).
Span = tuple[int, int, int]
#: Many of them: a row each (uint64) in an array.
Spans = Sequence[Span] | numpy.ndarray


def _checked(spans: Spans) -> Any:
    return spans if isinstance(spans, numpy.ndarray) else [(*map(index, span),) for span in spans]


def _library(package: str | None) -> Any:
    """NIXL's compiled module. Raises LaneUnavailable."""
    if package is None:
        raise LaneUnavailable(LANE, nixl_package.NIXL_MISSING)
    name = f"{package}._bindings"
    if name in sys.modules:
        return sys.modules[name]
    home = importlib.util.find_spec(package)
    module_spec = home and importlib.machinery.PathFinder.find_spec("_bindings", home.submodule_search_locations)
    if not module_spec or not module_spec.origin:
        raise LaneUnavailable(
            LANE, f"{package} has no module _bindings; raytorchrpc does not support this release of it"
        )
    spec = importlib.util.spec_from_file_location(name, module_spec.origin)
    assert spec is not None and spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise LaneUnavailable(LANE, f"{package} cannot be loaded: {error}") from error
    sys.modules[name] = module  # a later import of the package gets the same module
    return module


class Agent:
    """The NIXL agent of this process. Thread-safe."""

    def __init__(self, package: str | None, settings: Mapping[str, str] | None) -> None:
        """``package``: from ``_compat.nixl_package``. ``settings``: UCX settings, by name without ``UCX_``; the
        environment overrides them. None: use LIBFABRIC.

        Takes up to half a second. Raises LaneUnavailable.
        """
        self._nixl = nixl = _library(package)
        self._types = {"cpu": nixl.DRAM_SEG, "cuda": nixl.VRAM_SEG}
        self._numbers = itertools.count(1)
        self.name = f"raytorchrpc-{secrets.token_hex(8)}"
        config = nixl.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.pthrDelay = _POLL_US
        config.syncMode = nixl.NIXL_THREAD_SYNC_RW
        text = ",".join(f"{key}={value}" for key, value in (settings or {}).items())
        try:
            self._agent = nixl.nixlAgent(self.name, config)
            backend = "LIBFABRIC" if settings is None else "UCX"
            self._ucx = [self._agent.createBackend(backend, {"engine_config": text} if text else {})]
            nothing = nixl.nixlRegDList(nixl.DRAM_SEG)
            self.connection = bytes(self._agent.getLocalPartialMD(nothing, True, self._ucx))
        except Exception as error:
            if settings is None:
                raise LaneUnavailable(
                    LANE,
                    f"LIBFABRIC cannot be used ({error}); it needs libfabric and hwloc, as AWS's EFA installer brings "
                    f"them; FI_LOG_LEVEL=Debug in the environment of the job says more",
                ) from error
            raise LaneUnavailable(
                LANE,
                f"UCX found no usable transport ({error}; {text or 'its own choice of transports'}); set "
                f"UCX_LOG_LEVEL=info in the environment of the job to see what it found",
            ) from error

    def close(self) -> None:
        """End NIXL's thread and disconnect all peers. Reads in progress on other threads fail. Idempotent."""
        self._agent = None

    # --- memory --------------------------------------------------------------------------------------------

    def register(self, kind: Kind, address: int, size: int) -> Registered:
        """Lock memory and let peers read it. Slow: with RDMA it touches every page. Raises LaneUnavailable."""
        number = next(self._numbers)
        handle = self._nixl.nixlRegDList(self._types[kind], [(address, size, number, "")])
        try:
            self._agent.registerMem(handle, self._ucx)
            blob = bytes(self._agent.getLocalPartialMD(handle, False, self._ucx))
        except Exception as error:
            if kind == "cpu":
                remedy = "raise the limit on locked memory (ulimit -l unlimited, LimitMEMLOCK=infinity in the runtime)"
            else:
                remedy = (
                    "network adapters need nvidia-peermem or DMA-BUF to reach GPU memory, and cannot reach that of "
                    "expandable_segments:True"
                )
            raise LaneUnavailable(LANE, f"cannot register {size} bytes of {kind} memory ({error}): {remedy}") from error
        return Registered(number, kind, address, size, blob, handle)

    def deregister(self, *memories: Registered) -> None:
        """Undo ``register``. No read into this memory may be in progress."""
        for memory in memories:
            with contextlib.suppress(Exception):
                self._agent.deregisterMem(memory.handle, self._ucx)

    # --- other agents --------------------------------------------------------------------------------------

    def load(self, published: bytes, described: str) -> None:
        """Connect to the agent that published its ``connection``, or make a ``Registered.blob`` of it readable.

        Raises Lost, which names ``described``.
        """
        try:
            self._agent.loadRemoteMD(published)
        except Exception as error:
            raise Lost(f"{described} cannot be reached ({error})") from error

    def disconnect(self, name: str) -> None:
        """Disconnect from an agent. No read from it may be in progress."""
        with contextlib.suppress(Exception):  # not connected
            self._agent.invalidateRemoteMD(name)

    def notify(self, name: str, notice: bytes) -> None:
        """Send a notice to a connected agent. Raises Lost if it is known to be gone."""
        try:
            self._agent.genNotif(name, notice, self._ucx)
        except Exception as error:
            raise Lost(f"its NIXL agent does not answer ({error})") from error

    def notices(self) -> Mapping[str, Sequence[bytes]]:
        """Return the notices that have arrived since the last call, by agent."""
        with contextlib.suppress(Exception):  # closed meanwhile
            notices: Mapping[str, Sequence[bytes]] = self._agent.getNotifs({}, self._ucx)
            return notices
        return {}

    # --- reads ---------------------------------------------------------------------------------------------

    def read(self, name: str, kind: Kind, here: Spans, there: Spans, notice: bytes = b"") -> Read:
        """Begin to copy spans of another agent's memory to spans here. It receives ``notice``, if any, once all are
        done.

        Raises Lost, or TypeError for spans that are none.
        """
        nixl = self._nixl
        target, source = (nixl.nixlXferDList(self._types[kind], _checked(spans)) for spans in (here, there))
        try:
            handle = self._agent.createXferReq(nixl.NIXL_READ, target, source, name, notice, self._ucx)
        except Exception as error:
            raise Lost(f"a read cannot begin ({error})") from error
        return Read(self._agent, handle, nixl.NIXL_SUCCESS)


class Link:
    """This process's agent, and that of one peer. Thread-safe."""

    def __init__(self, agent: Agent, name: str, connection: bytes, cuda_obstacle: str | None) -> None:
        """The last three are what the peer's lane returned from ``open``."""
        self.agent, self.name, self.cuda_obstacle = agent, name, cuda_obstacle
        self._connection = connection
        self._lock = Lock()
        self._connected = False
        self._known: set[int] = set()  # the peer's memory that the agent has loaded, by the peer's number
        self._users = 0  # reads in progress
        self.lost: str | None = None
        """Why this link is broken. That is final: the sender may have reused its memory since."""

    def connect(self) -> None:
        """Connect to the peer's agent, once. Raises Lost."""
        with self._lock:
            if self.lost is not None:
                raise Lost(self.lost)
            if not self._connected:
                self.agent.load(self._connection, "its NIXL agent")
                self._connected = True

    def load(self, places: Sequence[Place]) -> None:
        """Load the peer's memory that these pieces of a message lie in. Raises Lost."""
        for number, blob, _, size in places:
            if size and number not in self._known:
                self.agent.load(blob, "its memory")
                self._known.add(number)

    def notify(self, notice: bytes) -> None:
        """Connect, and send a notice. Raises Lost."""
        self.connect()
        self.agent.notify(self.name, notice)

    def retain(self) -> None:
        with self._lock:
            self._users += 1

    def release(self) -> None:
        """Note that a read has ended. A broken link without reads is disconnected."""
        with self._lock:
            self._users -= 1
            if self.lost is not None and not self._users:
                self._disconnect()

    def end(self, why: str) -> None:
        """Break it; reads are abandoned."""
        with self._lock:
            self.lost = why
            if not self._users:
                self._disconnect()

    def disconnect(self) -> None:
        """Disconnect, though reads may be in progress: the lane is closed."""
        with self._lock:
            self._disconnect()

    def _disconnect(self) -> None:
        if self._connected:
            self._connected = False
            self.agent.disconnect(self.name)


class Read:
    """A read in progress. Not thread-safe. ``release`` it when it is done or has failed, not before."""

    def __init__(self, agent: Any, handle: int, success: Any) -> None:
        """Start it. Raises Lost."""
        self._agent, self._handle, self._success = agent, handle, success
        self.over = False  # whether it writes no more
        self._check(agent.postXferReq)

    def done(self) -> bool:
        """Whether it is complete. Raises Lost if it failed."""
        if not self.over:
            self._check(self._agent.getXferStatus)
        return self.over

    def _check(self, call: Callable[[int], Any]) -> None:
        try:
            self.over = call(self._handle) == self._success
        except Exception as error:
            self.over = True
            self.release()
            raise Lost(f"a read failed ({error})") from error

    def wait(self, deadline: float, wanted: Callable[[], bool]) -> bool:
        """Block until it is complete. False at the deadline (``time.monotonic``), or once ``wanted()`` is False.

        Polls without a pause for 100 us, then after an eighth of the time that has passed, at most 1 ms. Each poll also
        makes progress where UCX needs a thread for it. Raises Lost.
        """
        began = time.perf_counter()
        while not self.done():
            taken = time.perf_counter() - began
            if taken > _BRIEF_S:
                if not wanted() or time.monotonic() > deadline:
                    return False
                time.sleep(min(taken / 8, _LONGEST_PAUSE_S))
        self.release()
        return True

    def release(self) -> None:
        """Free it. A read in progress is cancelled, but may still write its memory for a while."""
        handle, self._handle = self._handle, 0
        if handle:
            with contextlib.suppress(Exception):
                self._agent.releaseXferReq(handle)
