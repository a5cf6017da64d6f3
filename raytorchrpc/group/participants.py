"""The actors and the driver that form a group, and their names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle

from raytorchrpc._compat import ray_internals
from raytorchrpc.calls.mailbox import Owner
from raytorchrpc.errors import ConfigurationError

#: The name of a driver that is a member.
DRIVER = "driver"


def current_owner() -> Owner:
    """This process, as the owner of the groups it forms."""
    context = ray.get_runtime_context()
    return Owner(context.get_job_id(), context.get_actor_id())


def current_session() -> tuple[str, ...]:
    """Identifies this process's connection to Ray; empty if there is none. A job id alone would repeat in the next
    cluster that a process starts.
    """
    if not ray.is_initialized():
        return ()
    context = ray.get_runtime_context()
    return context.get_job_id(), context.get_node_id(), context.get_actor_id() or ""


def participants_of(actors: Any, include_driver: bool, first_rank: int = 0) -> dict[str, Any]:
    """Members by name, in rank order; the driver's handle is None. Raises ConfigurationError."""
    if not ray.is_initialized():
        raise ConfigurationError("call ray.init() before init_group")
    if isinstance(actors, ActorHandle) or not isinstance(actors, (Mapping, Sequence)) or isinstance(actors, str):
        raise ConfigurationError(f"init_group takes a list or a dict of actor handles, not {actors!r}")
    pairs = list(actors.items()) if isinstance(actors, Mapping) else [(None, actor) for actor in actors]
    if not pairs:
        raise ConfigurationError("init_group needs at least one actor handle; the list is empty")
    named: dict[str, Any] = {}
    seen: dict[str, str] = {}
    for rank, (given, handle) in enumerate(pairs):
        label = f"actors[{rank if given is None else given!r}]"
        if not isinstance(handle, ActorHandle):
            raise ConfigurationError(
                f"{label} is not an actor handle but {handle!r}; pass what Class.remote() or ray.get_actor() returns"
            )
        member = _generated_name(handle, first_rank + rank) if given is None else given
        _check_member_name(member, label)
        actor_id = ray_internals.actor_id_of(handle)
        if actor_id in seen:
            raise ConfigurationError(f"{label} is the same actor as {seen[actor_id]}")
        seen[actor_id] = label
        named[member] = handle
    if include_driver:
        if DRIVER in named:
            raise ConfigurationError(f"the name {DRIVER!r} is the driver's own with include_driver=True")
        named[DRIVER] = None
    return named


_LONGEST_STEM = 48


def _generated_name(handle: Any, rank: int) -> str:
    ascii_only = re.sub(r"[^A-Za-z0-9_]", "_", ray_internals.actor_class_name(handle))
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", ascii_only).lower()
    return f"{snake[:_LONGEST_STEM]}_{rank}"


def _check_member_name(name: Any, label: str) -> None:
    if not isinstance(name, str) or not re.fullmatch(r"(?!\d+$)[A-Za-z0-9_.:-]{1,64}", name):
        raise ConfigurationError(
            f"{label}: {name!r} cannot name a member; use up to 64 letters, digits or '_.:-', not digits alone"
        )
