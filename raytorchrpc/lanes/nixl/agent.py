"""NIXL's agent as the nixl lane uses it: memory that peers may read, other agents, reads and notices.

Nothing else touches NIXL. It is loaded by the first agent, and its Python package is passed by: importing that
configures logging anew for the whole process, which closes the handlers that a program has made.

UCX lies underneath. One thread of NIXL's keeps it going for peers that ask; it sleeps until the kernel reports an
event, and looks around every 10 ms besides. (NIXL's own Python class lets it spin: a whole core, also when idle.)
A thread that reads keeps UCX going itself.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import itertools
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from raytorchrpc._compat import nixl_package
from raytorchrpc.errors import LaneUnavailable

LANE = "nixl"
Kind = Literal["cpu", "cuda"]

_BACKEND = "UCX"
_LOOKS_US = 10_000
#: A read is asked for without a pause for so long; then after pauses that grow with the time it has taken (seconds).
_BRIEF_S, _LONGEST_PAUSE_S = 100e-6, 1e-3


class Lost(ConnectionError):
    """The other agent cannot be reached, or the way to it broke."""


class Registered(NamedTuple):
    """Memory that peers may read, and that reads may fill."""

    number: int
    """Never given again by this process. It stands for the device in NIXL's tables (UCX asks the pointer), so that an
    address which is freed and registered again is never taken for what it was."""
    kind: Kind
    address: int
    size: int
    blob: bytes
    """What a peer needs to read it: a few hundred bytes."""
    handle: Any


class Span(NamedTuple):
    """A part of registered memory here, and of a peer's, of one size."""

    address: int
    number: int
    its_address: int
    its_number: int
    size: int


def _library(package: str | None) -> Any:
    """NIXL's compiled module. Raises LaneUnavailable."""
    if package is None:
        raise LaneUnavailable(LANE, nixl_package.NIXL_MISSING)
    name = f"{package}._bindings"
    if name in sys.modules:
        return sys.modules[name]
    home = importlib.util.find_spec(package)
    found = home and importlib.machinery.PathFinder.find_spec("_bindings", home.submodule_search_locations)
    if not found or not found.origin:
        raise LaneUnavailable(LANE, f"{package} has no module _bindings; this release of it is not known here")
    spec = importlib.util.spec_from_file_location(name, found.origin)
    assert spec is not None and spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise LaneUnavailable(LANE, f"{package} cannot be loaded: {error}") from error
    sys.modules[name] = module  # whoever imports the package later gets the same one
    return module


