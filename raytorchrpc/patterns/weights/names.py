"""Names of tensors: those that ``only=`` selects, and those that ``mapping=`` replaces."""

from __future__ import annotations

import difflib
import fnmatch
import functools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from raytorchrpc.errors import ConfigurationError

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
    return re.compile("|".join(map(fnmatch.translate, globs)))


def selected(globs: tuple[str, ...], names: Collection[str], store: str, may_be_none: bool = False) -> list[str]:
    """Return the names that match. Raises ConfigurationError, which names the nearest, if there are none."""
    found = [name for name in names if selects(globs, name)]
    if not found and not may_be_none:
        nearest = [near for glob in globs for near in difflib.get_close_matches(glob.strip("*"), names, 3, 0.0)]
        hint = f"; the nearest are {', '.join(map(repr, dict.fromkeys(nearest)))}" if nearest else ""
        raise ConfigurationError(
            f"only={list(globs)} matches none of the {len(names)} names of the weights for {store!r}{hint}"
        )
    return found


def renames(mapping: Renamed | None) -> dict[str, tuple[str, ...]]:
    """Return the parts of each name in the argument ``mapping``. Raises ConfigurationError."""
    given: Any = {} if mapping is None else mapping
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"mapping={mapping!r} has to be a dict: the published name, or names, by each name")
    found: dict[str, tuple[str, ...]] = {}
    for name, parts in given.items():
        listed = (parts,) if isinstance(parts, str) else tuple(parts) if isinstance(parts, Sequence) else ()
        if not listed or not all(isinstance(part, str) for part in listed):
            raise ConfigurationError(
                f"mapping={{{name!r}: {parts!r}}} has to give the published name, or a list of the names of its parts"
            )
        found[name] = listed
    return found
