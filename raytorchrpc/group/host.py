"""The interface of a group's host: the process that runs its supervisor, this one or a detached actor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from raytorchrpc.calls.counters import GroupStats
from raytorchrpc.group.chrome_trace import GroupTrace
from raytorchrpc.group.events import Change
from raytorchrpc.group.status import GroupStatus
from raytorchrpc.membership.messages import GroupInfo
from raytorchrpc.membership.process_group import ProcessGroupInfo


class GroupHost(ABC):
    """What ``Group`` needs of the process that supervises it. ``Group``'s methods of the same names say more."""

    @property
    @abstractmethod
    def info(self) -> GroupInfo:
        """The group as it is now."""

    @abstractmethod
    def add(self, actors: Any, timeout_s: float) -> tuple[str, ...]:
        """Admit actors; returns their names."""

    @abstractmethod
    def remove(self, names: Sequence[str], timeout_s: float) -> None:
        """Remove members."""

    @abstractmethod
    def wait_ready(self, timeout_s: float) -> dict[str, str]:
        """Block until every member can be called; returns those that cannot, and why."""

    @abstractmethod
    def process_group(
        self, backend: str, timeout_s: float, collective_s: float, names: Sequence[str] | None
    ) -> ProcessGroupInfo:
        """Create a process group across these members, or all."""

    @abstractmethod
    def stats(self, timeout_s: float) -> GroupStats:
        """The members' counters, collected through Ray."""

    @abstractmethod
    def status(self, timeout_s: float) -> GroupStatus:
        """The members' counters and calls in flight, collected over connections that no busy method holds up."""

    @abstractmethod
    def begin_trace(self, capacity: int) -> None:
        """Have the members record."""

    @abstractmethod
    def end_trace(self) -> GroupTrace:
        """What the members recorded."""

    @abstractmethod
    def listen(self, listener: Callable[[Change], object]) -> Callable[[], None]:
        """Call ``listener`` with every change, on a thread; returns a function that ends it."""

    @abstractmethod
    def end(self, timeout_s: float) -> None:
        """End the group. Idempotent, never raises."""
