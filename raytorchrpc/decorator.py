"""The decorator that lets other members call an actor method directly."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, overload

from raytorchrpc import rdt
from raytorchrpc._compat import ray_internals
from raytorchrpc.calls.exposed import MARK, Exposed, take_turn, take_turn_on_loop
from raytorchrpc.calls.options import checked_retry
from raytorchrpc.errors import ConfigurationError

F = TypeVar("F", bound=Callable[..., Any])


@overload
def method(function: F, /) -> F: ...


@overload
def method(
    *, concurrent: bool = False, share: bool = False, keep: bool = False, objectref: bool = False, retry: int = 0
) -> Callable[[F], F]: ...


def method(
    function: Any = None,
    /,
    *,
    concurrent: bool = False,
    share: bool = False,
    keep: bool = False,
    objectref: bool = False,
    retry: int = 0,
) -> Any:
    """Let the other members of a group call this actor method directly.

    ``handle.method.remote()`` keeps working and keeps its meaning. Called either way, decorated methods keep
    the actor's own concurrency: one at a time in a sync actor, up to ``max_concurrency`` in a threaded or
    async one. A sync method called directly runs on a thread of the member's own; a coroutine, and any method
    of an async actor, on the actor's event loop.

    Args:
        concurrent: run beside this actor's other methods, without waiting for a turn. The method must then
            be thread-safe by itself.
        share: give CUDA results to a caller on the same physical GPU as they are, without a copy, in a time that
            does not depend on their size. Both then use one memory: each sees what the other writes, and this actor
            keeps it until the caller's last tensor of the result is gone, also one that the method made only for the
            result. What the caller queues after it has the result comes after what the method queued; later work on
            either side is not ordered by itself: end it (``torch.cuda.current_stream().synchronize()``) before you
            tell the other. To any other caller, results are copied as without it.
        keep: for a method that keeps what it gets, as a replay buffer does. Every tensor and array then arrives
            in memory of its own, which costs a copy here. Without it one from another actor of the host may be a
            view of memory that the sender shares, and holds that until it dies. No effect on ``.remote()``.
        objectref: the tensors of what ``handle.method.remote()`` returns stay in this actor until somebody gets them,
            and then go straight there by the group's lanes; see ``raytorchrpc.rdt``. No effect on direct calls.
        retry: for a method that may run more than once (an idempotent one): a direct call whose member is lost waits
            for its return, within the call's own deadline, and is sent again, at most so many times. 0: the caller
            gets PeerLost. No effect on ``.remote()``, which has Ray's own ``max_task_retries``.

    Raises ConfigurationError for a generator, which cannot be called directly, and for a bad ``retry``.
    """
    if function is None:
        options = {"concurrent": concurrent, "share": share, "keep": keep, "objectref": objectref, "retry": retry}
        return functools.partial(method, **options)
    if not inspect.isfunction(function):
        raise ConfigurationError(f"@raytorchrpc.method is for functions in a class body, not {function!r}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigurationError(
            f"{function.__qualname__} is a generator; direct calls return one result: return a list, or keep "
            f"the generator for Ray's own streaming (.remote) without @raytorchrpc.method"
        )
    is_coroutine = inspect.iscoroutinefunction(function)
    group = ray_internals.concurrency_group_of(function)
    note = Exposed(function, concurrent, group, is_coroutine, share, keep, retry=checked_retry(retry))
    wrapper: Any = (_gated_coroutine if is_coroutine else _gated)(note, objectref)
    # Ray unwraps a method to read what ray.method wrote on it; applied after ours, that is on the wrapper alone.
    wrapper.__signature__ = inspect.signature(function)
    del wrapper.__wrapped__
    setattr(wrapper, MARK, note)
    if objectref:
        rdt.enable()  # Ray knows no other transports when it looks at the class
        wrapper = ray_internals.returns_by(wrapper, rdt.TRANSPORT)
    return wrapper


def _gated(note: Exposed, objectref: bool) -> Callable[..., Any]:
    @functools.wraps(note.function)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if objectref:
            rdt.enable()  # Ray tells an actor of its transports when it is made, and not again when it is restarted
        return take_turn(note, self, args, kwargs)

    return wrapper


def _gated_coroutine(note: Exposed, objectref: bool) -> Callable[..., Any]:
    @functools.wraps(note.function)
    async def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if objectref:
            rdt.enable()
        return await take_turn_on_loop(note, self, args, kwargs)

    return wrapper
