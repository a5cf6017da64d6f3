"""Who is the home of what, and who does what with it, drawn from a seed; as JSON on its way to the members."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from tests.faults.pattern_records import SHAPES

Kind = Literal["queue", "topic", "weights"]


class Object(NamedTuple):
    """A queue, a topic or a store of weights. The home makes it again, under this name, when it was restarted."""

    kind: Kind
    name: str
    home: str
    shape: str = ""
    """Of weights: see ``pattern_records.layout``."""
    track: bool = False
    scale: int = 1


class Role(NamedTuple):
    """What one thread of a member does until the round ends."""

    member: str
    number: int
    """In the plan."""
    does: Literal["produce", "consume", "publish", "subscribe", "read", "call"]
    object: str
    how: str = ""
    handed: bool = False
    """Its handles come from the home, in an answer; else it makes them itself."""


class Plan(NamedTuple):
    """Of one round."""

    number: int
    objects: list[Object]
    roles: list[Role]

    @staticmethod
    def of(given: Sequence[Any]) -> Plan:
        """Out of JSON."""
        number, objects, roles = given
        return Plan(number, [Object(*one) for one in objects], [Role(*one) for one in roles])

    def home_of(self, name: str) -> str:
        """Of an object."""
        return next(one.home for one in self.objects if one.name == name)


#: How items are taken: one by one, in batches, by iterations of both kinds, by coroutines.
CONSUME = ("get", "get_many", "items", "items 8", "aget", "async for", "cancel")
PUT = ("put", "put_many", "aput", "gathered")
POLICIES = ("block", "block items", "drop_oldest", "latest")
#: How weights are pulled.
READ = ("pull", "since", "since short", "apull")


def random_plan(seed: int, number: int, names: Sequence[str], homes: Sequence[str], scale: int = 1) -> Plan:
    """A queue with one consumer, one with several, a topic and two stores, among these members. The same for one seed.

    ``number``: of the round; the stores are the same in all rounds. ``homes``: who may be one. ``scale``: of the
    weights.
    """
    draw = random.Random(seed)
    objects = [
        Object("weights", "plain", draw.choice(homes), draw.choice(SHAPES), False, scale),
        Object("weights", "tracked", draw.choice(homes), draw.choice(SHAPES), True, scale),
    ]
    draw = random.Random(f"{seed} {number}")
    objects += [
        Object("queue", f"alone-{number}", draw.choice(homes)),
        Object("queue", f"shared-{number}", draw.choice(homes)),
        Object("topic", f"topic-{number}", draw.choice(homes)),
    ]
    roles: list[Role] = []

    def add(members: Sequence[str], does: Any, object: Object, hows: Sequence[str]) -> None:
        for member, how in zip(members, hows, strict=True):
            handed = member != object.home and draw.random() < 0.4
            roles.append(Role(member, len(roles), does, object.name, how, handed))

    plain, tracked, alone, shared, topic = objects
    add(draw.sample(names, 2), "produce", alone, draw.choices(PUT, k=2))
    add(draw.sample(names, 1), "consume", alone, [draw.choice(CONSUME)])
    add(draw.sample(names, 2), "produce", shared, draw.choices(PUT, k=2))
    add(draw.sample(names, 2), "consume", shared, draw.sample(CONSUME, 2))
    add(draw.sample(names, 1), "publish", topic, [""])
    add(draw.sample(names, 3), "subscribe", topic, ["block", *draw.sample(POLICIES[1:], 2)])
    add([name for name in names if name != plain.home][:2], "read", plain, draw.sample(READ, 2))
    add([name for name in names if name != tracked.home][-2:], "read", tracked, ["since", draw.choice(READ)])
    for place, name in enumerate(names):
        roles.append(Role(name, len(roles), "call", names[place - 1]))
    return Plan(number, objects, roles)
