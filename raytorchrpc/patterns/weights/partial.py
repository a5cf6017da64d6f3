"""Versions of which only some tensors are published: the others are those of the version before."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from raytorchrpc.errors import ConfigurationError
from raytorchrpc.patterns.weights.plan import PlaceInWhole
from raytorchrpc.patterns.weights.snapshots import Snapshot, TensorSpec
from raytorchrpc.patterns.weights.versions import Layout
from raytorchrpc.tensors.dtypes import DTYPE_NAMES


def complete(
    tensors: Mapping[str, torch.Tensor],
    places: Mapping[str, PlaceInWhole],
    before: tuple[Layout, Snapshot] | None,
) -> tuple[dict[str, torch.Tensor], dict[str, PlaceInWhole], frozenset[int]]:
    """Add to some tensors those of the version before.

    Returns all tensors and the places of shards, in the order of the layout, and which of them are of the version
    before. Raises ConfigurationError.
    """
    if before is None:
        raise ConfigurationError("only= takes the other tensors from the version before: publish all of them first")
    layout, snapshot = before
    known = {name: place for place, name in enumerate(layout.names)}
    for name, tensor in tensors.items():
        if name not in known:
            raise ConfigurationError(f"{name!r} is not in the version before: publish all tensors, without only=")
        place = known[name]
        now = TensorSpec(tensor.dtype, tuple(tensor.shape), tensor.device), places.get(name)
        then = layout.specs[place], layout.places[place]
        if now != then:
            raise ConfigurationError(
                f"{name!r} is {_shown(*now)}, and {_shown(*then)} in the version before: publish all tensors, without "
                f"only="
            )
    held = dict(zip(layout.names, snapshot.memory.tensors, strict=True))
    carried = frozenset(place for place, name in enumerate(layout.names) if name not in tensors)
    shards = {name: place for name, place in zip(layout.names, layout.places, strict=True) if place is not None}
    return {**held, **tensors}, shards, carried


def _shown(spec: TensorSpec, place: PlaceInWhole | None) -> str:
    shard = "" if place is None else f", at {place[1]} of {place[0]},"
    return f"{DTYPE_NAMES[spec.dtype]} {spec.shape}{shard} on {spec.device}"
