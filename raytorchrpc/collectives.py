"""A member's side of torch.distributed: the process's default process group, which all members make together.

Regular communication among many GPUs is NCCL's job, and gloo's on CPUs. This boots them: ranks, interface, store,
deadlines, and the end when somebody is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from raytorchrpc import _compat, _nccl_env, _sockfilter, forking
from raytorchrpc.errors import BootstrapError, ConfigurationError, ProcessGroupLost
from raytorchrpc.topology import Endpoint

logger = logging.getLogger(__name__)

BACKENDS = ("gloo", "nccl")

#: How long the end of one may take before those who have to wait for it go on (seconds).
_END_S = 5.0
_NONE_YET = "none was made: call Group.process_group() in the process that formed the group"


@dataclass(frozen=True)
class ProcessGroupInfo:
    """Who is in a process group, and as which rank. Picklable."""

    backend: str
    """``gloo`` or ``nccl``."""
    number: int
    """The first one of a group is 1; each call of ``Group.process_group`` makes the next."""
    ranks: Mapping[str, int]
    """torch's rank by member name. No gaps; in the order of the members' ranks in the group, which may have some."""
    timeout_s: float
    """Deadline of a collective, in seconds."""

    @property
    def world_size(self) -> int:
        """How many members it has."""
        return len(self.ranks)


class Serving(NamedTuple):
    """Where a store listens, and who may reach it: torch's asks nobody who he is."""

    host: str
    """An address of the member's own host."""
    admitted: tuple[str, ...]
    """Addresses and networks from which one may connect."""


class Meeting(NamedTuple):
    """How a member gets into a process group."""

    info: ProcessGroupInfo
    host: str
    """Where the store is served."""
    port: int
    interface: str | None
    """This member's own, for gloo and NCCL; None: unknown, they find one by themselves."""
    endpoint: Endpoint
    """This member's own evidence, by which NCCL is told what to use."""
    timeout_s: float
    """For this step."""


class _Made(NamedTuple):
    info: ProcessGroupInfo
    group: dist.ProcessGroup
    store: Store
    end: Callable[[], None]
    """Undoes what making it did to this process, outside torch."""


