"""Chooses the torchrpc worker ids of members: their ranks, where no process that they may call has had those ids.

torch never forgets an id. An agent keeps the connection that it opened under one, RRefs hold the ids of their owners,
and distributed autograd keeps a process's first id for life. So an agent that goes on to another group keeps its id,
and newcomers get ids above all that any agent of the group has known. The actors that this process has put into groups
may be joined into one group later. So while they live, other groups get other ids.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from raytorchrpc._compat import ray_internals
from raytorchrpc.calls.peers import Member
from raytorchrpc.errors import BootstrapError
from raytorchrpc.lanes.torchrpc.agent import OWN_NUMBERS, process_fabric
from raytorchrpc.membership.messages import Probe

#: torchrpc ids are 16-bit and signed.
_IDS = range(OWN_NUMBERS.start)

_known: dict[str, int] = {}
"""By actor that this process has put into a group: the id of its agent."""
_lock = threading.Lock()


def record(members: Iterable[Member]) -> None:
    """Note the members of a group that this process has formed or changed."""
    with _lock:
        _known.update((member.actor_id, member.worker_id) for member in members if member.actor_id is not None)


def highest_of_others(handles: Iterable[Any]) -> int:
    """The highest id of this process and of living actors that it has put into groups, but for these; -1 if none.

    Asks Ray, from the highest id down to the first actor that lives.
    """
    actors = {ray_internals.actor_id_of(handle) for handle in handles if handle is not None}
    identity = process_fabric().identity
    own = -1 if identity is None else identity.worker_id
    with _lock:
        others = sorted(((number, actor) for actor, number in _known.items() if actor not in actors), reverse=True)
    for number, actor in others:
        if number <= own:
            break
        if ray_internals.actor_state(actor).state != "DEAD":
            return number
        with _lock:
            _known.pop(actor, None)
    return own


def highest_known(highest: int, probes: Mapping[str, Probe]) -> int:
    """The highest of ``highest`` and of the ids that these processes have known or keep."""
    for probe in probes.values():
        if probe.agent is not None:
            highest = max(highest, probe.agent.worker_id, probe.agent.highest_id)
        if probe.autograd_id is not None and probe.autograd_id in _IDS:
            highest = max(highest, probe.autograd_id)
    return highest


def assign(
    ranks: Mapping[str, int], probes: Mapping[str, Probe], taken: Collection[int], highest: int
) -> tuple[dict[str, int], set[str]]:
    """An id for each of these members, unique in the group; and the members whose running agent must be replaced.

    ``ranks``: by member, in rank order. ``taken``: the ids of the other members. ``highest``: as ``highest_known``
    returns it.
    """
    ids: dict[str, int] = {}
    renew: set[str] = set()
    for name, probe in probes.items():
        if probe.agent is None:
            continue
        if probe.agent.worker_id in ids.values() or probe.agent.worker_id in taken:
            renew.add(name)
        else:
            ids[name] = probe.agent.worker_id
    missing = [name for name in ranks if name not in ids]
    fresh: dict[str, int] = {}
    for name in missing:
        highest = fresh[name] = max(ranks[name], highest + 1)
    if missing and highest not in _IDS:
        kept = {probe.autograd_id for probe in probes.values() if probe.autograd_id is not None}
        fresh = _any(missing, {*taken, *ids.values(), *kept})
    return {**ids, **fresh}, renew


def _any(names: list[str], used: set[int]) -> dict[str, int]:
    """Ids that former processes may have had, once all were given. An agent that has connected to one of those calls
    the new process under an id of its own, without RRefs.
    """
    free = sorted(set(_IDS).difference(used))
    if len(free) < len(names):
        raise BootstrapError(f"torchrpc has ids for {len(_IDS)} processes, and the group needs more", tuple(names))
    return dict(zip(names, random.SystemRandom().sample(free, len(names)), strict=True))
