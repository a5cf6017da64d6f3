"""Plans the routes of a group: a pure function of what its members published.

``plan`` decides once for the whole group:

* per member, the TensorPipe transports and channels of its torchrpc agent (``AgentPlan``). They belong to a process,
  not to a pair, so they are chosen such that no pair of the group can abort or hang;
* per pair, the lanes that carry calls, CPU tensors and CUDA tensors, in order of preference (``PairRoute``).

The plan keeps each rejected lane with its reason. Nothing here imports torch or Ray, or reads anything from the
machine. Each lane's own rule (``lanes.registry.Lane.rule``) decides whether it can connect two members.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from raytorchrpc.config import GroupConfig
from raytorchrpc.errors import BootstrapError, ConfigurationError
from raytorchrpc.lanes import registry
from raytorchrpc.lanes.registry import TRAFFIC, TRAFFIC_TEXT, Lane, Traffic
from raytorchrpc.lanes.rules import Pair, Verdict
from raytorchrpc.lanes.torchrpc import backends
from raytorchrpc.lanes.torchrpc.backends import AgentPlan
from raytorchrpc.routing.routes import LaneChoice, PairRoute, Rejection, RoutePlan
from raytorchrpc.topology.endpoint import Endpoint

NEEDED: tuple[Traffic, ...] = ("calls", "cpu")


def plan(
    endpoints: Mapping[str, Endpoint],
    config: GroupConfig,
    known: tuple[Mapping[str, Endpoint], RoutePlan] | None = None,
) -> RoutePlan:
    """Decide every route of a group.

    Args:
        endpoints: what each member published, by name, in rank order.
        config: ``lanes``, ``transports``, ``channels`` and ``interface`` override what the endpoints suggest.
        known: an earlier plan with the same ``config``, and the endpoints it was made from. Routes between members
            whose endpoints are the same objects, and whose agents have not changed, are reused.

    Raises ConfigurationError if the configuration leaves calls or CPU tensors without a lane, names a backend that
    this torch build does not have, or asks for a lane that cannot be loaded; BootstrapError, naming the members, if
    their torch releases differ.
    """
    members = {name: e if e.name == name else e.changed({"name": name}) for name, e in endpoints.items()}
    _check_torch(members)
    lanes = _candidates(config)
    agents, warnings = backends.plan_agents(members, config)
    before, decided = known or ({}, RoutePlan({}, {}))
    as_before = {
        name for name in members if before.get(name) is endpoints[name] and decided.agents.get(name) == agents[name]
    }
    kinds = _kinds(members, agents)
    found: dict[tuple[int, int], _Verdicts] = {}
    shared: dict[_Verdicts, _Verdicts] = {}  # many pairs get the same ones, which keeps a plan small
    sharing = {each.lane.name for each in lanes if each.lane.shares_memory}
    routes: dict[tuple[str, str], PairRoute] = {}
    names = list(members)
    for index, a in enumerate(names):
        for b in names[index + 1 :]:
            if a in as_before and b in as_before and (route := decided.routes.get((a, b))) is not None:
                routes[a, b] = route
                continue
            verdicts = found.get((kinds[a], kinds[b]))
            if verdicts is None:
                ends = members[a], members[b], agents[a], agents[b]
                verdicts = _judge(Pair(*ends, config.lanes or (), config.always_tcp, config.tls), lanes)
                verdicts = shared.setdefault(verdicts, verdicts)
                if not any(name in no.reason for no in verdicts[1] for name in (a, b)):
                    found[kinds[a], kinds[b]] = verdicts
            first = next((choice.lane for choice in verdicts[0] if choice.traffic == "cuda"), None)
            same = _same_gpus(members[a], members[b]) if first in sharing else ()
            routes[a, b] = PairRoute(a, b, *verdicts, same)
            _check_carried(routes[a, b], config)
    return RoutePlan(agents, routes, (*warnings, *_last_resorts(routes, lanes)))


def _last_resorts(routes: Mapping[tuple[str, str], PairRoute], lanes: Sequence[_Candidate]) -> tuple[str, ...]:
    """One warning for each reason why CPU tensors take a lane of last resort instead of one that was allowed."""
    slow = {lane.name for lane, *_ in lanes if lane.last_resort}
    better = {each.lane.name for each in lanes if not (each.refused or each.lane.out_of_band)} - slow
    found: dict[str, str] = {}
    for route in (route for route in routes.values() if route.in_band_lane in slow):
        for no in route.rejected:
            if no.lane in better and no.traffic == "cpu" and no.reason not in found:
                found[no.reason] = (
                    f"CPU tensors between {route.a} and {route.b} go by {route.in_band_lane}, which is slower than "
                    f"{no.lane}: {no.reason}; see GroupConfig.transports and channels"
                )
    return tuple(found.values())


_Verdicts = tuple[tuple[LaneChoice, ...], tuple[Rejection, ...]]
#: Fields of an endpoint that no lane's rule reads, with a value that stands for all.
_OWN = {"name": "", "pid": 0, "shm_free_bytes": 0}


def _kinds(members: Mapping[str, Endpoint], agents: Mapping[str, AgentPlan]) -> dict[str, int]:
    """By member, a number that members with equal evidence share: what holds for a pair holds for all of its kinds."""
    numbers: dict[tuple[str, AgentPlan], int] = {}
    evidence = {name: (repr(endpoint.changed(_OWN)), agents[name]) for name, endpoint in members.items()}
    return {name: numbers.setdefault(each, len(numbers)) for name, each in evidence.items()}


def _judge(pair: Pair, lanes: Sequence[_Candidate]) -> _Verdicts:
    choices: list[LaneChoice] = []
    rejected: list[Rejection] = []
    carrier: Lane | None = None
    """The lane that carries the calls, and with them the descriptors of tensors that travel out of band."""
    for traffic in TRAFFIC:
        for lane, rule, refused, distribution in lanes:
            if traffic not in lane.carries:
                continue
            missing = _not_installed(pair, lane.name, distribution) if distribution else None
            verdict = refused or missing or rule(pair, traffic)
            if lane.out_of_band and not (carrier and carrier.carries_descriptors):
                verdict = f"calls go by {carrier.name if carrier else 'no lane'}, which carries no tensor descriptors"
            if isinstance(verdict, str):
                rejected.append(Rejection(lane.name, traffic, verdict))
                continue
            choices.append(LaneChoice(lane.name, traffic, *verdict, out_of_band=lane.out_of_band))
            carrier = carrier or lane
    return tuple(choices), tuple(rejected)


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
    return tuple((mine.index, its.index) for mine in a.gpus for its in b.gpus if mine.uuid and mine.uuid == its.uuid)


class _Candidate(NamedTuple):
    """A lane that routes may be built from."""

    lane: Lane
    rule: Callable[[Pair, Traffic], Verdict]
    refused: str | None
    """Why the configuration excludes it; None if it does not."""
    distribution: str | None
    """Of another distribution: its name and version."""


def _candidates(config: GroupConfig) -> list[_Candidate]:
    distributions = registry.distributions(registry.foreign(config.lanes))
    found = [
        _Candidate(lane, registry.resolve(lane, lane.rule), forbidden(config, lane.name), distributions.get(lane.name))
        for lane in registry.rows(config.lanes)
    ]
    for traffic in NEEDED:
        able = [each for each in found if traffic in each.lane.carries]
        if all(each.refused for each in able):
            names = ", ".join(each.lane.name for each in able)
            raise ConfigurationError(
                f"lanes={config.lanes} leaves no lane for {TRAFFIC_TEXT[traffic]}; allow one of: {names}"
            )
    return found


def forbidden(config: GroupConfig, lane: str) -> str | None:
    """Why the configuration excludes a lane; None if it does not."""
    if f"-{lane}" in (config.lanes or ()):
        return f"forbidden by lanes={config.lanes}"
    wanted = [name for name in config.lanes or () if not name.startswith("-")]
    return f"not among lanes={config.lanes}" if wanted and lane not in wanted else None


def _check_carried(route: PairRoute, config: GroupConfig) -> None:
    for traffic in NEEDED:
        if not route.lanes(traffic):
            reasons = "; ".join(f"{no.lane}: {no.reason}" for no in route.rejected if no.traffic == traffic)
            raise ConfigurationError(
                f"nothing can carry {TRAFFIC_TEXT[traffic]} between {route.a} and {route.b} ({reasons}); "
                f"lanes={config.lanes} transports={config.transports} channels={config.channels}"
            )


def _check_torch(members: Mapping[str, Endpoint]) -> None:
    releases: dict[tuple[str, ...], list[str]] = {}
    for name, endpoint in members.items():
        releases.setdefault(tuple(endpoint.torch_version.split("+")[0].split(".")[:2]), []).append(name)
    if len(releases) < 2:
        return
    # The smaller set is more likely to be wrong; of two equal sets, the later one.
    usual, *_, odd = sorted(releases.values(), key=len, reverse=True)
    raise BootstrapError(
        f"members run different torch releases: {odd[0]} has {members[odd[0]].torch_version}, {usual[0]} has "
        f"{members[usual[0]].torch_version}; torchrpc needs the same major.minor everywhere",
        members=tuple(name for names in releases.values() if names is not usual for name in names),
    )