class Collectives:
    """One per membership. Thread-safe. What blocks has a deadline; nothing here runs on a thread of a lane's."""

    def __init__(self, name: str) -> None:
        """``name``: of this member."""
        self._name = name
        self._changed = threading.Condition()
        self._making = threading.Lock()
        """Held while torch makes one, which nothing can interrupt."""
        self._wanted: ProcessGroupInfo | None = None
        """The one that is made, or being made; None after its end."""
        self._made: _Made | None = None
        self._served: TCPStore | None = None
        self._ending: threading.Thread | None = None
        self._cause = _NONE_YET
        self._closed = False

    # --- for the member's own code ---------------------------------------------------------------------------------

    def get(self, timeout_s: float) -> tuple[dist.ProcessGroup, ProcessGroupInfo]:
        """The present one; waits so long for it. Raises ProcessGroupLost with the cause if there is none."""
        with self._changed:
            self._changed.wait_for(lambda: self._made is not None or self._closed, timeout_s)
            if self._made is None:
                raise ProcessGroupLost(f"member {self._name!r} has no process group: {self._cause}")
            if dist.group.WORLD is not self._made.group:
                raise ProcessGroupLost(
                    f"member {self._name!r} has no process group: it was destroyed here; call Group.process_group() "
                    f"again in the process that formed the group"
                )
            return self._made.group, self._made.info

    # --- for whoever formed the group --------------------------------------------------------------------------------

    def prepare(self, info: ProcessGroupInfo, serve_on: Serving | None, timeout_s: float) -> int | None:
        """End the one before, and see whether this process can make one. With ``serve_on``, serve the
        store there; returns its port.

        Raises ConfigurationError, BootstrapError.
        """
        self._end(f"number {info.number} takes its place")
        if (ending := self._ending) is not None:
            ending.join(min(timeout_s, _END_S))
            if ending.is_alive():
                raise BootstrapError(f"the process group before is still ending in {self._name!r}")
        if not self._making.acquire(timeout=min(timeout_s, _END_S)):
            raise BootstrapError(f"an earlier process group is still being made in {self._name!r}; it ends by itself")
        self._making.release()
        if dist.is_initialized():
            raise ConfigurationError(
                f"torch.distributed is initialised in {self._name!r} already, and not by this group: call "
                f"torch.distributed.destroy_process_group() there first, or go on with that process group"
            )
        if info.backend == "nccl" and not (dist.is_nccl_available() and torch.cuda.is_available()):
            raise ConfigurationError(f"backend 'nccl': {self._name!r} has no NCCL or no GPU; use backend='gloo'")
        if info.backend == "gloo" and not dist.is_gloo_available():
            raise ConfigurationError(f"backend 'gloo': torch in {self._name!r} was built without gloo")
        served = _serve(serve_on, timeout_s) if serve_on is not None else None
        with self._changed:
            if self._closed:
                raise BootstrapError(f"{self._name!r} has left the group")
            self._wanted, self._served = info, served
            self._cause = f"number {info.number} is being made"
        forking.inherited(self)
        return served.port if served is not None else None

    def make(self, meeting: Meeting) -> None:
        """Make it, together with all others: blocks until each has begun, at most ``meeting.timeout_s`` or the deadline
        of a collective, whichever is later. Raises BootstrapError.
        """
        with self._making:
            self._make(meeting)

    def _make(self, meeting: Meeting) -> None:
        info = meeting.info
        with self._changed:
            if self._wanted != info:
                raise BootstrapError(f"process group {info.number} was given up: {self._cause}")
        leave = _environment(info.backend, meeting)
        hook = sys.excepthook
        try:
            limit = timedelta(seconds=meeting.timeout_s)
            store: Store = TCPStore(meeting.host, meeting.port, is_master=False, timeout=limit)
            dist.init_process_group(
                info.backend,
                store=PrefixStore(f"raytorchrpc/{info.number}", store),
                rank=info.ranks[self._name],
                world_size=info.world_size,
                timeout=timedelta(seconds=info.timeout_s),
                device_id=_only_gpu() if info.backend == "nccl" else None,
            )
        except Exception as error:  # torch's own are RuntimeError and ValueError, NCCL's DistBackendError
            leave()
            raise BootstrapError(f"{info.backend} could not start in {self._name!r}: {_first_line(error)}") from error
        finally:
            sys.excepthook = hook  # torch puts one of its own in front, each time
        group = dist.group.WORLD
        assert group is not None
        with self._changed:
            made = _Made(info, group, store, leave)
            if self._wanted == info:
                self._made = made
                self._changed.notify_all()
                return
        _abort(made)
        raise BootstrapError(f"process group {info.number} was given up: {self._cause}")

    def stay_out(self, info: ProcessGroupInfo) -> None:
        """Others make one without this member: end the one before. Does not wait."""
        cause = f"number {info.number} is among others: {', '.join(info.ranks)}"
        self._end(cause)
        with self._changed:
            self._cause = cause

    def give_up(self, number: int, cause: str) -> None:
        """Of an attempt that failed elsewhere. Idempotent, does not wait."""
        with self._changed:
            if self._wanted is None or self._wanted.number != number:
                return
        self._end(cause)

    # --- for changes of the group ------------------------------------------------------------------------------------

    def lose(self, member: str, cause: str) -> None:
        """That member is gone, or another process has taken its place: end what it was part of. Does not wait."""
        with self._changed:
            if self._wanted is None or member not in self._wanted.ranks:
                return
        again = "call Group.process_group() again in the process that formed the group"
        self._end(f"member {member!r} was lost ({cause}); {again}")

    def close(self) -> None:
        """The membership ends. Idempotent; waits a few seconds at most."""
        with self._changed:
            self._closed = True
        self._end("the group was shut down")
        if (ending := self._ending) is not None:
            ending.join(_END_S)

    def _end(self, cause: str) -> None:
        with self._changed:
            made, self._made = self._made, None
            served, self._served = self._served, None
            if self._wanted is not None or made is not None:
                self._cause = cause
            self._wanted = None
            self._changed.notify_all()
            if made is None:
                # Whoever is still at it hears of it: the connections to the store end.
                del served
                return
            # NCCL may wait for the device. The store goes last, as NCCL's own threads look at it.
            name = f"raytorchrpc-{self._name}-process-group"
            self._ending = threading.Thread(target=_abort, args=(made, served), name=name, daemon=True)
            self._ending.start()

    def after_fork(self) -> list[forking.Address]:
        """See forking.Heirloom. torch's process groups do not survive a fork."""
        served = self._served
        if served is not None:
            # Never freed here: its end would wait for its thread, which is the parent's.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(served))
        return [(served.host, served.port)] if served is not None else []


def _serve(where: Serving, timeout_s: float) -> TCPStore:
    """A store on this address and no other: torch would listen on every one. The kernel chooses the port."""
    host = where.host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family, backlog=1024)
    except OSError as error:
        raise BootstrapError(f"the process group's store cannot listen on {host}: {error}") from error
    try:
        _sockfilter.guard(listener, _sockfilter.networks(where.admitted))
    except OSError as error:
        logger.warning("everybody who can route to %s can reach the process group's store: %s", host, error)
    port: int = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def _environment(backend: str, meeting: Meeting) -> Callable[[], None]:
    """What gloo and NCCL read when they start, and again for every subgroup; only where the user set nothing. Without
    it gloo takes the address of the host's own name, which is often 127.0.1.1. Returns what undoes it.
    """
    wanted = {} if meeting.interface is None else {"GLOO_SOCKET_IFNAME": meeting.interface}
    if backend == "nccl":
        _nccl_env.apply(meeting.endpoint, interface=meeting.interface)  # stays: NCCL reads it once
        # torch's own choice ends the whole process when a collective fails: here it is to raise.
        wanted["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "2"
    ours = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(ours)

    def undo() -> None:
        for name, value in ours.items():
            if os.environ.get(name) == value:
                del os.environ[name]

    return undo


def _only_gpu() -> torch.device | None:
    """An actor sees the GPUs that Ray gave it. With one, NCCL connects at once instead of at the first collective."""
    return torch.device("cuda", 0) if torch.cuda.device_count() == 1 else None


def _abort(made: _Made, served: Any = None) -> None:
    """End it and all its subgroups; what is under way fails, by nccl at once and by gloo at its deadline."""
    with contextlib.suppress(Exception):
        if dist.group.WORLD is made.group:  # else somebody has destroyed it already
            _compat.abort_process_groups()
    made.end()
    del served


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or repr(error)
