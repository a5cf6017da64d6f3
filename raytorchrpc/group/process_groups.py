"""Creates a torch.distributed process group across members, and gives members access to it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raytorchrpc.calls.current import process_member
from raytorchrpc.errors import BootstrapError, ConfigurationError
from raytorchrpc.group.control_connections import ControlConnections
from raytorchrpc.group.roster import Roster
from raytorchrpc.membership import updates
from raytorchrpc.membership.process_group import BACKENDS, Meeting, ProcessGroupInfo, collectives_of
from raytorchrpc.membership.rendezvous import StoreAddress
from raytorchrpc.process import threads
from raytorchrpc.topology.endpoint import Endpoint

if TYPE_CHECKING:
    import torch.distributed as dist

#: For members to learn that an attempt was given up (seconds).
_GIVE_UP_S = 1.0


def process_group(*, timeout_s: float = 0.0) -> dist.ProcessGroup:
    """This member's torch.distributed process group, created by ``Group.process_group``.

    It is torch's default one (``torch.distributed.group.WORLD``), so DDP, FSDP and ``init_device_mesh`` find it by
    themselves. Waits ``timeout_s`` seconds for one, as after the loss of a member; 0 does not wait.

    Raises ProcessGroupLost, with the cause, if there is none, and NotAMember outside a group.
    """
    return collectives_of(process_member()).get(timeout_s)[0]


def process_group_info(*, timeout_s: float = 0.0) -> ProcessGroupInfo:
    """Who is in this member's process group, and as which rank. Waits and raises as ``process_group``."""
    return collectives_of(process_member()).get(timeout_s)[1]


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
    everybody = sorted(roster.records.items(), key=lambda item: item[1].rank)
    records = [(name, record) for name, record in everybody if names is None or name in names]
    if gone := sorted(set(names or ()) - roster.records.keys()):
        raise BootstrapError(f"{', '.join(gone)} left the group meanwhile", members=tuple(gone))
    endpoints = {name: record.probe.endpoint for name, record in records}
    check_backend(backend, endpoints)
    if roster.config.tls:
        check_encryption(backend, endpoints)
    info = ProcessGroupInfo(backend, number, {name: rank for rank, (name, _) in enumerate(records)}, collective_s)
    if others := [name for name, _ in everybody if name not in info.ranks]:
        # A member that does not learn of it in time keeps at most the previous one, which the others have left.
        _Requests(roster, connections, time.monotonic() + _GIVE_UP_S).some(
            updates.stay_out_of_process_group, dict.fromkeys(others, (info,))
        )
    home = records[0][0]
    requests = _Requests(roster, connections, deadline)
    try:
        left = max(1.0, deadline - time.monotonic())
        ids = requests.all(updates.prepare_process_group, {name: (info, name == home, left) for name in info.ranks})
        left = max(1.0, deadline - time.monotonic())
        store, agents = StoreAddress(home, ids[home]), roster.plan.agents
        translated = roster.config.torchrpc_from
        meetings = {
            name: (Meeting(info, store, agents[name].interface, record.probe.endpoint, left, translated),)
            for name, record in records
        }
        requests.all(updates.make_process_group, meetings)
    except BaseException as error:
        said = (number, f"it could not be made: {error}")
        _Requests(roster, connections, time.monotonic() + _GIVE_UP_S).some(
            updates.give_up_process_group, dict.fromkeys(info.ranks, said)
        )
        raise
    return info


class _Requests:
    """One request to several members at once, this process included if it is one of them."""

    def __init__(self, roster: Roster, connections: ControlConnections, deadline: float) -> None:
        self._roster, self._connections, self._deadline = roster, connections, deadline

    def some(
        self, function: Callable[..., Any], arguments: Mapping[str, tuple[Any, ...]]
    ) -> tuple[dict[str, Any], dict[str, Exception]]:
        """Results and failures by name."""
        generation, here = self._roster.generation, [name for name in self._roster.local if name in arguments]
        results: dict[str, Any] = {}
        failures: dict[str, Exception] = {}

        def ask_here(name: str) -> None:
            try:
                results[name] = function(generation, *arguments[name])
            except Exception as error:
                failures[name] = error

        # The others cannot finish before this process has begun.
        asking: list[threading.Thread] = [
            threads.start(ask_here, name, name=f"raytorchrpc-process-group-{name}") for name in here
        ]
        asked = {name: (generation, *args) for name, args in arguments.items() if name not in here}
        answers, errors = self._connections.call_all(function, asked, self._deadline)
        for name, thread in zip(here, asking, strict=True):
            thread.join(max(0.0, self._deadline - time.monotonic()))
            if thread.is_alive():
                errors[name] = BootstrapError("no answer in time")
        return {**results, **answers}, {**failures, **errors}

    def all(self, function: Callable[..., Any], arguments: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
        """As ``some``. Raises the first ConfigurationError, or BootstrapError naming all that failed."""
        results, failures = self.some(function, arguments)
        for error in failures.values():
            if isinstance(error, ConfigurationError):
                raise error
        if failures:
            reasons = "; ".join(f"{name}: {error}" for name, error in failures.items())
            raise BootstrapError(
                f"group {self._roster.name!r}: no process group was created: {reasons}", members=tuple(failures)
            )
        return results
