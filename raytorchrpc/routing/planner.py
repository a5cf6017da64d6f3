"""Who reaches whom by which lane, and why: a pure function of what the members published.

``plan`` decides two kinds of things once, for the whole group:

* per member, the TensorPipe transports and channels of its torchrpc agent (``AgentPlan``). They belong to
  a process, not to a pair, so they are chosen such that no pair of the group can abort or hang;
* per pair, which lanes carry calls, CPU tensors and CUDA tensors, in order of preference (``PairRoute``).

Whatever is not chosen is kept with its reason. Nothing here imports torch or Ray or touches the machine.
What each lane can do between two members, ``_lane_rules`` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from raytorchrpc.config import GroupConfig
from raytorchrpc.errors import BootstrapError, ConfigurationError
from raytorchrpc.lanes.registry import BESIDE, LANES
from raytorchrpc.lanes.rules import TRAFFIC, TRAFFIC_TEXT, Pair, Traffic
from raytorchrpc.lanes.torchrpc import backends
from raytorchrpc.lanes.torchrpc.backends import AgentPlan
from raytorchrpc.routing.routes import LaneChoice, PairRoute, Rejection, RoutePlan
from raytorchrpc.topology.endpoint import Endpoint

__all__ = ["BESIDE", "LANES", "AgentPlan", "LaneChoice", "PairRoute", "Rejection", "RoutePlan", "Traffic", "plan"]

NEEDED: tuple[Traffic, ...] = ("calls", "cpu")


def plan(
    endpoints: Mapping[str, Endpoint],
    config: GroupConfig,
    known: tuple[Mapping[str, Endpoint], RoutePlan] | None = None,
) -> RoutePlan:
    """Decide every route of a group.

    Args:
        endpoints: what each member published, by name, in rank order.
        config: ``lanes``, ``transports``, ``channels`` and ``interface`` override what evidence says.
        known: an earlier plan with the same ``config``, and the endpoints that it was made of. Routes between members
            whose endpoints are the same objects, and whose agents have not changed, are taken from it.

    Raises ConfigurationError if the configuration leaves calls or CPU tensors without a lane or names
    what this torch build does not have, BootstrapError (naming the members) for torch releases that differ.
    """
    members = {name: e if e.name == name else e.model_copy(update={"name": name}) for name, e in endpoints.items()}
    _check_torch(members)
    lanes = _allowed(config)
    agents, warnings = backends.plan_agents(members, config)
    before, decided = known or ({}, RoutePlan({}, {}))
    as_before = {
        name for name in members if before.get(name) is endpoints[name] and decided.agents.get(name) == agents[name]
    }
    judge = _Judge(members, agents, config, lanes)
    routes: dict[tuple[str, str], PairRoute] = {}
    names = list(members)
    for index, a in enumerate(names):
        for b in names[index + 1 :]:
            if a in as_before and b in as_before and (route := decided.routes.get((a, b))) is not None:
                routes[a, b] = route
                continue
            verdicts = judge.verdicts(a, b)
            first = next((choice.lane for choice in verdicts[0] if choice.traffic == "cuda"), None)
            same = _same_gpus(members[a], members[b]) if first == "cuda_ipc" else ()
            routes[a, b] = PairRoute(a, b, *verdicts, same)
            _check_carried(routes[a, b], config)
    if not lanes["torchrpc"]:
        warnings = (*warnings, *_left_to_nng(routes))
    return RoutePlan(agents=agents, routes=routes, warnings=warnings)


def _left_to_nng(routes: Mapping[tuple[str, str], PairRoute]) -> tuple[str, ...]:
    """One warning per cause."""
    found: dict[str, str] = {}
    for route in routes.values():
        for no in route.rejected:
            if no.lane == "torchrpc" and no.traffic == "cpu" and route.in_band_lane == "nng":
                found.setdefault(
                    no.reason,
                    f"CPU tensors between {route.a} and {route.b} go by nng, which is slower than torchrpc: "
                    f"{no.reason}; see GroupConfig.transports and channels",
                )
    return tuple(found.values())


_Verdicts = tuple[tuple[LaneChoice, ...], tuple[Rejection, ...]]
#: Stand for the names of a pair's members in what is decided once for many pairs; no member's name contains them.
_A, _B = "\ue000", "\ue001"
#: No lane's rule looks at these.
_OWN = frozenset({"name", "pid", "shm_free_bytes"})


class _Judge:
    """Decides once for all pairs whose members have published the same: that is most, and it keeps plans small."""

    def __init__(
        self,
        members: Mapping[str, Endpoint],
        agents: Mapping[str, AgentPlan],
        config: GroupConfig,
        lanes: Mapping[str, str | None],
    ) -> None:
        self._members, self._agents, self._config, self._lanes = members, agents, config, lanes
        kinds: dict[tuple[str, AgentPlan], int] = {}
        self._kinds = {
            name: kinds.setdefault((endpoint.model_dump_json(exclude=set(_OWN)), agents[name]), len(kinds))
            for name, endpoint in members.items()
        }
        self._found: dict[tuple[int, int], tuple[_Verdicts, bool]] = {}
        self._shared: dict[_Verdicts, _Verdicts] = {}

    def verdicts(self, a: str, b: str) -> _Verdicts:
        key = self._kinds[a], self._kinds[b]
        if key not in self._found:
            first = self._members[a].model_copy(update={"name": _A})
            second = self._members[b].model_copy(update={"name": _B})
            named, agents = self._config.lanes or (), (self._agents[a], self._agents[b])
            pair = Pair(first, second, *agents, named, self._config.always_tcp, self._config.tls)
            verdicts = _judge(pair, self._lanes)
            personal = any(sign in no.reason for no in verdicts[1] for sign in (_A, _B))
            self._found[key] = self._shared.setdefault(verdicts, verdicts), personal
        verdicts, personal = self._found[key]
        if not personal:
            return verdicts
        choices, rejected = verdicts
        filled = choices, tuple(replace(no, reason=no.reason.replace(_A, a).replace(_B, b)) for no in rejected)
        return self._shared.setdefault(filled, filled)


def _judge(pair: Pair, lanes: Mapping[str, str | None]) -> _Verdicts:
    choices: list[LaneChoice] = []
    rejected: list[Rejection] = []
    for traffic in TRAFFIC:
        for lane in LANES:
            if traffic not in lane.carries:
                continue
            verdict = lanes[lane.name] or lane.rule(pair, traffic)
            if lane.name in BESIDE and not any(choice.lane == "socket" for choice in choices):
                verdict = "its descriptors ride in the socket lane's messages, and that lane is not used"
            if isinstance(verdict, str):
                rejected.append(Rejection(lane.name, traffic, verdict))
            else:
                choices.append(LaneChoice(lane.name, traffic, *verdict))
    return tuple(choices), tuple(rejected)


def _same_gpus(a: Endpoint, b: Endpoint) -> tuple[tuple[int, int], ...]:
    """(a's index, b's index) of each physical GPU that both see."""
    return tuple((mine.index, its.index) for mine in a.gpus for its in b.gpus if mine.uuid and mine.uuid == its.uuid)


def _allowed(config: GroupConfig) -> dict[str, str | None]:
    """For each lane, None if the configuration allows it, else why not."""
    wanted = [lane for lane in config.lanes or () if not lane.startswith("-")]
    forbidden = [lane[1:] for lane in config.lanes or () if lane.startswith("-")]
    allowed: dict[str, str | None] = {}
    for lane in LANES:
        allowed[lane.name] = None
        if lane.name in forbidden:
            allowed[lane.name] = f"forbidden by lanes={config.lanes}"
        elif wanted and lane.name not in wanted:
            allowed[lane.name] = f"not among lanes={config.lanes}"
    for traffic in NEEDED:
        able = [lane.name for lane in LANES if traffic in lane.carries]
        if all(allowed[name] for name in able):
            raise ConfigurationError(
                f"lanes={config.lanes} leaves no lane for {TRAFFIC_TEXT[traffic]}; allow one of: {', '.join(able)}"
            )
    return allowed


def forbidden(config: GroupConfig, lane: str) -> str | None:
    """Why the configuration leaves this lane out; None if it does not."""
    return _allowed(config)[lane]


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
    # The fewer are the more likely to be wrong; of two equal sides, the later one.
    usual, *_, odd = sorted(releases.values(), key=len, reverse=True)
    raise BootstrapError(
        f"members run different torch releases: {odd[0]} has {members[odd[0]].torch_version}, {usual[0]} has "
        f"{members[usual[0]].torch_version}; torchrpc needs the same major.minor everywhere",
        members=tuple(name for names in releases.values() if names is not usual for name in names),
    )