class Agent:
    """This process's. Thread-safe."""

    def __init__(self, package: str | None, settings: Mapping[str, str]) -> None:
        """``package``: as ``_compat.nixl_package`` says. ``settings``: of UCX, by name without ``UCX_``; those in the
        environment win.

        Takes up to half a second. Raises LaneUnavailable.
        """
        self._nixl = nixl = _library(package)
        self._types = {"cpu": nixl.DRAM_SEG, "cuda": nixl.VRAM_SEG}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self.name = f"raytorchrpc-{secrets.token_hex(8)}"
        config = nixl.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.pthrDelay = _LOOKS_US
        config.syncMode = nixl.NIXL_THREAD_SYNC_RW
        text = ",".join(f"{key}={value}" for key, value in settings.items())
        try:
            self._agent = nixl.nixlAgent(self.name, config)
            self._ucx = [self._agent.createBackend(_BACKEND, {"engine_config": text} if text else {})]
            nothing = nixl.nixlRegDList(nixl.DRAM_SEG)
            self.connection = bytes(self._agent.getLocalPartialMD(nothing, True, self._ucx))
        except Exception as error:
            raise LaneUnavailable(
                LANE,
                f"UCX found nothing to run on ({error}; {text or 'its own choice of transports'}); UCX_LOG_LEVEL=info "
                f"in the environment of the job shows what it saw",
            ) from error

    def close(self) -> None:
        """End NIXL's thread and let go of every peer. What is under way on other threads fails. Idempotent."""
        self._agent = None

    # --- memory --------------------------------------------------------------------------------------------

    def register(self, kind: Kind, address: int, size: int) -> Registered:
        """Lock memory and let peers read it. Costly: with RDMA every page is touched. Raises LaneUnavailable."""
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

    def deregister(self, memory: Registered) -> None:
        """Undo it. No read may be under way into it."""
        with contextlib.suppress(Exception):
            self._agent.deregisterMem(memory.handle, self._ucx)

    # --- other agents --------------------------------------------------------------------------------------

    def connect(self, connection: bytes) -> None:
        """Get ready to reach the agent whose ``connection`` this is. Raises Lost if it is gone."""
        try:
            self._agent.loadRemoteMD(connection)
        except Exception as error:
            raise Lost(f"its NIXL agent cannot be reached ({error})") from error

    def load(self, blob: bytes) -> None:
        """Memory of an agent that has been met. Raises Lost."""
        try:
            self._agent.loadRemoteMD(blob)
        except Exception as error:
            raise Lost(f"its memory cannot be reached ({error})") from error

    def disconnect(self, name: str) -> None:
        """Let go of an agent and its memory. No read may be under way from it."""
        with contextlib.suppress(Exception):  # not met
            self._agent.invalidateRemoteMD(name)

    def notify(self, name: str, notice: bytes) -> None:
        """Leave a notice with an agent that has been met. Raises Lost if it is known to be gone."""
        try:
            self._agent.genNotif(name, notice, self._ucx)
        except Exception as error:
            raise Lost(f"its NIXL agent does not answer ({error})") from error

    def notices(self) -> Mapping[str, Sequence[bytes]]:
        """What others left since the last time, by agent."""
        found: Mapping[str, Sequence[bytes]] = {}
        with contextlib.suppress(Exception):  # closed meanwhile
            found = self._agent.getNotifs({}, self._ucx)
        return found

    # --- reads ---------------------------------------------------------------------------------------------

    def read(self, name: str, kind: Kind, its_kind: Kind, spans: Sequence[Span], notice: bytes) -> Read:
        """Begin to copy spans from an agent's memory to here; it finds ``notice`` once all are done. Raises Lost."""
        nixl = self._nixl
        mine = nixl.nixlXferDList(self._types[kind], [(span.address, span.size, span.number) for span in spans])
        its = nixl.nixlXferDList(
            self._types[its_kind], [(span.its_address, span.size, span.its_number) for span in spans]
        )
        try:
            handle = self._agent.createXferReq(nixl.NIXL_READ, mine, its, name, notice, self._ucx)
        except Exception as error:
            raise Lost(f"a read cannot begin ({error})") from error
        read = Read(self._agent, handle, nixl.NIXL_SUCCESS)
        read.begin()
        return read


class Read:
    """One under way. Not thread-safe. ``release`` it when it is done or has failed, and never before."""

    def __init__(self, agent: Any, handle: int, success: Any) -> None:
        self._agent, self._handle, self._success = agent, handle, success
        self.over = False
        """Nothing will be written here any more."""

    def begin(self) -> None:
        """Raises Lost."""
        self._ask(self._agent.postXferReq)

    def done(self) -> bool:
        """Whether it is complete. Raises Lost if it failed."""
        if not self.over:
            self._ask(self._agent.getXferStatus)
        return self.over

    def _ask(self, question: Callable[[int], Any]) -> None:
        try:
            self.over = question(self._handle) == self._success
        except Exception as error:
            self.over = True
            self.release()
            raise Lost(f"a read failed ({error})") from error

    def wait(self, deadline: float, wanted: Callable[[], bool]) -> bool:
        """Block until it is complete; False at the deadline (``time.monotonic``), or once it is not ``wanted``.

        Looks without a pause for 100 us, then after an eighth of the time that has passed, at most 1 ms. Each look
        moves the data along where UCX needs a hand. Raises Lost.
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
        """Let go of it. One that is under way is cancelled, but its memory may still be written for a while."""
        handle, self._handle = self._handle, 0
        if handle:
            with contextlib.suppress(Exception):
                self._agent.releaseXferReq(handle)
