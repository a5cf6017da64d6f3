"""Chooses the torchrpc worker ids of members: their ranks, where no process that they may call has had those ids.

torch never forgets an id. An agent keeps the connection that it opened under one, RRefs hold the ids of their owners,
and distributed autograd keeps a process's first id for life. So an agent that goes on to another group keeps its id,
and newcomers get ids above all that any agent of the group has known. Actors of several groups may be joined into one
group later, so newcomers also get ids above those of all other living actors of the job. Ray's key-value store holds
these, because several processes of a job may form groups.
"""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import ray

from raytorchrpc._compat import ray_internals
from raytorchrpc.calls.peers import Member
from raytorchrpc.errors import BootstrapError, shown
from raytorchrpc.group.messages import JoinedProcess, Probe
from raytorchrpc.lanes.torchrpc.agent import OWN_NUMBERS

logger = logging.getLogger(__name__)

#: torchrpc ids are 16-bit and signed.
_IDS = range(OWN_NUMBERS.start)
#: Keys are ``worker-ids/<job>/<id>/<actor>``; each holds the actors that got their ids together, and the highest id.
_PREFIX = "worker-ids/"
#: In place of an actor: the driver, which lives as long as its job.
_DRIVER = "driver"


def highest_elsewhere(handles: Iterable[Any]) -> int:
    """The highest id of living processes that this job has put into groups, but for these (None: this process);
    -1 if there are none.
    """
    known = [handle for handle in handles if not isinstance(handle, JoinedProcess)]
    here = {_own_name() if handle is None else ray_internals.actor_id_of(handle) for handle in known}
    job = ray.get_runtime_context().get_job_id()
    try:
        _drop_ended_jobs(job)
        for key in sorted(ray_internals.stored_keys(f"{_PREFIX}{job}/"), reverse=True):
            actors = _actors(key)
            if any(actor == _DRIVER or ray_internals.actor_state(actor).state != "DEAD" for actor in actors - here):
                return int(key.split("/")[2])
            if not actors & here:
                ray_internals.store(key, None)
    except Exception as error:  # Ray's control store does not answer
        logger.warning("torchrpc ids of other groups are not known, and may be given again: %s", shown(error))
    return -1


def record(members: Iterable[Member]) -> None:
    """Note the ids that these members get."""
    names = {member.worker_id: member.actor_id or _own_name() for member in members}
    if not names:
        return
    highest, job = max(names), ray.get_runtime_context().get_job_id()
    key, actors = f"{_PREFIX}{job}/{highest:05}/{names[highest]}", set(names.values())
    try:
        actors |= _actors(key)  # of another group with the same newcomer
        for earlier in ray_internals.stored_keys(f"{_PREFIX}{job}/"):
            # The same actor after a restart.
            if earlier.endswith(f"/{names[highest]}") and _actors(earlier) == actors:
                ray_internals.store(earlier, None)
        ray_internals.store(key, " ".join(sorted(actors)).encode())
    except Exception as error:
        logger.warning("torchrpc ids could not be noted, and may be given again: %s", shown(error))


def _actors(key: str) -> set[str]:
    return set((ray_internals.stored(key) or b"").decode().split())


def _own_name() -> str:
    return ray.get_runtime_context().get_actor_id() or _DRIVER


@functools.cache
def _drop_ended_jobs(job: str) -> None:
    """Drop what jobs left that have ended; once for each job of this process."""
    ended = ray_internals.dead_jobs()
    for key in ray_internals.stored_keys(_PREFIX):
        if key.split("/")[1] in ended:
            ray_internals.store(key, None)


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
