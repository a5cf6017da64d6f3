"""Plans the routes of a group: a pure function of what its members published.

``plan`` decides, per kind of members that published the same, the TensorPipe transports and channels of their torchrpc
agents (``AgentPlan``). They belong to a process, not to a pair, so they are chosen such that no pair of the group can
abort or hang. The lanes of a pair follow from the kinds of both (``PairRoute``), in each process that asks for them.

A route keeps each rejected lane with its reason. Nothing here imports torch or Ray, or reads anything from the machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raytorchrpc.config import GroupConfig
from raytorchrpc.errors import BootstrapError, ConfigurationError
from raytorchrpc.lanes.registry import TRAFFIC_TEXT, Traffic
from raytorchrpc.lanes.torchrpc import backends
from raytorchrpc.routing.pairs import Candidate, Kind, PairRoute, candidates, foreign
from raytorchrpc.routing.routes import RoutePlan
from raytorchrpc.topology.endpoint import Endpoint

NEEDED: tuple[Traffic, ...] = ("calls", "cpu")


def plan(endpoints: Mapping[str, Endpoint], config: GroupConfig) -> RoutePlan:
    """Decide every route of a group.

    Args:
        endpoints: what each member published, by name, in rank order.
        config: ``lanes``, ``transports``, ``channels`` and ``interface`` override what the endpoints suggest.

    Raises ConfigurationError if the configuration leaves calls or CPU tensors without a lane, names a backend that
    this torch build does not have, or asks for a lane that cannot be loaded; BootstrapError, naming the members, if
    their torch releases differ.
    """
    members = {name: e if e.name == name else e.changed({"name": name}) for name, e in endpoints.items()}
    _check_torch(members)
    others = foreign(config)
    lanes = (*others, *candidates(config))
    _check_allowed(lanes, config)
    agents, warnings = backends.plan_agents(members, config)
    number = {name: index for index, (_, _, names) in enumerate(agents) for name in names}
    kinds = tuple(Kind(endpoint, agent) for endpoint, agent, _ in agents)
    planned = RoutePlan(config, kinds, {name: number[name] for name in members}, warnings, others)
    for a, b in planned.samples():
        _check_carried(planned.route(a, b), config)
    return planned


def _check_allowed(lanes: Sequence[Candidate], config: GroupConfig) -> None:
    for traffic in NEEDED:
        able = [each for each in lanes if traffic in each.lane.carries]
        if all(each.refused for each in able):
            names = ", ".join(each.lane.name for each in able)
            raise ConfigurationError(
                f"lanes={config.lanes} leaves no lane for {TRAFFIC_TEXT[traffic]}; allow one of: {names}"
            )


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
