"""Routes as data: the lanes between two members, the rejected lanes with reasons, and both as text."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from raytorchrpc.errors import ConfigurationError
from raytorchrpc.lanes.registry import FABRIC, TRAFFIC, TRAFFIC_TEXT, Traffic
from raytorchrpc.lanes.torchrpc.backends import AgentPlan, name_range
from raytorchrpc.text import list_cell, paragraph, table, terminal_columns

# Groups above this size get one line per kind of route instead of one per pair.
_TABLE_LIMIT = 8


@dataclass(frozen=True)
class LaneChoice:
    """A lane that can carry ``traffic`` between two members, and how."""

    lane: str
    traffic: Traffic
    how: str
    """What it runs over: ``unix socket``, ``torchrpc over uv, channel mpt_uv``."""
    reason: str
    out_of_band: bool = False
    """A tensor lane: the descriptors of its tensors travel in the messages of the lane that carries the calls."""


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
        return self.same_gpus if name == self.a else tuple((its, mine) for mine, its in self.same_gpus)

    def lanes(self, traffic: Traffic) -> tuple[LaneChoice, ...]:
        """Usable lanes for this traffic, the preferred one first; empty if there is none."""
        return tuple(choice for choice in self.choices if choice.traffic == traffic)

    @property
    def message_lane(self) -> str:
        """The lane for calls that carry no tensor."""
        return self.lanes("calls")[0].lane

    @property
    def in_band_lane(self) -> str | None:
        """The lane whose messages carry CPU tensors of any size; None if all of them travel out of band."""
        return next((choice.lane for choice in self.lanes("cpu") if not choice.out_of_band), None)

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
class RoutePlan:
    """The settings of each member's agent, and the route of each pair. Immutable and picklable."""

    agents: dict[str, AgentPlan]
    """By member, in rank order."""
    routes: dict[tuple[str, str], PairRoute] = field(repr=False)
    """By pair, lower rank first; ``route`` accepts either order."""
    warnings: tuple[str, ...] = ()
    """What runs slower than the hardware allows, with cause and remedy; one per cause."""

    @property
    def members(self) -> tuple[str, ...]:
        """Names in rank order."""
        return tuple(self.agents)

    def route(self, a: str, b: str) -> PairRoute:
        """The route between two different members. Raises ConfigurationError for an unknown name."""
        self._known(a)
        self._known(b)
        found = self.routes.get((a, b)) or self.routes.get((b, a))
        if found is None:
            raise ConfigurationError(f"this plan has no route between {a!r} and {b!r}")
        return found

    def lanes_of(self, name: str) -> tuple[str, ...]:
        """The lanes that some route of this member uses first, for calls or tensors; in the order of its routes."""
        kinds = {id(route.choices): route for route in self._own(name).values()}  # many routes share their choices
        used: list[str] = []
        for route in kinds.values():
            used += [route.lanes(traffic)[0].lane for traffic in TRAFFIC if route.lanes(traffic)]
            used += [route.in_band_lane] if route.in_band_lane else []
        return tuple(dict.fromkeys(used))

    def for_member(self, name: str) -> RoutePlan:
        """The part that one member needs: all agents, and its own routes."""
        return replace(self, routes=self._own(name))

    def for_arrivals(self, name: str, coming: Collection[str]) -> RoutePlan:
        """What one member needs when others join: its own agent, theirs, and its routes to them."""
        agents = {member: self.agents[member] for member in (name, *coming)}
        return replace(self, agents=agents, routes=self._own(name, coming), warnings=())

    def _own(self, name: str, others: Iterable[str] | None = None) -> dict[tuple[str, str], PairRoute]:
        """The routes of one member, found without a pass over all routes of the group."""
        peers = self.agents if others is None else others
        pairs = (pair for other in peers for pair in ((name, other), (other, name)))
        return {pair: route for pair in pairs if (route := self.routes.get(pair)) is not None}

    def explain(self, a: str, b: str) -> str:
        """Describe the route between a and b in lines of text: lanes and rejected lanes with reasons, both agents."""
        if a == b:
            self._known(a)
            return f"{a} -> {b}: a member calls itself in place\n" + _agent_text(a, self.agents[a])
        route = self.route(a, b)
        lines = [f"{a} <-> {b}"]
        for traffic in TRAFFIC:
            texts = [f"{choice.lane} ({choice.how}): {choice.reason}" for choice in route.lanes(traffic)]
            lines += [f"  {TRAFFIC_TEXT[traffic]}: {text}" for text in texts or ["none"]]
        for mine, its in route.same_gpus_from(a):
            lines.append(f"  share=True shares the memory of cuda:{mine} of {a}, which is cuda:{its} of {b}")
        for no in route.rejected:
            lines.append(f"  not {no.lane} for {TRAFFIC_TEXT[no.traffic]}: {no.reason}")
        if route.lanes("cpu")[0].lane == FABRIC:
            lines += [
                f"  note: large CPU tensors reach {name} at a fraction of the possible speed: {why}"
                for name in (a, b)
                if (why := self.agents[name].small_pages)
            ]
        lines += [_agent_text(name, self.agents[name]) for name in (a, b)]
        return "\n".join(lines)

    def table(self, width: int | None = None) -> str:
        """A plain-text table with the lane of each pair for calls, CPU tensors and CUDA tensors. A number behind a lane
        leads to a line below the table: what the lane runs over, and why it was chosen.

        A group of more than eight members gets one line per kind of route, with the members it connects.

        Args:
            width: columns that are available; None: those of the terminal, or 120 where the output is no terminal.
        """
        width = terminal_columns() if width is None else width
        if len(self.agents) > _TABLE_LIMIT:
            rows = _merged_rows(self)
        else:
            rows = [(a, b, _firsts(route)) for (a, b), route in self.routes.items()]
        if not rows:
            return "one member, no routes"
        return _format(rows, width)

    def __str__(self) -> str:
        return self.table()

    def _known(self, name: str) -> None:
        if name not in self.agents:
            raise ConfigurationError(f"no member {name!r}; members: {', '.join(self.agents)}")


