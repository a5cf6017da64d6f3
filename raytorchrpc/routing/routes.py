"""The plan of a group's routes: what its members published, the route of any pair, and both as text."""

from __future__ import annotations

import collections
import functools
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from raytorchrpc.config import GroupConfig
from raytorchrpc.errors import ConfigurationError
from raytorchrpc.lanes.registry import TORCHRPC, TRAFFIC, TRAFFIC_TEXT
from raytorchrpc.lanes.torchrpc.backends import AgentPlan, name_range
from raytorchrpc.routing import fast_paths
from raytorchrpc.routing.pairs import Candidate, Judge, Kind, PairRoute, candidates
from raytorchrpc.text import Shown, list_cell, paragraph, table, terminal_columns
from raytorchrpc.topology import device_map

# Groups above this size get one line per kind of route instead of one per pair.
_TABLE_LIMIT = 8


#: The latest: a process sees the plan of one group several times, and that of the same members in their next group.
_judges: collections.deque[Judge] = collections.deque(maxlen=2)


@dataclass(frozen=True, repr=False)
class RoutePlan(Shown):
    """What the members of a group published, and what follows from it: the settings of each member's agent, and the
    route of each pair, which is decided when it is first asked for. Immutable and picklable; its size is linear in the
    number of members.
    """

    config: GroupConfig
    kinds: tuple[Kind, ...]
    kind_of: dict[str, int]
    """By member, in rank order: an index into ``kinds``."""
    warnings: tuple[str, ...] = ()
    """What runs slower than the hardware allows, with cause and remedy; one per cause."""
    foreign: tuple[Candidate, ...] = ()
    """Lanes of other distributions."""

    def __reduce__(self) -> tuple[Any, ...]:
        return RoutePlan, (self.config, self.kinds, self.kind_of, self.warnings, self.foreign)  # nothing cached

    @functools.cached_property
    def _judge(self) -> Judge:
        lanes = (*self.foreign, *candidates(self.config))
        judge = next((judge for judge in _judges if judge.fits(self.config, self.kinds, lanes)), None)
        if judge is None:
            judge = Judge(self.config, self.kinds, lanes)
            _judges.appendleft(judge)
        return judge

    @property
    def members(self) -> tuple[str, ...]:
        """Names in rank order."""
        return tuple(self.kind_of)

    @property
    def agents(self) -> dict[str, AgentPlan]:
        """The settings of all members' agents, by member."""
        return {name: self.kinds[kind].agent for name, kind in self.kind_of.items()}

    def kind(self, name: str) -> Kind:
        """What this member has in common with others. Raises ConfigurationError for an unknown name."""
        self._known(name)
        return self.kinds[self.kind_of[name]]

    def route(self, a: str, b: str) -> PairRoute:
        """The route between two different members. Raises ConfigurationError for an unknown name."""
        self._known(a)
        self._known(b)
        if a == b:
            raise ConfigurationError(f"this plan has no route between {a!r} and {b!r}")
        return self._judge.route(a, self.kind_of[a], b, self.kind_of[b])

    def lanes_of(self, name: str) -> tuple[str, ...]:
        """The lanes that some route of this member uses first, for calls or tensors."""
        others = self._one_of_each(name)
        used: list[str] = []
        for choices in dict.fromkeys(self.route(name, other).choices for other in others):
            for traffic in TRAFFIC:
                used += [choice.lane for choice in choices if choice.traffic == traffic][:1]
        return tuple(dict.fromkeys(used))

    def _one_of_each(self, name: str) -> Iterable[str]:
        """Other members such that the routes to all others are like those to one of them."""
        me = self.kind_of[name]
        return {(kind, kind == me): other for other, kind in self.kind_of.items() if other != name}.values()

    def classes(self) -> list[list[str]]:
        """Members on one host, in the same namespaces, whose routes to any other member are decided alike."""
        members: dict[int, list[str]] = {}
        for name, number in self.kind_of.items():
            members.setdefault(number, []).append(name)
        users = collections.Counter((kind.place(), kind.gpu_uuids()) for kind in map(self.kinds.__getitem__, members))
        sets: dict[Hashable, list[str]] = {}
        for number, names in members.items():
            kind, common = self.kinds[number], self._judge.common[number]
            place, gpus = kind.place(), kind.gpu_uuids()
            # On one host NCCL cannot connect those that use the same GPU.
            shares = gpus if len(names) > 1 or users[place, gpus] > 1 else None
            sets.setdefault((common, place, shares) if place is not None else number, []).extend(names)
        return list(sets.values())

    def samples(self) -> Iterator[tuple[str, str]]:
        """Pairs of members such that calls and CPU tensors of any pair take the lanes of one of these."""
        hosts: dict[Hashable, list[str]] = {}
        classes = self.classes()
        for names in classes:
            kind = self.kind(names[0])
            hosts.setdefault(kind.endpoint.boot_id or names[0], []).append(names[0])
            if len(names) > 1:
                yield names[0], names[1]
        common: dict[int, list[str]] = {}  # by kind of host: members on at most two of them
        for names in hosts.values():
            yield from combinations(names, 2)
            for name in names:
                known = common.setdefault(self._judge.common[self.kind_of[name]], [])
                if len(known) < 2 and not (known and self.kind(known[0]).endpoint.same_host(self.kind(name).endpoint)):
                    known.append(name)
        for these in common.values():
            yield from combinations(these, 2)
        for one, other in combinations(common.values(), 2):
            yield from ((a, b) for a in one for b in other)

    def far_from(self, name: str) -> tuple[str, ...]:
        """The members that this one can reach only over a network: TCP, where others use Unix sockets."""
        end = self.kind(name).endpoint
        far = [self.config.always_tcp or not kind.endpoint.same_network(end) for kind in self.kinds]
        return tuple(other for other, kind in self.kind_of.items() if far[kind] and other != name)

    def addresses(self) -> tuple[str, ...]:
        """The addresses of all members' hosts."""
        ends = [kind.endpoint for kind in self.kinds]
        addresses = {address for end in ends for each in end.interfaces for address in each.addresses}
        return tuple(sorted({*addresses, *(end.node_ip for end in ends)}))

    def device_map(self, a: str, b: str) -> device_map.PairMap:
        """Where a's tensors arrive on b: {a's gpu: b's gpu}, or "cpu" in place of one."""
        return device_map.between(self.config, a, b, self.kind(a).endpoint, self.kind(b).endpoint)

    def gpu_maps(
        self, name: str, *, inward: bool = False, others: Iterable[str] | None = None
    ) -> dict[str, dict[int, int]]:
        """By member: GPUs of this member -> GPUs of the other, where any is mapped, for what this member sends; with
        ``inward``, GPUs of the other -> GPUs of this member, for what it receives. With itself included.

        ``others``: only of these members.
        """
        if not self.kind(name).endpoint.gpus:
            return {}
        given, known = self.config.device_maps or {}, dict[str | int, dict[int, int]]()
        maps = {}
        for other in self.kind_of if others is None else others:
            key = other if name in given or other in given else self.kind_of[other]
            if key not in known:
                ends = (other, name) if inward else (name, other)
                known[key] = device_map.gpu_pairs(self.device_map(*ends))
            if known[key]:
                maps[other] = known[key]
        return maps

    def gpus_of(self, name: str) -> tuple[int, ...]:
        """The GPUs of this member that any device map names."""
        outward, inward = self.gpu_maps(name).values(), self.gpu_maps(name, inward=True).values()
        return tuple(sorted({*(gpu for pairs in outward for gpu in pairs), *(g for p in inward for g in p.values())}))

    def part(self, names: Iterable[str]) -> RoutePlan:
        """The plan of these members alone, as they are in this one."""
        numbers: dict[int, int] = {}
        chosen = {name: numbers.setdefault(self.kind_of[name], len(numbers)) for name in names}
        return replace(self, kinds=tuple(self.kinds[kind] for kind in numbers), kind_of=chosen)

    def merged(self, other: RoutePlan, order: Iterable[str]) -> RoutePlan:
        """The plan of the members in ``order``, each as in ``other`` or else as in this one."""
        numbers: dict[Kind, int] = {}
        plans = ((name, other if name in other.kind_of else self) for name in order)
        chosen = {name: plan.kinds[plan.kind_of[name]] for name, plan in plans}
        distinct = {id(kind): kind for kind in chosen.values()}  # a Kind takes long to hash
        places = {known: numbers.setdefault(kind, len(numbers)) for known, kind in distinct.items()}
        kind_of = {name: places[id(kind)] for name, kind in chosen.items()}
        return replace(self, kinds=tuple(numbers), kind_of=kind_of, warnings=other.warnings)

    def explain(self, a: str, b: str) -> str:
        """Describe the route between a and b in lines of text: lanes and rejected lanes with reasons, both agents."""
        if a == b:
            self._known(a)
            return f"{a} -> {b}: a member calls itself in place\n" + _agent_text(a, self.kind(a).agent)
        route = self.route(a, b)
        lines, rejected = [f"{a} <-> {b}"], list(route.rejected)
        for traffic in TRAFFIC:
            texts = [f"{choice.lane} ({choice.how}): {choice.reason}" for choice in route.lanes(traffic)]
            reasons = {no.reason for no in rejected if no.traffic == traffic}
            if not texts and len(reasons) == 1:  # of all lanes
                texts = [f"none: {reasons.pop()}"]
                rejected = [no for no in rejected if no.traffic != traffic]
            lines += [f"  {TRAFFIC_TEXT[traffic]}: {text}" for text in texts or ["none"]]
        for ours, theirs in route.same_gpus_from(a):
            lines.append(f"  share=True shares the memory of cuda:{ours} of {a}, which is cuda:{theirs} of {b}")
        for no in rejected:
            lines.append(f"  not {no.lane} for {TRAFFIC_TEXT[no.traffic]}: {no.reason}")
        if route.lanes("cpu")[0].lane == TORCHRPC:
            lines += [
                f"  note: large CPU tensors reach {name} at a fraction of the possible speed: {why}"
                for name in (a, b)
                if (why := self.kind(name).agent.small_pages)
            ]
        lines += [f"  slower than possible: {text}" for text in self._unused_by(a, b)]
        lines += [_agent_text(name, self.kind(name).agent) for name in (a, b)]
        return "\n".join(lines)

    @functools.cached_property
    def unused(self) -> tuple[str, ...]:
        """What is faster and not used; a sentence for each cause, with the first pair of members that it concerns."""
        pairs: dict[str, tuple[str, str]] = {}
        for pair in self.samples():
            for text in self._unused_by(*pair):
                pairs.setdefault(text, pair)
        members = {name: self.kinds[kind].endpoint for name, kind in self.kind_of.items()}
        texts = (f"between {a} and {b}: {text}" for text, (a, b) in pairs.items())
        return *texts, *fast_paths.shared_adapters(self.config, members)

    def _unused_by(self, a: str, b: str) -> Iterator[str]:
        ends = (self.kind(name).endpoint.changed({"name": name}) for name in (a, b))
        return fast_paths.between(self.config, self.route(a, b), *ends)

    def table(self, width: int | None = None) -> str:
        """A plain-text table with the lane of each pair for calls, CPU tensors and CUDA tensors. A number behind a lane
        leads to a line below the table: what the lane runs over, and why it was chosen.

        A group of more than eight members gets one line per kind of route, with the members it connects.

        Args:
            width: columns that are available; None: those of the terminal, or 120 where the output is no terminal.
        """
        width = terminal_columns() if width is None else width
        if len(self.kind_of) > _TABLE_LIMIT:
            rows = _merged_rows(self)
        else:
            rows = [(a, b, _firsts(self.route(a, b))) for a, b in combinations(self.kind_of, 2)]
        if not rows:
            return "one member, no routes"
        return _format(rows, width)

    def __str__(self) -> str:
        return self.table()

    def _known(self, name: str) -> None:
        if name not in self.kind_of:
            raise ConfigurationError(f"no member {name!r}; members: {', '.join(self.kind_of)}")


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
    classes = plan.classes()

    @functools.cache
    def shown(i: int, j: int) -> _Firsts:
        return _firsts(plan.route(classes[i][0], classes[j][i == j]))

    def are_alike(i: int, j: int) -> bool:
        return all(
            shown(i, k) == shown(j, k)
            for k, names in enumerate(classes)
            if k not in (i, j) or len(names) > 1
        )  # fmt: skip

    sets: list[list[int]] = []
    for i in range(len(classes)):
        same = next((alike for alike in sets if are_alike(alike[0], i)), None)
        if same is None:
            sets.append([i])
        else:
            same.append(i)
    order = {name: place for place, name in enumerate(plan.members)}
    return [sorted((name for i in each for name in classes[i]), key=order.__getitem__) for each in sets]


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
