"""The route between two members: which lanes can carry each kind of traffic, and why the others cannot.

Each lane's own rule (``lanes.registry.Lane.rule``) decides whether it can connect two members. A rule is run once for
all pairs that are alike: many members publish the same but for their names, and many hosts the same but for their own.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from raytorchrpc.config import GroupConfig
from raytorchrpc.errors import ConfigurationError
from raytorchrpc.lanes import registry
from raytorchrpc.lanes.registry import TRAFFIC, Lane, Traffic
from raytorchrpc.lanes.rules import Pair, Verdict
from raytorchrpc.lanes.torchrpc.backends import AgentPlan
from raytorchrpc.topology import rdma
from raytorchrpc.topology.endpoint import Endpoint


@dataclass(frozen=True)
class LaneChoice:
    """A lane that can carry ``traffic`` between two members, and how."""

    lane: str
    traffic: Traffic
    how: str
    """What it runs over: ``unix socket``, ``torchrpc over uv, channel mpt_uv``."""
    reason: str
    out_of_band: bool = False
    """Tensors travel out of band, and their descriptors in the messages of the lane that carries the calls. Otherwise
    they are part of these."""


@dataclass(frozen=True)
class Rejection:
    """A lane that cannot carry ``traffic`` between two members, why, and what would change that."""

    lane: str
    traffic: Traffic
    reason: str


@dataclass(frozen=True)
class PairRoute:
    """The lanes between two members; the same in both directions."""

    a: str
    b: str
    choices: tuple[LaneChoice, ...]
    """In order of preference within each kind of traffic."""
    rejected: tuple[Rejection, ...]
    same_gpus: tuple[tuple[int, int], ...] = ()
    """(a's index, b's index) of each GPU whose memory ``share=True`` can share: both use it, and can map its memory."""

    def same_gpus_from(self, name: str) -> tuple[tuple[int, int], ...]:
        """``same_gpus`` with the index of the member ``name`` first."""
        return self.same_gpus if name == self.a else tuple((theirs, ours) for ours, theirs in self.same_gpus)

    def lanes(self, traffic: Traffic) -> tuple[LaneChoice, ...]:
        """Usable lanes for this traffic, the preferred one first; empty if there is none."""
        return tuple(choice for choice in self.choices if choice.traffic == traffic)

    @property
    def message_lane(self) -> str:
        """The lane for calls that carry no tensor."""
        return self.lanes("calls")[0].lane

    def through_cpu(self) -> str | None:
        """Why CUDA tensors are copied to the CPU and stay in the messages of calls, if no lane for tensors takes them;
        None if messages do not carry them.
        """
        if all(choice.out_of_band for choice in self.lanes("cuda")):
            return None
        return "; ".join(f"{no.lane}: {no.reason}" for no in self.rejected if no.traffic == "cuda")

    def why_not(self, lane: str) -> str | None:
        """Why a lane carries no calls here; None if it can."""
        if any(choice.lane == lane for choice in self.lanes("calls")):
            return None
        reasons = [no.reason for no in self.rejected if (no.lane, no.traffic) == (lane, "calls")]
        return reasons[0] if reasons else "no route uses it"

    @property
    def tensor_lanes(self) -> tuple[LaneChoice, ...]:
        """The lanes for CPU tensors, then those for CUDA tensors."""
        return self.lanes("cpu") + self.lanes("cuda")


@dataclass(frozen=True)
class Kind:
    """Members that publish the same, but for ``topology.endpoint.OWN``, and have the same agent."""

    endpoint: Endpoint
    """Without what each of them has of its own."""
    agent: AgentPlan

    def __hash__(self) -> int:
        return hash((self.endpoint.key(), self.agent))

    def common(self) -> Hashable:
        """What this package's rules read of it, without what tells hosts, containers and GPUs apart."""
        hcas = tuple(
            hca.changed({"path": None, "ports": tuple(p.changed({"gids": rdma.networks(p)}) for p in hca.ports)})
            for hca in self.endpoint.hcas
        )
        gpus = tuple(gpu.changed({"uuid": "", "pci_bus_id": None, "path": None}) for gpu in self.endpoint.gpus)
        alike = self.endpoint.changed({**_HOSTS_OWN, "hcas": hcas, "gpus": gpus})
        return alike.key(), self.agent.transports, self.agent.channels

    def place(self) -> Hashable | None:
        """Tells its host and its namespaces from others; None if the host is unknown."""
        end = self.endpoint
        return (end.boot_id, frozenset(end.namespaces.items())) if end.boot_id else None

    def gpu_uuids(self) -> frozenset[str]:
        return frozenset(gpu.uuid for gpu in self.endpoint.gpus)


