"""What a user's code calls: the decorator, the three verbs, the Future."""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar, overload

import torch

from raytorchrpc import rdt
from raytorchrpc._compat import ray_internals
from raytorchrpc.calls import deferred, gates
from raytorchrpc.calls.deferred import DeferredCall
from raytorchrpc.calls.event_loops import on_loop
from raytorchrpc.calls.gates import current_scope
from raytorchrpc.calls.member import current_local
from raytorchrpc.calls.outgoing import CallUnderWay, until_done
from raytorchrpc.calls.retry import RetriedCall
from raytorchrpc.errors import ConfigurationError, RayTorchRpcError, RpcTimeout
from raytorchrpc.process import fork

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

UnderWay = CallUnderWay | RetriedCall | DeferredCall

_MARK = "__raytorchrpc_method__"


class Exposed(NamedTuple):
    """What ``method`` notes about a function: the function itself, and how it may run."""

    function: Callable[..., Any]
    concurrent: bool
    concurrency_group: str | None
    is_coroutine: bool
    share: bool
    keep: bool
    frozen: bool = False
    """For a method of the package's own: nobody changes its results, so they are not copied before they are sent."""
    retry: int = 0
    service: bool = False
    """For a method of the package's own: it is called with the member and the caller's rank instead of the actor, and
    may return a ``services.Later``."""


def exposed(function: Any) -> Exposed | None:
    """The note that ``method`` left, or None for an undecorated function."""
    note: Exposed | None = getattr(function, _MARK, None)
    return note


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
    note = Exposed(function, concurrent, group, is_coroutine, share, keep, retry=_repeats(retry))
    wrapper: Any = (_gated_coroutine if is_coroutine else _gated)(note, objectref)
    # Ray unwraps a method to read what ray.method wrote on it; applied after ours, that is on the wrapper alone.
    wrapper.__signature__ = inspect.signature(function)
    del wrapper.__wrapped__
    setattr(wrapper, _MARK, note)
    if objectref:
        rdt.enable()  # Ray knows no other transports when it looks at the class
        wrapper = ray_internals.returns_by(wrapper, rdt.TRANSPORT)
    return wrapper


def _repeats(retry: Any) -> int:
    if isinstance(retry, bool) or not isinstance(retry, int) or retry < 0:
        raise ConfigurationError(f"retry= is how often a call may be sent again, 0 or more; not {retry!r}")
    return retry


# The wrappers take the user's module name from functools.wraps, so Ray may pickle them by value: their bodies
# may mention only what can be imported, and no state of this module.


def _gated(note: Exposed, objectref: bool) -> Callable[..., Any]:
    @functools.wraps(note.function)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if objectref:
            rdt.enable()  # Ray tells an actor of its transports when it is made, and not again when it is restarted
        return _take_turn(note, self, args, kwargs)

    return wrapper


def _gated_coroutine(note: Exposed, objectref: bool) -> Callable[..., Any]:
    @functools.wraps(note.function)
    async def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if objectref:
            rdt.enable()
        return await _take_turn_on_loop(note, self, args, kwargs)

    return wrapper


def _gate_for(note: Exposed, instance: Any) -> gates.Gate | None:
    """The gate that a call through Ray, or by another method of the actor, has to pass, if any."""
    if note.concurrent:
        return None
    group = note.concurrency_group
    if group is None:  # ray.method, when it was applied after ours, wrote onto the wrapper
        group = ray_internals.concurrency_group_of(getattr(type(instance), note.function.__name__, None))
    gate = gates.gate_of(instance, group)
    seat = current_scope.get().seat
    # A method that calls another of its own object just calls it, as everywhere.
    return None if seat is not None and seat.taken else gate


