"""The table of lanes: what each one carries, when a route may use it, and how a member makes it.

Importing this module loads no lane, and neither torch nor Ray: a row names its functions as ``"module:function"``, and
``resolve`` loads them when a route is planned or a lane is made. Other distributions add lanes through entry points of
the group ``raytorchrpc.lanes``; see docs/howto/write-a-lane.md.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import pkgutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from raytorchrpc.errors import ConfigurationError

logger = logging.getLogger(__name__)

#: Entry points of this group add lanes: ``name = "package.module:LANE"``.
ENTRY_POINTS = "raytorchrpc.lanes"

Traffic = Literal["calls", "cpu", "cuda"]
TRAFFIC: tuple[Traffic, ...] = ("calls", "cpu", "cuda")
TRAFFIC_TEXT = {"calls": "calls", "cpu": "CPU tensors", "cuda": "CUDA tensors"}


@dataclass(frozen=True)
class Lane:
    """One row of the table."""

    name: str
    carries: tuple[Traffic, ...]
    """Kinds of traffic it carries between two members. Empty for the lane from a member to itself."""
    rule: str
    """``"module:function"``: decides for one pair of members whether the lane can carry one kind of traffic. A pure
    function ``(rules.Pair, Traffic) -> rules.Verdict``; its module imports neither torch nor Ray."""
    make: str
    """``"module:function"``: makes one member's lane, not open yet: ``(LaneSetup) -> MessageLane | TensorLane``."""
    out_of_band: bool = False
    """A TensorLane: its tensors travel out of band, and their descriptors in the messages of the lane that carries the
    calls. Otherwise a MessageLane: where that carries the calls, tensors that no other lane takes stay in its
    messages."""
    carries_descriptors: bool = False
    """A MessageLane whose messages carry such descriptors (``Message.manifests``)."""
    always: bool = False
    """Each member opens it. Otherwise a member opens it only if one of its routes uses it."""
    rrefs: bool = False
    """Runs on the process's torchrpc agent, and carries torch RRefs and what distributed autograd follows. Where
    another lane carries the calls, it carries tensors out of band."""
    shares_memory: bool = False
    """Between members on one GPU, ``share=True`` gives the receiver the sender's memory itself."""


_RULES = "raytorchrpc.lanes.rules"


def _row(name: str, carries: tuple[Traffic, ...], **properties: bool) -> Lane:
    return Lane(name, carries, f"{_RULES}:{name}_rule", f"raytorchrpc.lanes.{name}.lane:make", **properties)


#: The lanes of this package, in the order in which routing prefers them for each kind of traffic they carry.
LANES: tuple[Lane, ...] = (
    _row("loopback", (), always=True),
    _row("socket", ("calls", "cpu", "cuda"), always=True, carries_descriptors=True),
    _row("shm", ("cpu",), out_of_band=True),
    _row("cuda_ipc", ("cuda",), out_of_band=True, shares_memory=True),
    _row("nixl", ("cpu", "cuda"), out_of_band=True),
    _row("nccl", ("cuda",), out_of_band=True),
    _row("torchrpc", ("calls", "cpu", "cuda"), always=True, rrefs=True),
    _row("nng", ("calls", "cpu", "cuda"), carries_descriptors=True),
)
_BUILT_IN = {lane.name: lane for lane in LANES}

#: The lane from a member to itself, and the one that carries RRefs.
LOOPBACK = next(lane.name for lane in LANES if not lane.carries)
TORCHRPC = next(lane.name for lane in LANES if lane.rrefs)
#: The message lane that joins all members, whatever their routes are.
CONTROL = next(lane.name for lane in LANES if lane.always and lane.carries_descriptors)


def names() -> tuple[str, ...]:
    """The names that ``GroupConfig.lanes`` may hold. Reads the metadata of installed distributions, loads no lane."""
    return (*(lane.name for lane in LANES if lane.carries), *_installed())


