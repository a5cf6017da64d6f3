"""The oldest Ray and torch that this package runs with, and the features that need newer ones.

This is the only list of them: what implements a feature calls ``require``, and the doctor shows ``missing``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

from raytorchrpc.errors import ConfigurationError

Package = Literal["Ray", "torch"]

#: As in pyproject.toml.
OLDEST: Mapping[Package, str] = {"Ray": "2.48", "torch": "2.7"}


class Feature(NamedTuple):
    """A feature that the oldest releases lack."""

    name: str
    package: Package
    since: str
    otherwise: str
    """What to do without it."""


FEATURES: Mapping[str, Feature] = {
    "objectrefs": Feature(
        "moving tensors of ObjectRefs over a group's lanes (objectref=True, raytorchrpc.rdt)",
        *("Ray", "2.59", "let the members call each other directly"),
    ),
    "token": Feature("Ray's token authentication", "Ray", "2.52", "keep Ray's ports in a private network"),
    "lazy gloo": Feature(
        "process groups over gloo that connect two members when they first exchange something, instead of all pairs",
        *("torch", "2.8", "keep process groups small"),
    ),
    "uneven strided shards": Feature(
        "weights that FSDP and tensor parallelism divide along one dimension into shards of different sizes",
        *("torch", "2.8", "choose sizes that the number of shards divides"),
    ),
}


def is_older(version: str, than: str) -> bool:
    """Whether a release is older. A version without numbers is a development build, which is not."""
    numbers = re.match(r"\d+(\.\d+)*", version)  # what follows, as of a pre-release, does not count
    return numbers is not None and tuple(map(int, numbers[0].split("."))) < tuple(map(int, than.split(".")))


def missing(package: Package, version: str) -> list[Feature]:
    """The features that this release of a package lacks."""
    return [each for each in FEATURES.values() if each.package == package and is_older(version, each.since)]


def obstacle(feature: str, version: str) -> str | None:
    """What keeps this release of Ray or torch from having a feature, and what to do; None if it has it."""
    name, package, since, otherwise = FEATURES[feature]
    if not is_older(version, since):
        return None
    return f"{name} needs {package} {since} or later, and here is {version}: upgrade {package}, or {otherwise}"


def require(feature: str, version: str) -> None:
    """Raise ConfigurationError if this release of Ray or torch lacks a feature."""
    if (missed := obstacle(feature, version)) is not None:
        raise ConfigurationError(missed)
