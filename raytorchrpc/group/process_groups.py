"""Creates a torch.distributed process group across members."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from raytorchrpc.errors import BootstrapError, ConfigurationError
from raytorchrpc.group.control_connections import ControlConnections
from raytorchrpc.group.process_group import (
    BACKENDS,
    Collectives,
    Meeting,
    ProcessGroupInfo,
    call_collectives,
    make_process_group,
)
from raytorchrpc.group.roster import Roster
from raytorchrpc.process.fan_out import Answers
from raytorchrpc.topology.endpoint import Endpoint

#: For members to learn that others have a process group, or that an attempt was given up (seconds).
_NOTIFY_S = 1.0


def check_backend(backend: Any, endpoints: Mapping[str, Endpoint]) -> None:
    """Raise ConfigurationError for what cannot work, from what the members published when they joined."""
    if backend not in BACKENDS:
        raise ConfigurationError(f"process_group(backend=...) is 'gloo' or 'nccl', not {backend!r}")
    if backend == "gloo":
        return
    without = [name for name, endpoint in endpoints.items() if not endpoint.gpus]
    if without:
        raise ConfigurationError(
            f"backend 'nccl' needs a GPU in every member; none in {', '.join(without)} (an actor gets one with "
            f"num_gpus=1 and a torch build with CUDA): use backend='gloo', or name those that have one in members="
        )
    owners: dict[str, str] = {}
    for name, endpoint in endpoints.items():
        if len(endpoint.gpus) > 1:
            continue  # which one it will use is not known
        gpu = endpoint.gpus[0].uuid
        if gpu and gpu in owners:
            raise ConfigurationError(
                f"backend 'nccl': {owners[gpu]} and {name} are on one GPU, and NCCL takes one process for each: give "
                f"each num_gpus=1, or use backend='gloo'"
            )
        owners[gpu] = name


def check_encryption(backend: str, endpoints: Mapping[str, Endpoint]) -> None:
    """For a group with ``tls=True``: raise ConfigurationError if the backend would send in the clear over a network."""
    (first, one), *others = endpoints.items()
    for name, other in others:
        if not one.same_network(other):
            raise ConfigurationError(
                f"backend {backend!r} does not encrypt, the group has tls=True, and {first} and {name} share no "
                f"network namespace: name members of one host in members=, or form a group without tls"
            )


def create_process_group(
    roster: Roster,
    connections: ControlConnections,
    number: int,
    backend: str,
    timeout_s: float,
    collective_s: float,
    names: Sequence[str] | None = None,
) -> ProcessGroupInfo:
    """Create a process group across these members (None: all). Blocks until all of them have it.

    Raises ConfigurationError and BootstrapError, naming the members that failed; then no member has one.
    """
    deadline = time.monotonic() + timeout_s
    records = {name: record for name, record in roster.records.items() if names is None or name in names}
    if gone := sorted(set(names or ()) - roster.records.keys()):
        raise BootstrapError(f"{', '.join(gone)} left the group meanwhile", members=tuple(gone))
    endpoints = {name: record.probe.endpoint for name, record in records.items()}
    check_backend(backend, endpoints)
    if roster.config.tls:
        check_encryption(backend, endpoints)
    info = ProcessGroupInfo(backend, number, {name: rank for rank, name in enumerate(records)}, collective_s)

    def notify(names: Iterable[str], *request: Any) -> None:
        connections.call_all(call_collectives, dict.fromkeys(names, request), time.monotonic() + _NOTIFY_S)

    # A member that does not learn of it in time keeps at most the previous one, which the others have left.
    notify([name for name in roster.records if name not in records], Collectives.stay_out, info)
    try:
        left = max(1.0, deadline - time.monotonic())
        prepare = dict.fromkeys(records, (Collectives.prepare, info, left))
        _check(roster.name, connections.call_all(call_collectives, prepare, deadline))
        left = max(1.0, deadline - time.monotonic())
        meetings = {
            name: (Meeting(info, roster.plan.kind(name).agent.interface, endpoint, left),)
            for name, endpoint in endpoints.items()
        }
        _check(roster.name, connections.call_all(make_process_group, meetings, deadline))
    except BaseException as error:
        notify(records, Collectives.give_up, number, f"it could not be made: {error}")
        raise
    return info


def _check(group: str, answers: Answers) -> None:
    """Raise the first ConfigurationError, or BootstrapError naming all that failed."""
    _, failures = answers
    for error in failures.values():
        if isinstance(error, ConfigurationError):
            raise error
    if failures:
        reasons = "; ".join(f"{name}: {error}" for name, error in failures.items())
        raise BootstrapError(f"group {group!r}: no process group was created: {reasons}", members=tuple(failures))
