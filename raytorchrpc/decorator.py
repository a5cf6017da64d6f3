"""The decorator that exposes an actor method to direct calls."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, overload

import raytorchrpc.rdt as rdt  # not the package's name, for which another thread may have to load this module
from raytorchrpc._compat import ray_internals
from raytorchrpc.calls.options import checked_retry
from raytorchrpc.calls.server.exposed import MARK, Exposed, in_turn, runs_on_loop
from raytorchrpc.calls.server.streams import ServedStream
from raytorchrpc.errors import ConfigurationError

F = TypeVar("F", bound=Callable[..., Any])

#: How many items the callers of a generator ask for ahead, by default.
_AHEAD = 4


@overload
def method(function: F, /) -> F: ...


@overload
def method(
    *,
    concurrent: bool = False,
    share: bool = False,
    keep: bool = False,
    objectref: bool = False,
    retry: int = 0,
    ahead: int | None = None,
    max_concurrency: int | None = None,
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
    ahead: int | None = None,
    max_concurrency: int | None = None,
) -> Any:
    """Let the other members of a group call this actor method directly.

    ``handle.method.remote()`` works as before. However they are called, methods keep the actor's own concurrency. In a
    sync actor one method runs at a time, decorated or not; others may run while it waits in a blocking operation of
    this package, or in ``allow_calls``. In a threaded or async actor up to ``max_concurrency`` decorated methods run.
    A sync method that is called directly runs on a thread of the member's own, in a sync actor with the grad mode,
    inference mode, autocast, default device and current GPU of Ray's thread. A coroutine, and every method of an async
    actor, runs on the actor's event loop. Decorators above this one run too, if they use ``functools.wraps``.

    A generator method, sync or async, returns a ``Stream`` to a direct call: an iterator that brings its items one by
    one. It runs only as its caller takes items. In a threaded or async actor it counts as running until it ends or the
    stream is closed; a sync actor runs other methods between two items.

    Raises ConfigurationError for arguments that do not fit.

    Args:
        concurrent: run without waiting for the actor's other methods. The method must be thread-safe.
        share: share CUDA results with a caller on the same physical GPU instead of copying them, in a time that does
            not depend on their size. To any other caller, results are copied as usual.

            Both processes then use the same memory, and each sees what the other writes. This actor keeps the memory
            until the caller has dropped the last tensor of the result, even if the method created it only for the
            result. CUDA work that the caller queues after it has the result follows what the method queued. Later work
            is not ordered: run ``torch.cuda.current_stream().synchronize()`` before you notify the other side.
        keep: copy each tensor and array of the arguments into memory of its own. Use it for a method that keeps its
            arguments, such as a replay buffer. Otherwise a tensor from another actor of the same host may be a view of
            shared memory, which the sender cannot reuse while the view exists. No effect on ``.remote()``.
        objectref: keep the tensors in the result of ``handle.method.remote()`` in this actor until they are fetched;
            they then go straight to the receiver over the group's lanes. See ``raytorchrpc.rdt``. No effect on direct
            calls.
        retry: how often a direct call may be sent again if this member is lost, for a method that is safe to run more
            than once (idempotent). Each time the call waits, within its deadline, for the restarted actor. With 0 the
            caller gets PeerLost. No effect on ``.remote()``, which has Ray's own ``max_task_retries``. A generator is
            not repeated once its stream is open.
        ahead: for a generator, how many items it may produce before the caller takes them, 4 by default. They wait at
            the caller, or in shared memory.
        max_concurrency: the width of the method's concurrency group, as the class declares it to Ray: the actor's
            process cannot ask Ray for it. At most so many methods of the group run while one of them was called
            directly. Declare it at one method of the group; the largest holds, and without any it is one.

    Examples:
        >>> class Learner:
        ...     @rtr.method
        ...     def update(self, gradient): ...
        ...
        ...     @rtr.method(concurrent=True)
        ...     def ping(self): ...
    """
    if function is None:
        options = {"concurrent": concurrent, "share": share, "keep": keep, "objectref": objectref, "retry": retry}
        return functools.partial(method, **options, ahead=ahead, max_concurrency=max_concurrency)
    if not inspect.isfunction(function) or function.__name__ == "__init__":
        remedy = ": leave that out, so that it is a method of the actor" if hasattr(function, "__func__") else ""
        raise ConfigurationError(f"@raytorchrpc.method decorates methods in a class body, not {function!r}{remedy}")
    streams = _checked_stream(function, objectref, ahead)
    if max_concurrency is not None:
        _check_count("max_concurrency", max_concurrency)
    group = ray_internals.concurrency_group_of(function)
    note = Exposed(
        function, concurrent, group, max_concurrency, runs_on_loop(function), share, keep, retry=checked_retry(retry)
    )
    if streams:
        note = note._replace(ahead=_AHEAD if ahead is None else ahead, call=ServedStream)
    # Ray registers transports in a new actor, but not in a restarted one; and the method may import DTensors first.
    wrapper: Any = in_turn(note, rdt.enable) if objectref else in_turn(note)
    # Ray unwraps a method to read the attributes that ray.method set; applied after ours, they are on the wrapper.
    wrapper.__signature__ = inspect.signature(function)
    del wrapper.__wrapped__
    setattr(wrapper, MARK, note._replace(wrapper=wrapper))
    if objectref:
        rdt.enable()  # Ray reads the known transports when it decorates the class
        wrapper = ray_internals.returns_by(wrapper, rdt.TRANSPORT)
    return wrapper


def _checked_stream(function: Any, objectref: bool, ahead: Any) -> bool:
    """Whether the method is a generator. Raises ConfigurationError for arguments that do not fit."""
    streams = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
    if streams and objectref:
        raise ConfigurationError(f"{function.__qualname__} is a generator: objectref= needs one result")
    if ahead is None:
        return streams
    if not streams:
        raise ConfigurationError(f"ahead= is for generators, and {function.__qualname__} is none")
    _check_count("ahead", ahead)
    return True


def _check_count(argument: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{argument}= must be a whole number of at least 1, not {value!r}")
