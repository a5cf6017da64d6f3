"""A member as the home of queues, topics and weight stores: how it creates them, and serves requests to them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from raytorchrpc.calls.member import LocalMember
from raytorchrpc.calls.server.exposed import Exposed
from raytorchrpc.calls.server.services import builtin_services
from raytorchrpc.errors import ConfigurationError

#: Creates an object at its home: (member, name, settings) -> the object.
Factory = Callable[[LocalMember, str, Any], Any]

#: How a home creates objects, by kind. They are ``Served``, and keep their ``settings``.
factories: dict[str, Factory] = {}
#: The arguments that make up the settings, by kind and in order, for messages.
setting_names: dict[str, tuple[str, ...]] = {}
#: Services of every member.
OPEN, FIND = "raytorchrpc.open", "raytorchrpc.find"


def register_service(name: str, function: Callable[..., Any]) -> None:
    """Have every member serve ``function(member, caller's rank, *args)`` to its peers; see ``Exposed.service``."""
    builtin_services[name] = Exposed(function, True, None, False, False, False, frozen=True, service=True)


def register_methods(methods: Mapping[str, Callable[..., Any]]) -> None:
    """Have every member serve ``function(object, caller's rank, *args)``, by name, for requests to an object's address.

    A request to an object that the member does not have raises NotFound.
    """
    for name, function in methods.items():
        register_service(name, _of_object(function))


def _of_object(function: Callable[..., Any]) -> Callable[..., Any]:
    def serve(local: LocalMember, caller: int, kind: str, of: str, instance_id: int | None, *args: Any) -> Any:
        return function(local.services.find(kind, of, instance_id, local.me.name), caller, *args)

    return serve


def _open(local: LocalMember, caller: int, kind: str, name: str, settings: Any) -> int:
    """Return the instance id of the object, which is created if there is none."""
    opened = local.services.open(kind, name, partial(factories[kind], local, name, settings))
    if opened.settings != settings:
        raise ConfigurationError(
            f"member {local.me.name!r} has a {kind} {name!r} with {_differences(kind, opened.settings, settings)}; "
            f"give the same settings, or get a handle with find({name!r})"
        )
    return int(opened.instance_id)


def _differences(kind: str, existing: Any, asked: Any) -> str:
    """The settings that differ, as ``maxsize=2, not maxsize=5``."""
    pairs = itertools.zip_longest(setting_names[kind], existing, asked)
    return " and ".join(f"{name}={there!r}, not {name}={wanted!r}" for name, there, wanted in pairs if there != wanted)


def find(local: LocalMember, caller: int, kind: str, name: str) -> tuple[Any, int] | None:
    found = local.services.get(kind, name)
    return None if found is None else (found.settings, found.instance_id)


register_service(OPEN, _open)
register_service(FIND, find)
