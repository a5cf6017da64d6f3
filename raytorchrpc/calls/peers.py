"""Who the members are, and by which lanes one reaches another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from raytorchrpc._compat import ray_internals
from raytorchrpc.errors import NotAMember
from raytorchrpc.lanes.base import MessageLane
from raytorchrpc.tensors.devices import Device

T = TypeVar("T")


@dataclass(frozen=True)
class Member:
    """One member of a group, as every other sees it. Small and picklable."""

    rank: int
    name: str
    actor_id: str | None
    """Hex id of the Ray actor; None for a driver that joined."""
    node_id: str
    pid: int
    rpc_name: str
    """Its name in torch's own API: ``torch.distributed.rpc.rpc_sync(member.rpc_name, ...)``."""
    worker_id: int
    """Its torchrpc id: its rank in a group of new actors. Unique in the group, never used again for another process."""
    incarnation: int = 0
    """How often its actor has come back into the group after a restart."""

    def __repr__(self) -> str:
        return f"Member(rank={self.rank}, name={self.name!r}, pid={self.pid}, node_id={self.node_id[:8]!r})"


@dataclass(frozen=True)
class PeerRoute:
    """How messages reach one peer."""

    member: Member
    calls: MessageLane
    """Carries calls without tensors, and those whose tensors it can take in band."""
    tensors: MessageLane
    """Carries the other calls with tensors."""
    fabric: MessageLane
    """torchrpc: carries RRefs and what distributed autograd follows."""
    beside: Mapping[str, str] = field(default_factory=dict)
    """Lanes for tensors that travel beside a message of ``calls``, by device type."""
    devices: Mapping[Device, Device] = field(default_factory=dict)
    """Where arguments arrive: this process's GPU, or "cpu" -> the peer's, or "cpu"."""
    devices_back: Mapping[Device, Device] = field(default_factory=dict)
    """Where CUDA results for the peer's calls arrive, likewise."""
    cpu_arrives_on: Device | None = None
    """The GPU of this process on which CPU arguments of the peer's calls arrive; None leaves them on the CPU."""
    same_gpus: frozenset[tuple[int, int]] = frozenset()
    """(index here, index there) of each GPU that both processes use."""
    token: str = ""
    """Names the very process: what is meant for an earlier or later incarnation is refused."""
    retries: Mapping[str, int] = field(default_factory=dict)
    """By method: how often a call may be repeated there, if the member is lost and comes back."""
    same_clock: bool = False
    """Both are on one node, so ``time.monotonic`` is the same on both: a deadline need not wait to be read."""
    heavy_results: set[str] = field(default_factory=set, compare=False, repr=False)
    """Methods whose last result needed the lane for tensors: calls to them take it at once."""


def process_token(generation: str, rank: int, incarnation: int) -> str:
    """Names one member's present process in requests to it."""
    return f"{generation}.{rank}.{incarnation}"


def keys_of(rank: int, name: str, actor: Any = None) -> tuple[Any, ...]:
    """The keys by which ``find`` finds a member. ``actor``: its ``ray_internals.actor_key``, if it has one."""
    return (rank, name) if actor is None else (rank, name, actor)


def find(target: Any, by_key: Mapping[Any, T], group: Callable[[], str]) -> T:
    """Find a member by what users pass for one: an actor handle, a name, a rank or a ``Member``. Hot path.

    Args:
        target: what was passed. Text of digits alone is a rank.
        by_key: what to return, by ``keys_of`` each member.
        group: describes the group for an error; see ``described``.

    Raises NotAMember.
    """
    key: Any = target
    if isinstance(target, Member):
        key = target.name
    elif not isinstance(target, (str, int)) or isinstance(target, bool):
        try:
            key = ray_internals.actor_key(target)
        except AttributeError:
            raise NotAMember(
                f"{target!r} does not name a member: pass an actor handle, a member's name, its rank or a Member"
            ) from None
    found = by_key.get(key)
    if found is None and isinstance(key, str) and key.isdecimal():
        found = by_key.get(int(key))
    if found is None:
        raise NotAMember(f"{target!r} is not in {group()}")
    return found


def described(group: str, names: Iterable[tuple[int, str]]) -> str:
    """A group and its members, for an error. ``names``: with ranks."""
    shown = [f"{name} ({rank})" for rank, name in names]
    rest = f", ... {len(shown) - 16} more" if len(shown) > 16 else ""
    return f"{group}; its members: {', '.join(shown[:16])}{rest}"
