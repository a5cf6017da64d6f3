"""What a pull raises for a model that does not fit the published weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from raytorchrpc.calls.receive_into import obstacle_of
from raytorchrpc.errors import ConfigurationError
from raytorchrpc.tensors.dtypes import DTYPES

#: How many mismatches an error names.
_SHOWN = 10


def check_fits(
    store: str, wrong: Sequence[str], lacking: Collection[str] = (), unpublished: Collection[str] = ()
) -> None:
    """Raise ConfigurationError, which names up to ten mismatches and says what to do, if there are any.

    Args:
        store: the name of the store.
        wrong: the mismatches.
        lacking: the published names that the model does not have.
        unpublished: the names of the model that were not published.
    """
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        shown = "; ".join(wrong[:_SHOWN]) + more + _remedy_for_names(lacking, unpublished)
        raise ConfigurationError(f"the weights of {store!r} do not fit: {shown}")


def _remedy_for_names(lacking: Collection[str], unpublished: Collection[str]) -> str:
    if not lacking and not unpublished:
        return ""
    if part := _additional_part(unpublished, lacking):
        if all(name.startswith(part) for name in unpublished):
            return f". The model's names begin with {part!r}: pull into the module inside, such as model.{part[:-1]}"
        renamed = f"mapping={{name: name.replace({part!r}, '') for name in model.state_dict()}}"
        return f". The model's names have {part!r} inside: pull with {renamed}"
    if part := _additional_part(lacking, unpublished):
        if all(name.startswith(part) for name in lacking):
            return f". The published names begin with {part!r}: publish the module inside, such as model.{part[:-1]}"
        renamed = f"{{name.replace({part!r}, ''): tensor for name, tensor in model.state_dict().items()}}"
        return f". The published names have {part!r} inside: publish {renamed}"
    return ". mapping= gives other names, and strict=False pulls only the names that both have"


def _additional_part(longer: Collection[str], shorter: Collection[str]) -> str | None:
    """What all names of one side have, up to a dot, and the other's lack; None if they differ in another way."""
    if not longer or len(longer) != len(shorter):
        return None
    *parts, _ = next(iter(longer)).split(".")
    prefixes = [".".join(parts[: count + 1]) for count in range(len(parts))]
    for part in (f"{part}." for part in (*prefixes, *parts)):
        if {name.replace(part, "", 1) for name in longer} == set(shorter):
            return part
    return None


def dtype_mismatch(name: str, published: str, wanted: str, convert: object) -> str | None:
    """What is amiss if a tensor is published under one dtype, and the model's has another; None if it is converted."""
    floating = DTYPES[published].is_floating_point and DTYPES[wanted].is_floating_point
    if published == wanted or (convert and floating):
        return None
    remedy = "convert=True converts it" if floating else "only floating dtypes are converted"
    return f"{name!r} is {published} as published, and {wanted} in the model ({remedy})"


def shape_mismatch(name: str, published: tuple[int, ...], wanted: tuple[int, ...], is_whole: bool) -> str:
    """What is amiss: the global tensors have other shapes. ``is_whole``: the model's is no shard."""
    may_be_part = len(published) == len(wanted) and all(
        its <= most for its, most in zip(wanted, published, strict=True)
    )
    remedy = " (for a part of it, pull a Shard or a DTensor)" if is_whole and may_be_part else ""
    return f"{name!r} is {published} as published, and {wanted} in the model{remedy}"


def tied_mismatch(names: tuple[str, str], parts: Sequence[str], what: str = "but differ as published") -> str:
    """What is amiss if two names of one tensor are published apart. ``parts``: what the first one is made of."""
    one, other = names
    remedy = f"mapping={{{other!r}: {(parts[0] if len(parts) == 1 else list(parts))!r}}} and strict=False"
    return (
        f"{one!r} and {other!r} are one tensor in the model, {what}: give each a tensor of its own, or pull one into "
        f"both with {remedy}"
    )


def check_writable(store: str, targets: Mapping[str, torch.Tensor]) -> None:
    """Raise ConfigurationError, which names it, for a tensor that nothing can be received into."""
    for name, tensor in targets.items():
        if (obstacle := obstacle_of(tensor)) is not None:
            raise ConfigurationError(f"{name!r} of the weights for {store!r} {obstacle}")
