"""Tensors that are one under several names, as tied parameters are: what goes into one has to be equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch

from raytorchrpc.patterns.weights.mismatch import check_fits, tied_mismatch
from raytorchrpc.patterns.weights.plan import Move, Request, Row

T = TypeVar("T")


class Tie(NamedTuple):
    """Two published tensors that go into one tensor of a model."""

    places: tuple[int, int]
    """In the publisher's layout."""
    names: tuple[str, str]
    """In the model."""
    parts: Sequence[str]
    """What the first name is made of, by published names."""


def ties_of(tensors: Mapping[T, torch.Tensor]) -> list[tuple[T, T]]:
    """Return each further name of a tensor with its first one. Empty tensors are not compared."""
    addresses = list(map(torch.Tensor.data_ptr, tensors.values()))
    if len(set(addresses)) == len(addresses):
        return []
    known: dict[object, T] = {}
    found: list[tuple[T, T]] = []
    for (name, tensor), address in zip(tensors.items(), addresses, strict=True):
        if tensor.numel():
            memory = address, tensor.get_device(), tensor.dtype, tensor.shape, tensor.stride()
            if (first := known.setdefault(memory, name)) != name:
                found.append((first, name))
    return found


def ties_of_plan(
    request: Request, layouts: Sequence[Sequence[Row]], moves: Sequence[Sequence[Move]]
) -> list[list[Tie]]:
    """Return, for each publisher, the pairs of its tensors that go into one tensor of the model.

    Raises ConfigurationError if one of a pair comes from a publisher that does not have the same shard of the other.
    """
    found: list[list[Tie]] = [[] for _ in layouts]
    tied = ties_of({name: shard.tensor for name, shard in request.targets.items()})
    brought = {move.target for its in moves for move in its} if tied else set()
    wrong: list[str] = []
    for names in tied:
        parts, others = (request.options.mapping.get(name, (name,)) for name in names)
        if parts == others or not brought.issuperset(names):
            continue
        (_, *place), (_, *other_place) = (request.targets[name] for name in names)
        ties = [_ties_at(rows, its, names, parts, others) for rows, its in zip(layouts, moves, strict=True)]
        for its, more in zip(found, ties, strict=True):
            its += more or ()
        if None in ties or len(parts) != len(others) or place != other_place:
            wrong.append(tied_mismatch(names, parts, "and no publisher can compare what is published for them"))
    check_fits(request.store, wrong)
    return found


def _ties_at(
    rows: Sequence[Row], moves: Sequence[Move], names: tuple[str, str], parts: Sequence[str], others: Sequence[str]
) -> list[Tie] | None:
    """The pairs at one publisher; None if it has only one of a pair."""
    places = {name: place for place, (name, *_) in enumerate(rows)}
    brought = {move.place for move in moves if move.target in names}
    found: list[Tie] = []
    for part, other in zip(parts, others, strict=False):
        one, two = places.get(part, -1), places.get(other, -1)
        if one in brought or two in brought:
            if min(one, two) < 0 or rows[one][3] != rows[two][3]:
                return None
            found.append(Tie((one, two), names, parts))
    return found
