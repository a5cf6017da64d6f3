"""Exposed methods: what ``@method`` records about a function, and how its wrapper takes a turn at the actor's gate."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any, NamedTuple

from raytorchrpc._compat import ray_internals
from raytorchrpc.calls import gates
from raytorchrpc.calls.event_loops import on_loop
from raytorchrpc.calls.scope import Scope, current_scope
from raytorchrpc.errors import RayTorchRpcError

MARK = "__raytorchrpc_method__"


class Exposed(NamedTuple):
    """What ``@method`` records about a function: the function, and how it may run."""

    function: Callable[..., Any]
    concurrent: bool
    concurrency_group: str | None
    is_coroutine: bool
    share: bool
    keep: bool
    frozen: bool = False
    """For a method of the package's own: its results do not change, so they need no copy before they are sent."""
    retry: int = 0
    service: bool = False
    """For a method of the package's own: it is called with the member and the caller's rank instead of the actor, and
    may return a ``services.DeferredReply``."""
    ahead: int = 0
    """Of a generator: how many items its callers ask for ahead."""
    job: Any = None
    """The class of its jobs, if it is a special one."""


def exposed(function: Any) -> Exposed | None:
    """What ``@method`` recorded; None for a function without it."""
    note: Exposed | None = getattr(function, MARK, None)
    return note


def _gate_for(note: Exposed, instance: Any) -> gates.Gate | None:
    """The gate for a call through Ray or from another method of the actor, if it needs an admission."""
    if note.concurrent:
        return None
    group = note.concurrency_group
    if group is None:  # ray.method, applied after ours, wrote onto the wrapper
        group = ray_internals.concurrency_group_of(getattr(type(instance), note.function.__name__, None))
    gate = gates.gate_of(instance, group)
    admission = current_scope.get().admission
    # A method that calls another method of its own object is admitted already.
    return None if admission is not None and admission.taken else gate


def take_turn(note: Exposed, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    gate = _gate_for(note, instance)
    if gate is None:
        return note.function(instance, *args, **kwargs)
    scope = current_scope.get()
    admission = _enter(note, gate, scope)
    if admission is None:
        return note.function(instance, *args, **kwargs)
    before = current_scope.set(scope.inside(admission))
    try:
        return note.function(instance, *args, **kwargs)
    finally:
        current_scope.reset(before)
        gate.leave(admission)


def _enter(note: Exposed, gate: gates.Gate, scope: Scope) -> gates.Admission | None:
    """Block until admitted. None on an event loop where no admission is free.

    Waiting would block the loop that the holder needs; nothing else runs on it meanwhile anyway.
    """
    looping = on_loop()
    if not looping and gate.held(scope.path):
        raise RayTorchRpcError(
            f"{note.function.__qualname__} was called by a concurrent method, on behalf of a call whose chain is "
            f"inside this actor already and waits: it would wait for itself; make it concurrent=True as well"
        )
    return gate.enter_now() if looping else gate.enter()


def generate_in_turn(
    note: Exposed, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Generator[Any, Any, Any]:
    """As ``take_turn``, for a generator: it keeps its turn until it ends."""
    gate, scope = _gate_for(note, instance), current_scope.get()
    admission = None if gate is None else _enter(note, gate, scope)
    generator = note.function(instance, *args, **kwargs)
    if admission is None:
        return (yield from generator)
    try:
        while True:
            before = current_scope.set(scope.inside(admission))
            try:
                item = next(generator)
            except StopIteration as stop:
                return stop.value
            finally:
                current_scope.reset(before)
            yield item
    finally:
        generator.close()
        admission.gate.leave(admission)


async def generate_in_turn_on_loop(
    note: Exposed, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> AsyncGenerator[Any, None]:
    """As ``generate_in_turn``, for an async generator."""
    gate, scope = _gate_for(note, instance), current_scope.get()
    admission = None if gate is None or gate.held(scope.path) else await gate.enter_on_loop()
    generator = note.function(instance, *args, **kwargs)
    try:
        while True:
            before = current_scope.set(scope if admission is None else scope.inside(admission))
            try:
                item = await generator.__anext__()
            except StopAsyncIteration:
                return
            finally:
                current_scope.reset(before)
            yield item
    finally:
        await generator.aclose()
        if admission is not None:
            admission.gate.leave(admission)


async def take_turn_on_loop(note: Exposed, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    gate = _gate_for(note, instance)
    if gate is None:
        return await note.function(instance, *args, **kwargs)
    scope = current_scope.get()
    if gate.held(scope.path):  # it would wait for itself
        return await note.function(instance, *args, **kwargs)
    admission = await gate.enter_on_loop()
    before = current_scope.set(scope.inside(admission))
    try:
        return await note.function(instance, *args, **kwargs)
    finally:
        current_scope.reset(before)
        gate.leave(admission)
