"""The names of a model's tensors: which of them a pull brings, under which other names, and what is amiss with them."""

from __future__ import annotations

import difflib
import fnmatch
import functools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from raytorchrpc.errors import ConfigurationError

#: How many mismatches an error names.
_SHOWN = 10


def check_fits(
    store: str, wrong: Sequence[str], lacking: Collection[str] = (), unpublished: Collection[str] = ()
) -> None:
    """Raise ConfigurationError for mismatches. ``lacking``: in the model; ``unpublished``: names of the model."""
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


#: The argument ``only``: a glob, or several.
Only = str | Sequence[str]
#: The argument ``mapping``: names of the model -> the published name, or those of the parts of a fused parameter, in
#: order.
Renamed = Mapping[str, str | Sequence[str]]


def globs_of(only: Only | None) -> tuple[str, ...]:
    """Return the globs of the argument ``only``; none for None, which selects all names. Raises ConfigurationError."""
    if only is None:
        return ()
    given: Any = [only] if isinstance(only, str) else only
    globs: tuple[Any, ...] = tuple(given) if isinstance(given, Iterable) else ()
    if not globs or not all(isinstance(glob, str) for glob in globs):
        raise ConfigurationError(f"only={only!r} has to be a glob such as 'lora_*', or several")
    return globs


def selects(globs: tuple[str, ...], name: str) -> bool:
    """Whether a name matches one of the globs, or there are none."""
    return not globs or _pattern(globs).match(name) is not None


@functools.lru_cache(64)
def _pattern(globs: tuple[str, ...]) -> re.Pattern[str]:
    literal = [rf"{re.escape(glob)}\Z" for glob in globs if "[" in glob]  # a name such as layers[0].weight
    return re.compile("|".join([*map(fnmatch.translate, globs), *literal]))


def selected(globs: tuple[str, ...], names: Collection[str], store: str, *, strict: bool = True) -> list[str]:
    """Return the names that match.

    Raises ConfigurationError, which names the nearest, for a glob that matches none; unless ``strict``, only if all do.
    """
    matching = [name for name in names if selects(globs, name)]
    idle = [
        glob for glob in globs if glob not in names and not any(fnmatch.fnmatchcase(name, glob) for name in matching)
    ]
    if idle and (strict or not matching):
        nearest = [name for glob in idle for name in difflib.get_close_matches(glob.strip("*"), names, 3, 0.0)]
        hint = f"; the nearest are {', '.join(map(repr, dict.fromkeys(nearest)))}" if nearest else ""
        raise ConfigurationError(
            f"only={idle} matches none of the {len(names)} names of the weights for {store!r}{hint}"
        )
    return matching


def renames(mapping: Renamed | None) -> dict[str, tuple[str, ...]]:
    """Return the parts of each name in the argument ``mapping``. Raises ConfigurationError."""
    given: Any = {} if mapping is None else mapping
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"mapping={mapping!r} has to be a dict: the published name, or names, by each name")
    renamed: dict[str, tuple[str, ...]] = {}
    for name, parts in given.items():
        listed = (parts,) if isinstance(parts, str) else tuple(parts) if isinstance(parts, Sequence) else ()
        if not listed or not all(isinstance(part, str) for part in listed):
            raise ConfigurationError(
                f"mapping={{{name!r}: {parts!r}}} has to give the published name, or a list of the names of its parts"
            )
        renamed[name] = listed
    return renamed
