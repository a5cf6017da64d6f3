"""A member as the home of queues, topics and weight stores: how it creates them, and serves requests to them."""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from raytorchrpc.calls.member import LocalMember
from raytorchrpc.calls.server.exposed import Exposed, service
from raytorchrpc.errors import ConfigurationError

#: The modules of this package that define services of every member (``SERVICES``) and kinds of objects (``KINDS``).
_DEFINED_IN = ("queues.services", "regions.region", "weights.feeds", "weights.published", "weights.publishers")
OPEN, FIND, DELETE = "raytorchrpc.open", "raytorchrpc.find", "raytorchrpc.delete"


class Kind(NamedTuple):
    """How a home creates objects of one kind. They are ``Served``, and keep their ``settings``."""

    create: Callable[[LocalMember, str, Any], Any]
    """(member, name, settings) -> the object."""
    setting_names: tuple[str, ...]
    """The arguments that make up the settings, in order, for messages."""


def services() -> dict[str, Exposed]:
    """The services for objects that every member offers to its peers: by name, ``function(member, rank, *args)``."""
    return {OPEN: service(_open), FIND: service(find), DELETE: service(_delete), **_definitions("SERVICES")}


def object_services(methods: Mapping[str, Callable[..., Any]]) -> dict[str, Exposed]:
    """Services that call ``function(object, caller's rank, *args)``; they raise NotFound without the object."""
    return {name: service(_of_object(function)) for name, function in methods.items()}


def _of_object(function: Callable[..., Any]) -> Callable[..., Any]:
    def serve(local: LocalMember, caller: int, kind: str, of: str, instance_id: int | None, *args: Any) -> Any:
        return function(local.services.find(kind, of, instance_id, local.me.name), caller, *args)

    return serve


@functools.cache
def _definitions(table: str) -> dict[str, Any]:
    modules = [importlib.import_module(f"{__package__}.{name}") for name in _DEFINED_IN]
    return {name: defined for module in modules for name, defined in getattr(module, table, {}).items()}


def _open(local: LocalMember, caller: int, kind: str, name: str, settings: Any) -> int:
    """Return the instance id of the object, which is created if there is none."""
    create, setting_names = _definitions("KINDS")[kind]
    opened = local.services.open(kind, name, partial(create, local, name, settings))
    if opened.settings != settings:
        pairs = itertools.zip_longest(setting_names, opened.settings, settings)
        differences = (f"{name}={there!r}, not {name}={asked!r}" for name, there, asked in pairs if there != asked)
        raise ConfigurationError(
            f"member {local.me.name!r} has a {kind} {name!r} with {' and '.join(differences)}; "
            f"give the same settings, or get a handle with find({name!r})"
        )
    return int(opened.instance_id)


def find(local: LocalMember, caller: int, kind: str, name: str) -> tuple[Any, int] | None:
    """The settings and instance id of an object; None if this member does not have it."""
    entry = local.services.get(kind, name)
    return None if entry is None else (entry.settings, entry.instance_id)


def _delete(local: LocalMember, caller: int, kind: str, name: str, instance_id: int | None) -> None:
    local.services.delete(kind, name, instance_id, local.me.name)
