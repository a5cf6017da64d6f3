"""Exposed methods: what ``@method`` records about a function, and how methods take a turn at the actor's gates."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Generator
from types import CellType
from typing import Any, NamedTuple

from raytorchrpc._compat import ray_internals
from raytorchrpc.calls.scope import HELD, current_scope, on_loop, token_of_threads
from raytorchrpc.calls.server.gates import Admission, Gate
from raytorchrpc.errors import ConfigurationError
from raytorchrpc.process.locks import Lock
from raytorchrpc.tensors import thread_modes

MARK = "__raytorchrpc_method__"


class Exposed(NamedTuple):
    """What ``@method`` records about a function: the function, and how it may run."""

    function: Callable[..., Any]
    concurrent: bool = False
    concurrency_group: str | None = None
    max_concurrency: int | None = None
    """The width of its concurrency group, if the method declares it; see ``gate_of``."""
    is_coroutine: bool = False
    share: bool = False
    keep: bool = False
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
    wrapper: Any = None
    """What ``@method`` returned. A class that has something else in its place has decorators above it."""

    def of(self, attribute: Any) -> Exposed:
        """The same for the attribute of a class that leads to this: a call runs the attribute."""
        if attribute is self.wrapper:
            return self
        function = attribute if inspect.isfunction(attribute) else _bound(attribute)
        return self._replace(function=function, is_coroutine=runs_on_loop(attribute))


def _bound(attribute: Any) -> Callable[..., Any]:
    """A class's attribute that is no function (``functools.cache``), as a function of the instance."""

    def call(instance: Any, *args: Any, **kwargs: Any) -> Any:
        return attribute.__get__(instance, type(instance))(*args, **kwargs)

    return functools.update_wrapper(call, attribute, updated=())


def runs_on_loop(function: Any) -> bool:
    """Whether a function's calls run on an event loop."""
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


def service(function: Callable[..., Any]) -> Exposed:
    """A method of the package's own that every member serves; see ``Exposed.service``."""
    return Exposed(function, concurrent=True, frozen=True, service=True)


def exposed(function: Any) -> Exposed | None:
    """What ``@method`` recorded; None for a function without it."""
    note: Exposed | None = getattr(function, MARK, None)
    return note


def methods_of(instance: Any) -> dict[str, Exposed]:
    """The methods of an actor that ``rtr.method`` exposes, by name; none of None, which is a driver."""
    attributes: dict[str, Any] = {}
    for cls in reversed(type(instance).__mro__ if instance is not None else ()):
        attributes.update(vars(cls))  # getattr would run the class's own descriptors
    methods = {}
    for name in sorted(attributes):
        function = attributes[name]
        note = exposed(function)
        if note is not None:
            # ray.method may have been applied after rtr.method: then its wrapper has the concurrency group.
            group = note.concurrency_group or ray_internals.concurrency_group_of(function)
            if group is None and note.max_concurrency is not None:
                raise ConfigurationError(
                    f"{_label(note.function)} declares max_concurrency={note.max_concurrency} to @raytorchrpc.method, "
                    f"which is for concurrency groups: put @ray.method(concurrency_group=...) on it as well, or give "
                    f"the actor that max_concurrency"
                )
            methods[name] = note.of(ray_internals.untraced(function))._replace(concurrency_group=group)
    return methods


def is_hidden(function: Any) -> bool:
    """Whether a decorator above ``@method`` hides what that recorded."""
    cells = getattr(ray_internals.untraced(function), "__closure__", None) or ()
    return any(exposed(cell.cell_contents) for cell in cells if cell != CellType())


# --- the gates of the actor in this process --------------------------------------------------------------------------

_actor: Any = None
_served: dict[int, tuple[Any, set[str]]] = {}
"""By id, what a process that has joined groups by itself serves in place of an actor, and in which groups."""
_gates: dict[tuple[int, str | None], Gate] = {}
"""By the id of what is served, 0 for the actor, and by concurrency group."""
_gates_lock = Lock()