_HOSTS_OWN = {"boot_id": "", "hostname": "", "namespaces": {}, "node_ip": "", "interfaces": ()}


class Candidate(NamedTuple):
    """A lane that routes may be built from."""

    lane: Lane
    refused: str | None
    """Why the configuration excludes it; None if it does not."""
    distribution: str | None
    """Of another distribution: its name and version."""


def candidates(config: GroupConfig) -> tuple[Candidate, ...]:
    """The lanes of this package, in order of preference."""
    return tuple(Candidate(lane, forbidden(config, lane.name), None) for lane in registry.rows(()))


def foreign(config: GroupConfig) -> tuple[Candidate, ...]:
    """The lanes of other distributions that the configuration asks for. Raises ConfigurationError if one cannot be
    loaded here.
    """
    names = registry.foreign(config.lanes)
    distributions = registry.distributions(names)
    lanes = [registry.lane(name) for name in names]
    for lane in lanes:
        registry.resolve(lane, lane.rule)
    return tuple(Candidate(lane, forbidden(config, lane.name), distributions.get(lane.name)) for lane in lanes)


def forbidden(config: GroupConfig, lane: str) -> str | None:
    """Why the configuration excludes a lane; None if it does not."""
    if f"-{lane}" in (config.lanes or ()):
        return f"forbidden by lanes={config.lanes}"
    wanted = [name for name in config.lanes or () if not name.startswith("-")]
    return f"not among lanes={config.lanes}" if wanted and lane not in wanted else None


#: In place of the names of the two members, in this order, while a verdict may be shared.
_NAMES = ("\x01", "\x02")
Verdicts = tuple[tuple[LaneChoice, ...], tuple[Rejection, ...]]


class Judge:
    """Decides routes between kinds of members, once for all that are alike. Thread-safe."""

    def __init__(self, config: GroupConfig, kinds: Sequence[Kind], lanes: Sequence[Candidate]) -> None:
        self._config, self._kinds, self._lanes = config, kinds, lanes
        self._verdicts: dict[Hashable, Verdicts] = {}
        self._sharing = {each.lane.name for each in lanes if each.lane.shares_memory}
        numbers: dict[Hashable, int] = {}
        # The rules of other distributions may read all of an endpoint.
        own = any(each.distribution for each in lanes)
        self.common = [numbers.setdefault(i if own else kind.common(), len(numbers)) for i, kind in enumerate(kinds)]
        """By kind: equal where only host, containers and GPUs may make a difference."""

    def fits(self, config: GroupConfig, kinds: Sequence[Kind], lanes: Sequence[Candidate]) -> bool:
        """Whether it was made for these."""
        return (self._config, self._kinds, self._lanes) == (config, kinds, lanes)

    def route(self, a: str, kind_a: int, b: str, kind_b: int) -> PairRoute:
        """The route between two members of these kinds."""
        first, second = self._kinds[kind_a].endpoint, self._kinds[kind_b].endpoint
        verdicts = self.verdicts(kind_a, kind_b) if a < b else self.verdicts(kind_b, kind_a)
        choices, rejected = verdicts
        if any(token in no.reason for no in rejected for token in _NAMES):
            names = dict(zip(map(ord, _NAMES), sorted((a, b)), strict=True))
            rejected = tuple(Rejection(no.lane, no.traffic, no.reason.translate(names)) for no in rejected)
        fastest = next((choice.lane for choice in choices if choice.traffic == "cuda"), None)
        return PairRoute(a, b, choices, rejected, _same_gpus(first, second) if fastest in self._sharing else ())

    def verdicts(self, kind_a: int, kind_b: int) -> Verdicts:
        """Which lanes connect members of these kinds; the name of the first is the smaller one. Reasons hold
        placeholders for names.
        """
        a, b = self._kinds[kind_a], self._kinds[kind_b]
        key = (self.common[kind_a], self.common[kind_b], *_relation(a, b))
        verdicts = self._verdicts.get(key)
        if verdicts is None:
            first, second = (each.endpoint.changed({"name": name}) for each, name in zip((a, b), _NAMES, strict=True))
            config = self._config
            pair = Pair(first, second, a.agent, b.agent, config.lanes or (), config.always_tcp, config.tls)
            verdicts = self._verdicts[key] = _judge(pair, self._lanes)
        return verdicts