def _take_turn(note: Exposed, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    gate = _gate_for(note, instance)
    if gate is None:
        return note.function(instance, *args, **kwargs)
    scope, looping = current_scope.get(), on_loop()
    if not looping and gate.held(scope.path):
        raise RayTorchRpcError(
            f"{note.function.__qualname__} was called by a concurrent method, on behalf of a call whose chain is "
            f"inside this actor already and waits: it would wait for itself; make it concurrent=True as well"
        )
    seat = gate.enter_now() if looping else gate.enter()
    if seat is None:
        # Waiting here would stop the loop that the holder needs; nothing else runs on it meanwhile anyway.
        return note.function(instance, *args, **kwargs)
    before = current_scope.set(scope.inside(seat))
    try:
        return note.function(instance, *args, **kwargs)
    finally:
        current_scope.reset(before)
        gate.leave(seat)


async def _take_turn_on_loop(note: Exposed, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    gate = _gate_for(note, instance)
    if gate is None:
        return await note.function(instance, *args, **kwargs)
    scope = current_scope.get()
    if gate.held(scope.path):  # it would wait for itself
        return await note.function(instance, *args, **kwargs)
    seat = await gate.enter_on_loop()
    before = current_scope.set(scope.inside(seat))
    try:
        return await note.function(instance, *args, **kwargs)
    finally:
        current_scope.reset(before)
        gate.leave(seat)


class Future(Generic[T]):
    """The result of a direct call, on its way. Made by ``rpc_async``; awaitable.

    The result is unpickled once, by whoever asks first, in that thread (and on its CUDA stream). Thread-safe.
    """

    def __init__(self, call: UnderWay) -> None:
        self._call = call
        self._lock = threading.Lock()
        self._outcome: tuple[Any, BaseException | None] | None = None

    def done(self) -> bool:
        """Whether ``result`` would return or raise at once. Never blocks."""
        if self._outcome is not None or fork.forked():
            return True
        return self._call.wait(0) or self._call.remaining() == 0

    def wait(self) -> T:
        """Block until the result is there, or the call's own deadline; return it or raise what the call raised."""
        try:
            return self._get(self._call.remaining())
        finally:
            del self  # see _get

    def result(self, timeout: float | None = None) -> T:
        """As ``wait``, but at most ``timeout`` seconds. Then RpcTimeout is raised and the call goes on: ask again."""
        remaining = self._call.remaining()
        try:
            return self._get(remaining if timeout is None else min(timeout, remaining))
        finally:
            del self  # see _get

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the call raised, or None if it returned. Blocks like ``result``, raises RpcTimeout like it."""
        remaining = self._call.remaining()
        self._settle(remaining if timeout is None else min(timeout, remaining))
        assert self._outcome is not None
        return self._outcome[1]

    def add_done_callback(self, callback: Callable[[Future[T]], object]) -> None:
        """Call ``callback(self)`` once done, on a thread of the member's own (soon, if it is done already).

        A call is done also when its deadline has passed. The callback may block and may make calls. What it
        raises is logged.
        """
        fork.check_process()
        first = threading.Lock()

        def run() -> None:
            if first.acquire(blocking=False):
                self._call.run_callback(callback, self)

        prevent = self._call.at_deadline(run)

        def arrived() -> None:
            prevent()
            run()

        self._call.add_done_callback(arrived)

    def __await__(self) -> Generator[Any, None, T]:
        while not (self.done() and self._settled(0)):
            yield from until_done(self._call)
        try:
            return self._get(0)
        finally:
            del self  # see _get

    def _get(self, timeout_s: float) -> T:
        self._settle(timeout_s)
        assert self._outcome is not None
        value, error = self._outcome
        if error is None:
            return value  # type: ignore[no-any-return]
        try:
            raise error
        finally:
            # Its traceback holds these frames and the caller's, with all their tensors. Did it hold itself too, by way
            # of this Future, they would live until garbage is collected, and tensors do not make Python collect it.
            del self, error

    def _settle(self, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        while not self._settled(max(until - time.monotonic(), 0)):
            if time.monotonic() >= until and self._call.remaining() > 0:
                raise RpcTimeout(f"{self._call.label} has not answered within {timeout_s:.3g} s")

    def _settled(self, timeout_s: float) -> bool:
        """Wait, and take the outcome; False if it is not there yet, or the call had to be sent again."""
        if self._outcome is not None:
            return True
        fork.check_process()  # the answer comes to the parent
        arrived = gates.wait_serving(self._call, timeout_s)
        if not arrived and self._call.remaining() > 0:
            return False
        with self._lock:
            if self._outcome is None:
                self._outcome = self._call.outcome() if arrived else self._call.expire()
            return self._outcome is not None

    def __repr__(self) -> str:
        state = "done" if self.done() else "pending"
        return f"<raytorchrpc.Future {self._call.label} {state}>"


#: Tensors to receive a result into: a list or a tuple.
Into = Sequence[torch.Tensor] | None
Target = Any  # ActorHandle | str | int | Member: an ActorHandle's class cannot be imported without Ray


class _Proxy:
    """``proxy.method(...)`` sends the call; which verb, the subclass says."""

    __slots__ = ("_into", "_keep", "_retry", "_share", "_target", "_timeout")

    def __init__(
        self,
        target: Target,
        timeout: float | None,
        share: bool = False,
        keep: bool = False,
        into: Into = None,
        retry: int | None = None,
    ) -> None:
        self._target, self._timeout = target, timeout
        self._share, self._keep, self._into = share, keep, into
        self._retry = None if retry is None else _repeats(retry)

    def _call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], attended: bool) -> UnderWay:
        local = current_local()
        send: Any = deferred.call if local is None else local.call
        sent: UnderWay = send(
            self._target,
            name,
            args,
            kwargs,
            self._timeout,
            attended=attended,
            share=self._share,
            keep=self._keep,
            into=self._into,
            retry=self._retry,
        )
        return sent

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return functools.partial(self._send, name)

    def _send(self, _name: str, /, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class _Sync(_Proxy):
    __slots__ = ()

    def _send(self, _name: str, /, *args: Any, **kwargs: Any) -> Any:
        # No variable for the call: it may hold what is raised, whose traceback holds this frame.
        return Future(self._call(_name, args, kwargs, attended=True)).wait()


class _Async(_Proxy):
    __slots__ = ()

    def _send(self, _name: str, /, *args: Any, **kwargs: Any) -> Any:
        return Future(self._call(_name, args, kwargs, attended=False))


class _Remote(_Proxy):
    __slots__ = ()

    def _send(self, _name: str, /, *args: Any, **kwargs: Any) -> Any:
        local = current_local()
        send: Any = deferred.remote if local is None else local.remote
        return send(self._target, _name, args, kwargs, self._timeout)


def rpc_sync(
    target: Target,
    *,
    timeout: float | None = None,
    share: bool = False,
    keep: bool = False,
    into: Into = None,
    retry: int | None = None,
) -> Any:
    """``rpc_sync(target).method(*args)`` calls a decorated method of another member and returns its value.

    Args:
        target: an actor handle, a member's name, its rank, or a ``Member``.
        timeout: seconds until RpcTimeout; None takes ``GroupConfig.rpc_timeout_s``. A call made on behalf of
            another call ends by that one's deadline at the latest.
        share: give CUDA arguments to a target on the same physical GPU as they are, without a copy, in a time that
            does not depend on their size (strides are kept). Both then use one memory: each sees what the other
            writes, and this process keeps it until the target's last tensor of the call is gone, whatever happens to
            the tensors here; all tensors of one call are kept together. What the method queued comes before what
            this thread queues after the call; if the target keeps a tensor, later work on either side is not ordered
            by itself: end it (``torch.cuda.current_stream().synchronize()``) before you tell the other. Anything
            else is copied as without it: for a target on another GPU, to oneself, CPU tensors, inside a distributed
            autograd context, memory that CUDA cannot share. Results: see ``method(share=True)``.
        keep: every tensor and array of the result arrives in memory of its own, which costs a copy; for results
            that are kept for long. See ``method`` for the same on arguments.
        into: a list or tuple of tensors (buffers) to receive the result's dense tensors into, in the order in which
            these appear in it; one that is there twice counts once, numpy arrays do not count. The result holds the
            buffers themselves (``result[0] is into[0]``), with the attributes and ``requires_grad`` that they have.
            Number, shapes and dtypes have to match: else ConfigurationError names what does not, before any buffer is
            changed. Buffers may have any strides, be on any device and require grad (none is recorded), but must not
            overlap. They are filled when the result is taken, by the thread that takes it: here before this returns,
            with ``rpc_async`` in ``wait``, ``result``, ``exception`` or ``await``, which blocks while CPU buffers are
            filled. Copies to a GPU are queued on that thread's current stream, as torch's own are. Nothing else writes
            into buffers, before or afterwards. A result that cannot be fetched to its end (``PeerLost``) may have
            changed any part of them; an error of the method, or a deadline that passes without an answer, none.
            CPU tensors take one copy out of shared memory, which the sender has back when this returns. A result's
            CUDA tensors of 1 MiB and more, or all if it has no more than four, go straight into buffers that are
            contiguous and on the GPU where they arrive (not by nixl); others take a copy more there. ConfigurationError
            inside a distributed autograd context.
        retry: how often the call may be sent again if the target is lost: it waits, within its deadline, for the
            restarted actor. None: as often as ``method(retry=...)`` says, which is never unless it says so.

    Blocks. A call that comes back to this actor meanwhile runs on this thread. Arguments may hold tensors
    anywhere; what arrives is a private copy. Tensors of a GPU that the device map brings to the CPU are copied
    first, and this waits for that copy. Raises what the method raised, under its own type where that is
    possible (its ``__cause__`` shows the remote traceback), or a ``RayTorchRpcError``.
    """
    return _Sync(target, timeout, share, keep, into, retry)


def rpc_async(
    target: Target,
    *,
    timeout: float | None = None,
    share: bool = False,
    keep: bool = False,
    into: Into = None,
    retry: int | None = None,
) -> Any:
    """As ``rpc_sync``, but returns a ``Future`` at once. Argument tensors must not change until it is done; what
    changes in shared ones, the target sees. Waits, as that does, for copies to the CPU that the device map asks for.
    """
    return _Async(target, timeout, share, keep, into, retry)


def remote(target: Target, *, timeout: float | None = None) -> Any:
    """As ``rpc_async``, but the result stays on the target; returns torch's ``RRef`` to it at once."""
    return _Remote(target, timeout)