def gate_of(instance: Any, group: str | None) -> Gate | None:
    """The gate of the methods of this process's actor, or of what ``serve`` was given, in Ray concurrency group
    ``group``; None for any other object.

    Each group has a gate of its own. That of a named group is as wide as its methods declare: Ray does not report the
    group's width to the actor's process.
    """
    global _actor
    served = id(instance) if id(instance) in _served else 0
    if not served and instance is not _actor:
        if instance is None or ray_internals.actor_instance() is not instance:
            return None
        with _gates_lock:
            _actor = instance
            _drop(0)
    gate = _gates.get((served, group))
    if gate is None:
        made = _named_gate(instance, group) if group is not None else _default_gate(bool(served))
        with _gates_lock:
            gate = _gates.setdefault((served, group), made)
    return gate


def _default_gate(served: bool) -> Gate:
    width = 1 if served else ray_internals.actor_max_concurrency()
    lends = width == 1 and (served or not ray_internals.actor_is_async())
    return Gate(width, lends=lends, token=token_of_threads() if lends else "")


def _named_gate(instance: Any, group: str) -> Gate:
    declared = [note.max_concurrency for note in methods_of(instance).values() if note.concurrency_group == group]
    return Gate(max((width for width in declared if width is not None), default=1), named=group)


def serve(instance: Any, generation: str) -> None:
    """In this group other members call the methods of this object, one at a time, unless it is the actor here."""
    if instance is not None and ray_internals.actor_instance() is not instance:
        with _gates_lock:
            _served.setdefault(id(instance), (instance, set()))[1].add(generation)


def serve_no_more(generation: str) -> None:
    """This process has left that group. Idempotent."""
    with _gates_lock:
        for key, (_, generations) in [*_served.items()]:
            generations.discard(generation)
            if not generations:
                del _served[key]
                _drop(key)


def _drop(served: int) -> None:
    for key in [key for key in _gates if key[0] == served]:
        del _gates[key]


# --- turns -----------------------------------------------------------------------------------------------------------


class _Turn:
    """A turn of one method at its actor's gate, if it needs one. ``with turn:`` runs a step of the method inside."""

    def __init__(self, gate: Gate | None, label: str) -> None:
        self._gate, self._label, self._scope = gate, label, current_scope.get()
        self._admission: Admission | None = None

    @classmethod
    def of(cls, note: Exposed, instance: Any) -> _Turn:
        """That of a call through Ray or from another method of the actor."""
        group, admission = note.concurrency_group, current_scope.get().admission
        if note.concurrent or (admission is not None and admission.state is HELD):
            return cls(None, "")  # a method that calls another method of its own object is admitted already
        attribute = ray_internals.untraced(getattr(type(instance), note.function.__name__, None))
        inner = exposed(attribute)
        if inner is not None and inner.function is note.function and inner.wrapper is not attribute:
            return cls(None, "")  # the decorators above run in the turn of the call, perhaps this on another thread
        if group is None:  # ray.method, applied after ours, wrote onto the wrapper
            group = ray_internals.concurrency_group_of(attribute)
        return cls(gate_of(instance, group), _label(note.function))

    @property
    def is_needed(self) -> bool:
        return self._gate is not None

    def enter(self) -> None:
        """Block until admitted.

        On an event loop it goes on without an admission if none is free. Waiting would block the loop that the holder
        needs; nothing else runs on it meanwhile anyway.
        """
        if on_loop():
            self.enter_now()
        elif self._gate is not None and self._admission is None:
            self._admission = self._gate.enter(self._label, self._scope.path)

    def enter_now(self) -> None:
        """Take an admission if one is free."""
        if self._gate is not None and self._admission is None:
            self._admission = self._gate.enter_now(self._label)

    async def enter_on_loop(self) -> None:
        """As ``enter``, from a coroutine."""
        if self._gate is not None and not self._gate.held(self._scope.path):  # else it would wait for itself
            self._admission = await self._gate.enter_on_loop(self._label)

    def __enter__(self) -> None:
        admission = self._admission
        self._before = current_scope.set(self._scope if admission is None else self._scope.inside(admission))

    def __exit__(self, *_: object) -> None:
        current_scope.reset(self._before)

    def pause(self) -> None:
        """Between two steps: a monitor lets others run."""
        if self._gate is not None and self._gate.lends:
            self.leave()

    def leave(self) -> None:
        admission, self._admission = self._admission, None
        if admission is not None:
            admission.leave()


def _label(function: Callable[..., Any]) -> str:
    """Class.method, for messages."""
    return function.__qualname__.rpartition("<locals>.")[2]


