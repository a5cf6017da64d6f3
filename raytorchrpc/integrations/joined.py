"""A group that a process joins by itself, for a library: as a driver, an actor, a task, or a child of one of them."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import ray

import raytorchrpc as rtr
from raytorchrpc._compat import ray_internals
from raytorchrpc.group.tickets import find_ticket
from raytorchrpc.process.locks import Lock
from raytorchrpc.process.threads import pause

_AGAIN_S = 0.2


class Joined:
    """This process in a group, from the first ``join`` until ``leave``. Thread-safe."""

    def __init__(self, group: str | None, kind: str = "", instance: Any = None) -> None:
        """See ``rtr.join``. ``kind``: begins a name of its own; then members call the instance's methods alone."""
        self.name = f"{kind}.{os.getpid()}.{os.urandom(4).hex()}" if kind else None
        self._of, self._instance = group, self if kind and instance is None else instance
        self._group: rtr.Group | None = None
        self._turn = Lock()

    def join(self, timeout: float = 60.0) -> rtr.Group:
        """Join unless it has; with a group's name, connects to Ray if no process above is a member. Blocks.

        Raises NotAMember, ConfigurationError, BootstrapError.
        """
        with self._turn:
            until = time.monotonic() + timeout
            while self._group is None:
                try:
                    self._group = rtr.join(self._of, self.name, instance=self._instance, timeout=timeout)
                except rtr.NotAMember as error:
                    if self._of is None or ray.is_initialized():
                        raise
                    address = ray_internals.cluster_above() or "auto"  # Ray itself takes the newest one of this host
                    try:
                        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
                    except ConnectionError as unreachable:
                        raise error from unreachable
                except (rtr.ConfigurationError, rtr.BootstrapError):  # a process of this actor was killed as it joined
                    if self.name is None or time.monotonic() > until:
                        raise
                    pause(_AGAIN_S)
            return self._group

    def is_current(self, timeout: float) -> bool:
        """Whether the group that has the name now is the one joined, which without a supervisor lasts for its members.

        Raises NotAMember if there is none.
        """
        ticket = find_ticket(self._of, time.monotonic() + timeout)
        return self._group is None or ticket.record.credentials.generation == self._group.generation

    def leave(self) -> None:
        """Leave it. Blocks, at most a few seconds."""
        with self._turn:
            group, self._group = self._group, None
            if group is not None:
                group.leave()
