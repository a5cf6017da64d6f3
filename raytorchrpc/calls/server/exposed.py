"""Exposed methods: what ``@method`` records about a function, and how methods take a turn at the actor's gate."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any, NamedTuple

from raytorchrpc._compat import ray_internals
from raytorchrpc.calls.scope import Scope, current_scope, on_loop
from raytorchrpc.calls.server import gates

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
    call: Any = None
    """The subclass of ServedCall that serves its calls, if it is a special one."""


def service(function: Callable[..., Any]) -> Exposed:
    """A method of the package's own that every member serves; see ``Exposed.service``."""
    return Exposed(function, True, None, False, False, False, frozen=True, service=True)


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
    return None if admission is not None and admission.held else gate


def take_turn(note: Exposed, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    gate = _gate_for(note, instance)
    if gate is None:
        return note.function(instance, *args, **kwargs)
    return _run_in_turn(gate, _label(note.function), note.function, (instance, *args), kwargs)


def _run_in_turn(
    gate: gates.Gate, label: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    scope = current_scope.get()
    admission = _enter(gate, label, scope)
    if admission is None:
        return function(*args, **kwargs)
    before = current_scope.set(scope.inside(admission))
    try:
        return function(*args, **kwargs)
    finally:
        current_scope.reset(before)
        admission.leave()


def _label(function: Callable[..., Any]) -> str:
    """Class.method, for messages."""
    return function.__qualname__.rpartition("<locals>.")[2]


def _enter(gate: gates.Gate, label: str, scope: Scope) -> gates.Admission | None:
    """Block until admitted. None on an event loop where no admission is free.

    Waiting would block the loop that the holder needs; nothing else runs on it meanwhile anyway.
    """
    return gate.enter_now(label) if on_loop() else gate.enter(label, scope.path)


def generate_in_turn(
    note: Exposed, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Generator[Any, Any, Any]:
    """As ``take_turn``, for a generator."""
    gate = _gate_for(note, instance)
    generator = note.function(instance, *args, **kwargs)
    if gate is None:
        return (yield from generator)
    return (yield from _steps_in_turn(gate, _label(note.function), generator))


def _steps_in_turn(gate: gates.Gate, label: str, generator: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    """Run a generator: in a monitor each step has a turn, elsewhere the generator keeps its turn until it ends."""
    scope, admission = current_scope.get(), None
    try:
        while True:
            if admission is None:
                admission = _enter(gate, label, scope)
            before = current_scope.set(scope if admission is None else scope.inside(admission))
            try:
                item = next(generator)
            except StopIteration as stop:
                return stop.value
            finally:
                current_scope.reset(before)
            if admission is not None and gate.lends:
                admission.leave()
                admission = None
            yield item
    finally:
        if admission is None:  # closed between two steps, perhaps by a finalizer, which may not wait
            admission = gate.enter_now(label)
        generator.close()
        if admission is not None:
            admission.leave()


async def generate_in_turn_on_loop(
    note: Exposed, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> AsyncGenerator[Any, None]:
    """As ``generate_in_turn``, for an async generator."""
    gate, scope = _gate_for(note, instance), current_scope.get()
    queues = gate is not None and not gate.held(scope.path)
    admission = await gate.enter_on_loop(_label(note.function)) if gate is not None and queues else None
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
            admission.leave()


async def take_turn_on_loop(note: Exposed, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    gate = _gate_for(note, instance)
    if gate is None:
        return await note.function(instance, *args, **kwargs)
    scope = current_scope.get()
    if gate.held(scope.path):  # it would wait for itself
        return await note.function(instance, *args, **kwargs)
    admission = await gate.enter_on_loop(_label(note.function))
    before = current_scope.set(scope.inside(admission))
    try:
        return await note.function(instance, *args, **kwargs)
    finally:
        current_scope.reset(before)
        admission.leave()


# --- undecorated methods ---------------------------------------------------------------------------------------------

_takes_turns = False


def take_turns(whether: bool = True) -> None:
    """Have the undecorated methods of the actor in this process take turns with the others, if it is a sync actor."""
    global _takes_turns
    _takes_turns = whether
    if whether:
        ray_internals.wrap_actor_methods(_in_turn)


def _in_turn(name: str, method: Any, executor: Callable[..., Any]) -> Callable[..., Any]:
    """What Ray is to run instead of ``executor``, which runs the method of that name."""
    is_rays = name.startswith("__ray_") and name != "__ray_call__"
    if is_rays or name == "__init__" or exposed(method) or ray_internals.concurrency_group_of(method):
        return executor
    label = "a function (__ray_call__)" if name == "__ray_call__" else _label(method)

    def run(instance: Any, *args: Any, **kwargs: Any) -> Any:
        gate = gates.gate_of(instance, None) if _takes_turns else None
        if gate is None or not gate.lends or (name == "__ray_call__" and _is_internal(args)):
            return executor(instance, *args, **kwargs)
        result = _run_in_turn(gate, label, executor, (instance, *args), kwargs)
        return _steps_in_turn(gate, label, result) if isinstance(result, Generator) else result

    return run


def _is_internal(args: tuple[Any, ...]) -> bool:
    """Whether a function is of this package, which joins groups by it, or of Ray, which moves tensors by it."""
    module = str(getattr(args[0] if args else None, "__module__", ""))
    return module.partition(".")[0] in (__name__.partition(".")[0], "ray")
