"""A group of the actors that another package has made, which follows them as they come and go."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ray.actor import ActorHandle

import raytorchrpc as rtr


class Team:
    """The group of some name in this process: formed when it is needed first, or the one that the program has formed.

    Several holders may need the same actors, or others. An actor is a member as long as one of them needs it, under one
    name. Thread-safe.
    """

    def __init__(self, group: str, *, include_driver: bool = False) -> None:
        self.group, self._include_driver = group, include_driver
        self._lock = threading.Lock()
        self._held: dict[Hashable, list[ActorHandle[Any]]] = {}
        self._names: dict[ActorHandle[Any], str] = {}
        self._is_own = False
        """Whether the group was formed here, and ends with its last holder."""

    def hold(
        self,
        holder: Hashable,
        actors: Mapping[str, Sequence[ActorHandle[Any]]],
        config: rtr.GroupConfig | None = None,
        timeout: float = 60,
    ) -> list[str]:
        """Make these actors members, by role, and no longer those that ``holder`` held before; returns their names.

        Blocks until all of them can be called. If it fails, ``holder`` holds what it held before.
        """
        handles = [handle for its in actors.values() for handle in its]
        with self._lock:
            group = self._existing()
            others = [handle for other, its in self._held.items() if other != holder for handle in its]
            there = {member.name for member in group.members} if group is not None else set()
            kept = dict.fromkeys([*others, *handles])
            names = {handle: name for handle, name in self._names.items() if handle in kept and name in there}
            leaving = [name for handle, name in self._names.items() if handle not in kept and name in there]
            arriving: dict[str, ActorHandle[Any]] = {}
            taken = {*there, *self._names.values()}
            for role, its in actors.items():
                for handle in its:
                    if handle not in names:
                        names[handle] = name = _free_name(role, taken)
                        taken.add(name)
                        arriving[name] = handle
            if group is None:
                rtr.init_group(
                    arriving, name=self.group, config=config, include_driver=self._include_driver, timeout=timeout
                )
                self._is_own = True
            elif arriving:
                group.add(arriving, timeout=timeout)
            self._held[holder], self._names = handles, names
            if group is not None:
                _remove(group, leaving)
            return [names[handle] for handle in handles]

    def release(self, holder: Hashable) -> None:
        """End the membership of actors that only ``holder`` needs, and the group if nobody needs it. Never raises."""
        with self._lock:
            if self._held.pop(holder, None) is None:
                return
            group = self._existing()
            kept = {handle for its in self._held.values() for handle in its}
            leaving = [name for handle, name in self._names.items() if handle not in kept]
            self._names = {handle: name for handle, name in self._names.items() if handle in kept}
            if group is not None and self._is_own and not self._held:
                group.shutdown()
            elif group is not None:
                _remove(group, leaving)

    def _existing(self) -> rtr.Group | None:
        """The group, if it has been formed here and still lasts."""
        try:
            return rtr.get_group(self.group)
        except rtr.NotAMember:
            self._is_own = False
            self._held.clear()
            self._names.clear()
            return None


def _free_name(role: str, taken: set[str]) -> str:
    number = 0
    while f"{role}_{number}" in taken:
        number += 1
    return f"{role}_{number}"


def _remove(group: rtr.Group, names: Sequence[str]) -> None:
    there = {member.name for member in group.members}
    with suppress(rtr.RayTorchRpcError):  # one of them was lost for good meanwhile
        if leaving := [name for name in names if name in there]:
            group.remove(leaving)