def is_known(name: str) -> bool:
    """Whether ``GroupConfig.lanes`` may name it. Reads no metadata for a lane of this package."""
    return bool(_BUILT_IN[name].carries) if name in _BUILT_IN else name in _installed()


def foreign(names: Iterable[str] | None) -> tuple[str, ...]:
    """Of the entries of ``GroupConfig.lanes``, the lanes of other distributions that it asks for, in its order."""
    return tuple(name for name in names or () if not name.startswith("-") and name not in _BUILT_IN)


def rows(asked_for: Iterable[str] | None) -> tuple[Lane, ...]:
    """The rows that a route may be built from, in order of preference; ``asked_for``: ``GroupConfig.lanes``.

    Lanes of other distributions are used only where they are asked for by name, and then come first, in that order.
    Raises ConfigurationError, which names the distribution, if one of them cannot be loaded.
    """
    return (*(lane(name) for name in foreign(asked_for)), *(each for each in LANES if each.carries))


def lane(name: str) -> Lane:
    """The row of that name. Raises ConfigurationError if there is none, or its distribution is broken."""
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    points = _installed().get(name, ())
    if not points:
        raise ConfigurationError(
            f"no distribution installed in this process has a lane {name!r}; known lanes: {', '.join(names())}"
        )
    if len(points) > 1:
        several = " and ".join(_described(point) for point in points)
        raise ConfigurationError(f"{several} each declare a lane {name!r}; uninstall all but one")
    return _load(points[0])


def resolve(row: Lane, reference: str) -> Callable[..., Any]:
    """The function that a row names; imports its module. Raises ConfigurationError if that fails."""
    try:
        return _resolved(reference)
    except Exception as error:
        source = "" if row.name in _BUILT_IN else f" of {_described(_installed()[row.name][0])}"
        raise ConfigurationError(f"lane {row.name!r}{source}: {reference!r} cannot be imported: {error!r}") from error


@functools.cache
def _resolved(reference: str) -> Callable[..., Any]:
    function: Callable[..., Any] = pkgutil.resolve_name(reference)
    return function


def distributions(lanes: Sequence[str]) -> dict[str, str]:
    """By name, which distribution of this process has that lane, with its version; names without one are left out."""
    installed = _installed() if lanes else {}
    return {name: _described(installed[name][0]) for name in lanes if name in installed}


_Points = Mapping[str, tuple[importlib.metadata.EntryPoint, ...]]


def _installed() -> _Points:
    """The lanes that other distributions declare, by name."""
    return _declared_on(tuple(sys.path))


@functools.lru_cache(maxsize=4)
def _declared_on(path: tuple[str, ...]) -> _Points:
    """Scans the metadata of all distributions: tens of milliseconds."""
    points: dict[str, tuple[importlib.metadata.EntryPoint, ...]] = {}
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        if point.name in _BUILT_IN:
            logger.warning("%s declares a lane %r; raytorchrpc's own is used", _described(point), point.name)
        else:
            points[point.name] = (*points.get(point.name, ()), point)
    return points


def _described(point: importlib.metadata.EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else point.value


def _load(point: importlib.metadata.EntryPoint) -> Lane:
    where = f"lane {point.name!r} of {_described(point)} (entry point {point.value!r})"
    try:
        row = point.load()
    except Exception as error:
        raise ConfigurationError(f"{where} cannot be loaded: {error!r}") from error
    if not isinstance(row, Lane):
        raise ConfigurationError(f"{where} is of type {type(row).__name__}, not raytorchrpc.lanes.registry.Lane")
    if row.name != point.name:
        raise ConfigurationError(f"{where} has the name {row.name!r} in its row; the two names must be the same")
    if not row.carries or not set(row.carries) <= set(TRAFFIC):
        raise ConfigurationError(f"{where} has carries={row.carries!r}; expected some of {TRAFFIC}")
    if row.always or row.rrefs:
        raise ConfigurationError(f"{where} sets always or rrefs, which only raytorchrpc's own lanes may set")
    return row
