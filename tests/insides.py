"""What tests see inside a member: each function reads the member of the process that it runs in, such as an actor's."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from raytorchrpc._compat import nixl_package, ray_internals, torch_internals
from raytorchrpc.calls.counters import PairStats
from raytorchrpc.calls.member import process_member
from raytorchrpc.calls.server import gates
from raytorchrpc.group import detached, group, here, join, restarts
from raytorchrpc.group.supervisor import Supervisor
from raytorchrpc.integrations.team import Team as Team
from raytorchrpc.lanes.torchrpc.agent import process_agent
from raytorchrpc.patterns import handle
from raytorchrpc.process import fork
from raytorchrpc.process.fan_out import Requests
from raytorchrpc.process.this_process import has_ended as has_ended

needs_nixl = pytest.mark.skipif(nixl_package.nixl_package() is None, reason=nixl_package.NIXL_MISSING)
saved: Any = SimpleNamespace()
"""What a test saves in a process for its next call there. Say ``insides.saved``: a module is pickled by its name."""


def in_actor(actor: Any, function: Callable[..., Any], *args: Any) -> Any:
    """What the function returns in the process of an actor that has a method ``run``."""
    return ray.get(actor.run.remote(function, *args), timeout=120)


def actor() -> Any:
    """The actor of this process."""
    return process_member().incoming.callee.instance


def watches_everybody(group: Any) -> bool:
    """Whether the supervisor in this process has connected to all members, which it does once a group has formed."""
    return all(member.is_watched for member in group._own("a test")._core._members.values())


def asked_for_gpu() -> tuple[bool, bool]:
    """Whether this actor takes GPUs into a group as itself, and as another object."""
    return here.asked_for_gpu(ray_internals.actor_instance()), here.asked_for_gpu(object())


def closes_idle_connections(group: Any) -> bool:
    """Whether the supervisor in this process has closed a connection to a member, as it does for want of descriptors,
    or after a minute.
    """
    closed: bool = group._own("a test")._connections._lane._close_idle()
    return closed


def fail_to_take_requests(error: BaseException) -> None:
    """Have the threads of the lanes raise this where they take a request."""

    def fail(*_: Any) -> None:
        raise error

    for lane in process_member().lanes:
        vars(lane)["_serve"] = fail


def limit_nesting(most: int) -> int:
    """Let a chain of calls come back to this actor so many times at most; returns how many it could before."""
    before, gates.MOST_NESTED = gates.MOST_NESTED, most
    return before


def refuse_early(seconds: float) -> None:
    """Have this actor refuse calls that still wait for their turn so long before their deadline."""
    gates._LEAST_EARLY_S = gates._MOST_EARLY_S = seconds


@contextmanager
def late_answers() -> Iterator[None]:
    """Operations of this process wait as long as it takes for a home to say that nothing came, instead of 0.5 s."""
    before = handle.ANSWER_S, handle._ANSWER_NOW_S
    handle.ANSWER_S = handle._ANSWER_NOW_S = 30.0
    try:
        yield
    finally:
        handle.ANSWER_S, handle._ANSWER_NOW_S = before


def has_autograd_context() -> bool:
    """Whether this thread is in a context of distributed autograd."""
    return torch_internals.current_autograd_context() != torch_internals.NO_CONTEXT


def before_step(step: str, act: Callable[[], object]) -> None:
    """Have ``act`` run once in this process, before the next time that the supervisor has it do that step of joining:
    "probe", "prepare" or "commit".
    """
    function = getattr(join, step)

    def acting(*args: Any) -> Any:
        setattr(join, step, function)
        act()
        return function(*args)

    setattr(join, step, acting)


#: The steps of ``init_group`` in a driver: what it calls, how often, and those of the calls that count.
FORMING: dict[str, tuple[Any, str, int, Callable[..., bool]]] = {
    **{
        step: (ray_internals, "call_actor", 4, lambda _, asked, *args, step=step: asked.__name__ == step)
        for step in ("probe", "prepare", "commit")
    },
    "wait": (Requests, "next", 8, lambda *_: True),
    "post": (ray_internals, "store", 1, lambda key, value: key.startswith("groups/") and value is not None),
    "supervise": (fork, "register", 1, lambda registered: isinstance(registered, Supervisor)),
    "describe": (group.Group, "__init__", 1, lambda *_: True),
    "begin elsewhere": (detached, "_answer", 1, lambda *_: True),
    "end elsewhere": (detached.DetachedHost, "__init__", 1, lambda *_: True),
}


@contextmanager
def interrupted_at(step: str) -> Iterator[None]:
    """Ctrl-C, as a terminal sends it, when ``init_group`` does that step of FORMING in this process."""
    owner, name, number, counts = FORMING[step]
    function, calls = getattr(owner, name), []

    def acting(*args: Any, **options: Any) -> Any:
        if counts(*args):
            calls.append(args)
            if len(calls) == number:
                os.kill(os.getpid(), signal.SIGINT)
        return function(*args, **options)

    setattr(owner, name, acting)
    try:
        yield
    finally:
        setattr(owner, name, function)


@contextmanager
def kept_out(until: Callable[[], bool]) -> Iterator[None]:
    """The groups of this process take no restarted actor back before this is true."""
    is_listening, may_return = restarts.RestartedActors.is_listening, False

    def listens(*args: Any) -> bool:
        nonlocal may_return
        may_return = may_return or until()
        return may_return and is_listening(*args)

    restarts.RestartedActors.is_listening = listens  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        restarts.RestartedActors.is_listening = is_listening  # type: ignore[method-assign]


def of_a_group() -> tuple[Any, ...]:
    """What this process has of groups: its memberships, what it has formed, threads and sockets."""
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("raytorchrpc")]
    return sorted(join._memberships), sorted(group._groups), len(threads), len(list(fork.own_sockets()))


def group_name() -> str | None:
    """Of the group that this process is in."""
    return next((info.name for info in join.infos()), None)


def peers_elsewhere() -> int:
    """How many peers are on other nodes."""
    local = process_member()
    return sum(route.member.node_id != local.me.node_id for route in local.peers.routes)


def tensor_lane(name: str) -> Any:
    return process_member().tensor_lanes[name]


def tensor_lanes() -> set[str]:
    """The names of the lanes that this member has for tensors."""
    return {*process_member().tensor_lanes}


def served(kind: str) -> dict[str, Any]:
    """The objects of a kind of which this member is the home, by name."""
    services = process_member().services
    return {name: services.get(kind, name) for name in services.names(kind)}


def at_home(handle: Any) -> Any:
    """The queue, topic or weights of this handle, of which this member is the home."""
    return served(handle.kind)[handle.name]


def counted_calls() -> list[PairStats]:
    """This member's calls, by peer, lane and method."""
    return process_member().counters.rows("")