def _agent_text(name: str, agent: AgentPlan) -> str:
    head = (
        f"  {name}: {agent.address} on {agent.interface or 'an unknown interface'}, "
        f"transports {', '.join(agent.transports)}, channels {', '.join(agent.channels)}"
    )
    return "\n".join([head, *(f"    {note}" for note in agent.notes)])


#: For each kind of traffic, the lane that is used first, what it runs over, and why; None: no lane carries it.
_Firsts = tuple[tuple[str, str, str] | None, ...]


def _firsts(route: PairRoute) -> _Firsts:
    first = (next(iter(route.lanes(traffic)), None) for traffic in TRAFFIC)
    return tuple(
        None if choice is None else (choice.lane, choice.how.removeprefix(f"{choice.lane} over "), choice.reason)
        for choice in first
    )


def _merged_rows(plan: RoutePlan) -> list[tuple[str, str, _Firsts]]:
    """One row per kind of route. ``|`` separates sets of members whose routes are alike."""
    sets = _alike(plan)
    within: dict[_Firsts, list[int]] = {}
    between: dict[_Firsts, list[tuple[int, int]]] = {}
    for i, names in enumerate(sets):
        if len(names) > 1:
            within.setdefault(_firsts(plan.route(*names[:2])), []).append(i)
        for j in range(i + 1, len(sets)):
            between.setdefault(_firsts(plan.route(names[0], sets[j][0])), []).append((i, j))
    label = [name_range(names) for names in sets]
    rows = [(" | ".join(label[i] for i in of), "each other", firsts) for firsts, of in within.items()]
    for firsts, pairs in between.items():
        joined = sorted({i for pair in pairs for i in pair})
        if len(joined) > 2 and len(pairs) == len(joined) * (len(joined) - 1) // 2:
            rows.append((" | ".join(label[i] for i in joined), "across |", firsts))
        else:
            rows.extend((label[i], label[j], firsts) for i, j in pairs)
    return rows


def _alike(plan: RoutePlan) -> list[list[str]]:
    """Group the members into sets such that what the table shows of a route depends only on the two members' sets.

    Two members are alike if their routes to every third member show the same. This is an equivalence, so all routes
    within a set show the same, and so do all routes between two sets.
    """
    shown = {pair: _firsts(route) for pair, route in plan.routes.items()}
    shown.update({(b, a): each for (a, b), each in shown.items()})
    sets: list[list[str]] = []
    for name in plan.members:
        for alike in sets:
            other = alike[0]
            if all(shown[name, m] == shown[other, m] for m in plan.members if m not in (name, other)):
                alike.append(name)
                break
        else:
            sets.append([name])
    return sets


def _format(rows: list[tuple[str, str, _Firsts]], width: int) -> str:
    numbers: dict[tuple[str, str, str], int] = {}
    lanes = [
        [f"{first[0]} [{numbers.setdefault(first, len(numbers) + 1)}]" if first else "-" for first in firsts]
        for _, _, firsts in rows
    ]
    heads = ("from", "to", "calls", "CPU tensors", "CUDA tensors")
    widths = [max(map(len, column)) for column in zip(heads[2:], *lanes, strict=True)]
    free = width - sum(widths) - 2 * len(widths) - 2
    room = [free - min(free // 2, max(len(row[other]) for row in rows)) for other in (1, 0)]
    lines = [
        (list_cell(a, room[0]), list_cell(b, room[1]), *cells) for (a, b, _), cells in zip(rows, lanes, strict=True)
    ]
    notes = (
        paragraph(f"[{number}] ", f"{lane} ({how}): {reason}", width) for (lane, how, reason), number in numbers.items()
    )
    return "\n".join((table(heads, lines, width=width), "", *notes))