def in_turn(note: Exposed, prepare: Callable[[], object] = lambda: None) -> Callable[..., Any]:
    """The method as Ray and the actor's other methods call it: it takes a turn at the actor's gate.

    ``prepare`` is called before and after it, unless it is a generator.
    """
    function, wrapper = note.function, None
    if inspect.isasyncgenfunction(function):

        async def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            turn, generator = _Turn.of(note, self), function(self, *args, **kwargs)
            await turn.enter_on_loop()
            try:
                while True:
                    with turn:
                        try:
                            item = await generator.__anext__()
                        except StopAsyncIteration:
                            return
                    yield item
            finally:
                await generator.aclose()
                turn.leave()

    elif inspect.isgeneratorfunction(function):

        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            return (yield from _steps(_Turn.of(note, self), function(self, *args, **kwargs)))

    elif inspect.iscoroutinefunction(function):

        async def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            prepare()
            turn = _Turn.of(note, self)
            await turn.enter_on_loop()
            try:
                with turn:
                    return await function(self, *args, **kwargs)
            finally:
                turn.leave()
                prepare()

    else:

        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            prepare()
            try:
                return _run(_Turn.of(note, self), function, (self, *args), kwargs)
            finally:
                prepare()

    return functools.wraps(function)(wrapper)


def _run(turn: _Turn, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    turn.enter()
    try:
        with turn:
            return function(*args, **kwargs)
    finally:
        turn.leave()


def _steps(turn: _Turn, generator: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    """Run a generator: in a monitor each step has a turn, elsewhere the generator keeps its turn until it ends."""
    if not turn.is_needed:
        return (yield from generator)
    try:
        while True:
            turn.enter()
            with turn:
                try:
                    item = next(generator)
                except StopIteration as stop:
                    return stop.value
            turn.pause()
            yield item
    finally:
        turn.enter_now()  # closed between two steps, perhaps by a finalizer, which may not wait
        generator.close()
        turn.leave()


# --- undecorated methods ---------------------------------------------------------------------------------------------

_takes_turns = False


def take_turns(whether: bool = True) -> None:
    """Have the undecorated methods of the actor in this process take turns with the others, if it is a sync actor."""
    global _takes_turns
    _takes_turns = whether
    if whether:
        ray_internals.wrap_actor_methods(_as_ray_runs_it)


def note_modes(instance: Any) -> None:
    """Direct calls of a sync actor run in the modes of torch that Ray's thread has between two methods: this thread."""
    gate = gate_of(instance, None)
    if gate is not None and gate.lends and threading.current_thread() is threading.main_thread():
        thread_modes.note()


def _as_ray_runs_it(name: str, method: Any, executor: Callable[..., Any]) -> Callable[..., Any]:
    """What Ray is to run instead of ``executor``, which runs the method of that name."""
    if name.startswith("__ray_") and name != "__ray_call__":
        return executor
    in_its_turn = _with_turn(name, method, executor)

    def run(instance: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return in_its_turn(instance, *args, **kwargs)
        finally:
            note_modes(instance)

    return run


def _with_turn(name: str, method: Any, executor: Callable[..., Any]) -> Callable[..., Any]:
    note = exposed(method)
    if note is not None and ray_internals.untraced(method) is not note.wrapper:
        # Decorators above @method run in its turn, as in a direct call: one that takes a lock would deadlock otherwise.
        return in_turn(note.of(method))
    if name == "__init__" or note is not None or ray_internals.concurrency_group_of(method):
        return executor
    label = "a function (__ray_call__)" if name == "__ray_call__" else _label(method)

    def run(instance: Any, *args: Any, **kwargs: Any) -> Any:
        gate = gate_of(instance, None) if _takes_turns else None
        if gate is None or not gate.lends or (name == "__ray_call__" and _is_internal(args)):
            return executor(instance, *args, **kwargs)
        result = _run(_Turn(gate, label), executor, (instance, *args), kwargs)
        return _steps(_Turn(gate, label), result) if isinstance(result, Generator) else result

    return run


def _is_internal(args: tuple[Any, ...]) -> bool:
    """Whether a function is of this package, which joins groups by it, or of Ray, which moves tensors by it."""
    module = str(getattr(args[0] if args else None, "__module__", ""))
    return module.partition(".")[0] in (__name__.partition(".")[0], "ray")