def _relation(a: Kind, b: Kind) -> tuple[Hashable, ...]:
    """What of hosts, containers and GPUs the rules compare."""
    ours, theirs = a.gpu_uuids(), b.gpu_uuids()
    one_gpu = len(ours | theirs) == 1 and ours != {""}
    if not a.endpoint.same_host(b.endpoint):
        return False, one_gpu
    return one_gpu, *(kind for kind in sorted(a.endpoint.namespaces) if a.endpoint.shares(b.endpoint, kind))


def _judge(pair: Pair, lanes: Sequence[Candidate]) -> Verdicts:
    choices: list[LaneChoice] = []
    rejected: list[Rejection] = []
    carrier: Lane | None = None
    """The lane that carries the calls, and with them the descriptors of tensors that travel out of band."""
    for traffic in TRAFFIC:
        # The messages of calls are for what no other lane takes.
        for each in sorted(lanes, key=lambda each: each.lane is carrier):
            lane = each.lane
            if traffic not in lane.carries:
                continue
            missing = _not_installed(pair, lane.name, each.distribution) if each.distribution else None
            out_of_band = traffic != "calls" and lane is not carrier
            verdict = each.refused or missing or _ruled(each, pair, traffic)
            if out_of_band and not isinstance(verdict, str):
                verdict = _not_beside(lane, carrier) or verdict
            if isinstance(verdict, str):
                rejected.append(Rejection(lane.name, traffic, verdict))
                continue
            choices.append(LaneChoice(lane.name, traffic, *verdict, out_of_band=out_of_band))
            if carrier is None:
                carrier, pair = lane, replace(pair, carrier=lane.name)
    return tuple(choices), tuple(rejected)


def _not_beside(lane: Lane, carrier: Lane | None) -> str | None:
    """Why a lane cannot carry tensors out of band for this lane of calls; None if it can."""
    calls = "no lane" if carrier is None else carrier.name
    if not (lane.out_of_band or lane.rrefs):
        return f"calls go by {calls}"
    if carrier is None or not carrier.carries_descriptors:
        return f"calls go by {calls}, which carries no tensor descriptors"
    return None


def _ruled(each: Candidate, pair: Pair, traffic: Traffic) -> Verdict:
    try:
        rule = registry.resolve(each.lane, each.lane.rule)
    except (ConfigurationError, LookupError) as error:
        # The process that plans has loaded it, this one lacks the distribution.
        return f"its rule cannot be loaded in this process: {error}"
    verdict: Verdict = rule(pair, traffic)
    return verdict


def _not_installed(pair: Pair, lane: str, distribution: str) -> str | None:
    """Why two members cannot use a lane of that distribution; None if they can."""
    ends = sorted((pair.a, pair.b), key=lambda end: end.name)
    missing = [end.name for end in ends if lane not in end.lanes]
    if missing:
        return f"{distribution} is not installed in {' and '.join(missing)}"
    if pair.a.lanes[lane] != pair.b.lanes[lane]:
        return "different versions: " + ", ".join(f"{end.name} has {end.lanes[lane]}" for end in ends)
    return None


def _same_gpus(a: Endpoint, b: Endpoint) -> tuple[tuple[int, int], ...]:
    """(a's index, b's index) of each physical GPU that both see."""
    return tuple(
        (ours.index, theirs.index) for ours in a.gpus for theirs in b.gpus if ours.uuid and ours.uuid == theirs.uuid
    )
