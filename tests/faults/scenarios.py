"""What a group does while faults strike it: which members play which roles, with which queues, topics and weights.

A plan is drawn from a seed, and is JSON on its way to the members. ``SCENARIOS`` lists all that there is.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tests.faults.faults import CALL_FAULTS, LONG_FAULTS, PATTERN_FAULTS, SHARD_FAULTS, Faults


class Object(NamedTuple):
    """A queue, a topic or a store of weights. The home makes it again, under this name, when it was restarted."""

    kind: str
    """queue, topic, weights, or shards (whose publishers share the store)."""
    name: str
    home: str = ""
    shape: str = ""
    """Of weights: see ``records.layout``."""
    track: bool = False
    scale: int = 1


class Role(NamedTuple):
    """What one thread of a member does until the round ends: a method of ``roles.Roles``."""

    member: str
    number: int
    """In the plan."""
    does: str
    object: str = ""
    """Its name; of "call": the peer, or all of them."""
    how: str = ""
    handed: bool = False
    """Its handles come from the home, in an answer; else it makes them itself."""


class Plan(NamedTuple):
    """Of one round."""

    number: int
    names: Sequence[str]
    objects: Sequence[Object]
    roles: Sequence[Role]

    @staticmethod
    def of(given: Sequence[Any]) -> Plan:
        """Out of JSON."""
        number, names, objects, roles = given
        return Plan(number, names, [Object(*one) for one in objects], [Role(*one) for one in roles])


class Scenario(NamedTuple):
    """A group under load. Its first member is never killed on purpose, unless ``kills_all``."""

    names: tuple[str, ...]
    plan: Callable[[Scenario, int, int], Plan]
    """Of a seed and the number of a round."""
    faults: Faults
    threaded: tuple[str, ...] = ()
    """Members that run more than one method at a time."""
    on_loops: tuple[str, ...] = ()
    """Members whose methods are coroutines."""
    at_once: tuple[int, ...] = (1, 1, 2, 3)
    """How many faults a round has, drawn from these."""
    idle_first: bool = False
    """A fault at no moment of a call strikes before the load begins, and not in the middle of it."""
    lasting: bool = False
    """The roles go on from round to round, and each has to succeed after each fault."""
    rests: bool = False
    """Between rounds a process holds nothing that it did not hold at first."""
    kills_all: bool = False
    scale: int = 1
    """Of the weights."""


def _calls(scenario: Scenario, seed: int, number: int) -> Plan:
    """All call all, on two threads each."""
    roles = [Role(name, place, "call") for place, name in enumerate(scenario.names * 2)]
    return Plan(number, scenario.names, [], roles)


#: How items are taken: one by one, in batches, by iterations of both kinds, by coroutines.
CONSUME = ("get", "get_many", "items", "items 8", "aget", "async for", "cancel")
PUT = ("put", "put_many", "aput", "gathered")
POLICIES = ("block", "block items", "drop_oldest", "latest")
#: How weights are pulled.
READ = ("pull", "since", "since short", "apull")
#: How the tensors of a store differ from life to life.
SHAPES = ("same", "turned", "resized")


def _patterns(scenario: Scenario, seed: int, number: int) -> Plan:
    """A queue with one consumer, one with several, a topic, and two stores, which are the same in all rounds."""
    names = scenario.names
    homes = [*names[1:], *names[1:], names[0]]  # the one that is never killed is seldom one
    draw = random.Random(seed)
    objects = [
        Object("weights", name, draw.choice(homes), draw.choice(SHAPES), name == "tracked", scenario.scale)
        for name in ("plain", "tracked")
    ]
    draw = random.Random(f"{seed} {number}")
    objects += [
        Object(kind, f"{name}-{number}", draw.choice(homes))
        for kind, name in (("queue", "alone"), ("queue", "shared"), ("topic", "topic"))
    ]
    roles: list[Role] = []

    def add(members: Sequence[str], does: str, of: Object, hows: Sequence[str]) -> None:
        for member, how in zip(members, hows, strict=True):
            handed = member != of.home and draw.random() < 0.4
            roles.append(Role(member, len(roles), does, of.name, how, handed))

    plain, tracked, alone, shared, topic = objects
    add([plain.home], "publish", plain, [""])
    add([tracked.home], "publish", tracked, [""])
    add(draw.sample(names, 2), "produce", alone, draw.choices(PUT, k=2))
    add(draw.sample(names, 1), "consume", alone, [draw.choice(CONSUME)])
    add(draw.sample(names, 2), "produce", shared, draw.choices(PUT, k=2))
    add(draw.sample(names, 2), "consume", shared, draw.sample(CONSUME, 2))
    add(draw.sample(names, 1), "produce", topic, [""])
    add(draw.sample(names, 3), "subscribe", topic, ["block", *draw.sample(POLICIES[1:], 2)])
    add([name for name in names if name != plain.home][:2], "read", plain, draw.sample(READ, 2))
    add([name for name in names if name != tracked.home][-2:], "read", tracked, ["since", draw.choice(READ)])
    roles += [Role(name, len(roles) + place, "call", names[place - 1]) for place, name in enumerate(names)]
    return Plan(number, names, objects, roles)


PUBLISHERS, READERS = ("p0", "p1", "p2"), ("r0", "r1")
#: What a reader of shards does: pulls the last whole version again and again; waits for a newer one before; pulls what
#: every publisher has.
LAST, NEWER, COPIES = "last", "newer", "copies"


def _shards(scenario: Scenario, seed: int, number: int) -> Plan:
    """Three publishers of the shards of one store, and two readers."""
    who = [(name, "publish_shards", "") for name in PUBLISHERS]
    who += [(name, "read_shards", how) for name in READERS for how in (LAST, NEWER, COPIES)]
    roles = [Role(name, place, does, "shards", how) for place, (name, does, how) in enumerate(who)]
    return Plan(number, scenario.names, [Object("shards", "shards")], roles)


NAMES = ("c0", "c1", "c2", "c3", "c4", "c5")
#: Where there are several hosts, these are on the one of Ray's head, which keeps its power.
NEAR = ("c0", "c1")

CALLS = Scenario(
    NAMES,
    _calls,
    CALL_FAULTS,
    threaded=("c3", "c4"),
    on_loops=("c5",),
    idle_first=True,
    rests=True,
)
PATTERNS = Scenario(NAMES[:4], _patterns, PATTERN_FAULTS, threaded=NAMES[:4])
SCENARIOS = {
    "calls": CALLS,
    "patterns": PATTERNS,
    "long patterns": PATTERNS._replace(faults=LONG_FAULTS, scale=100),
    "shards": Scenario((*PUBLISHERS, *READERS), _shards, SHARD_FAULTS, at_once=(1, 1, 2), lasting=True, kills_all=True),
}