def is_traced() -> bool:
    return process_member().tracer is not None


def in_flight() -> dict[str, tuple[int, int]]:
    """By peer: calls without a reply, and bytes of their arguments."""
    return process_member().outgoing.in_flight()


def in_flight_to(rank: int) -> tuple[int, int]:
    """Those of one peer."""
    return process_member().credit.in_flight(rank)


def away() -> set[str]:
    """The names of the peers that are away."""
    return {*process_member().peers.away()}


# --- the TensorPipe agent of this process ------------------------------------------------------------------------


def agent_runs() -> bool:
    """Whether the torchrpc agent of this process has started."""
    return process_agent().is_running


def agent_address() -> tuple[str, int]:
    """Where peers connect to the torchrpc agent of this process."""
    return next(fork.addresses_in(agent_url()))


def agent_url() -> str:
    return str(process_agent()._url)


def agent_addresses() -> set[tuple[str, int]]:
    return set(fork.addresses_in(agent_url()))


def agent_listeners() -> list[int]:
    """The descriptors that it listens on."""
    return [door.public.fileno() for door in process_agent()._doors]


def hang_up_on(url: str) -> int:
    """Shut the connections of this process to that agent; returns how many."""
    cut, doors = 0, set(fork.addresses_in(url))
    for _, sock in fork.own_sockets():
        with suppress(OSError):
            if sock.family == socket.AF_INET and sock.getpeername()[:2] in doors:
                sock.shutdown(socket.SHUT_RDWR)
                cut += 1
    return cut


# --- what Ray knows ----------------------------------------------------------------------------------------------


def actor_state(handle: Any) -> ray_internals.ActorState:
    return ray_internals.actor_state(ray_internals.actor_id_of(handle))


def group_secret() -> bytes:
    """What the members of this member's group authenticate with."""
    (membership,) = join._memberships.values()
    return membership.spec.credentials.secret


def stored_keys(prefix: str) -> list[str]:
    """What the package keeps in Ray's store."""
    return ray_internals.stored_keys(prefix)


def stored_values(prefix: str) -> list[bytes]:
    """What those keys hold."""
    return [value for key in stored_keys(prefix) if (value := ray_internals.stored(key)) is not None]


def posted(monkeypatch: Any) -> list[bytes]:
    """Grows with what this process puts into Ray's store, and finds there, from now on."""
    values, store, stored = list[bytes](), ray_internals.store, ray_internals.stored

    def recorded(key: str, value: bytes | None) -> None:
        values.extend(() if value is None else (value,))
        store(key, value)

    def found(key: str) -> bytes | None:
        value = stored(key)
        values.extend(() if value is None else (value,))
        return value

    monkeypatch.setattr(ray_internals, "store", recorded)
    monkeypatch.setattr(ray_internals, "stored", found)
    return values


def call_as_a_stranger(host: str, port: int, touched: str, timeout_s: float = 3.0) -> str:
    """Send a member a function to run, by an agent of one's own; the error."""
    agent, store, _ = torch_internals.start_agent(
        "stranger", 999, threads=4, timeout_s=5, transports=("uv",), channels=("basic",), device_maps={}, devices=()
    )
    torch_internals.init_autograd(999)
    torch_internals.add_peer(agent, store, "victim", 1, f"uv://{host}:{port}", devices=(), inverse_map={})
    worker = agent.get_worker_info("victim")
    try:
        torch_internals.invoke_async(worker, os.mkdir, (touched,), timeout_s).wait()
    except RuntimeError as error:
        return str(error)
    return ""
