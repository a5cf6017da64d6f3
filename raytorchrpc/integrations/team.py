"""A group of the actors that another package has made, which follows them as they come and go."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ray.actor import ActorHandle

import raytorchrpc as rtr


def _name_in(group: rtr.Group | None, actor: ActorHandle[Any]) -> str | None:
    """The name of an actor that is a member of the group."""
    with suppress(rtr.NotAMember):
        return None if group is None else group.member(actor).name
    return None


class Team:
    """The group of some name in this process: formed when it is needed first, or the one that the program has formed.

    Several holders may need the same actors, or others. An actor is a member as long as one of them needs it, under one
    name; one that the program has made a member stays, under its own. Thread-safe.
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
        with self._lock:
            group = self._existing()
            there = set() if group is None else {member.name for member in group.members}
            names = {handle: name for handle, name in self._names.items() if name in there}
            wanted = [handle for handles in actors.values() for handle in handles]
            names |= {handle: name for handle in wanted if (name := _name_in(group, handle))}
            taken, arriving = {*there, *self._names.values()}, dict[str, ActorHandle[Any]]()
            for role, handles in actors.items():
                for handle in handles:
                    if handle not in names:
                        free = (name for number in itertools.count() if (name := f"{role}_{number}") not in taken)
                        names[handle] = name = next(free)
                        taken.add(name)
                        arriving[name] = handle
            if group is None:
                rtr.init_group(
                    arriving, name=self.group, config=config, include_driver=self._include_driver, timeout=timeout
                )
                self._is_own = True
            elif arriving:
                group.add(arriving, timeout=timeout)
            self._held[holder] = wanted
            self._names = {handle: name for handle, name in names.items() if handle in self._names or name in arriving}
            self._dismiss(group)
            return [names[handle] for handle in self._held[holder]]

    def release(self, holder: Hashable) -> None:
        """End the membership of actors that only ``holder`` needs, and the group if nobody needs it. Never raises."""
        with self._lock:
            if self._held.pop(holder, None) is None:
                return
            group = self._existing()
            if group is not None and self._is_own and not self._held:
                group.shutdown()
            else:
                self._dismiss(group)

    def _dismiss(self, group: rtr.Group | None) -> None:
        """End the membership of actors that nobody holds."""
        held = {handle for handles in self._held.values() for handle in handles}
        leaving = {self._names.pop(handle) for handle in [*self._names] if handle not in held}
        if group is not None:
            with suppress(rtr.RayTorchRpcError):  # one of them was lost for good meanwhile
                if names := [member.name for member in group.members if member.name in leaving]:
                    group.remove(names)

    def _existing(self) -> rtr.Group | None:
        """The group, if it has been formed here and still lasts."""
        try:
            return rtr.get_group(self.group)
        except rtr.NotAMember:
            self._is_own = False
            self._held.clear()
            self._names.clear()
            return None
