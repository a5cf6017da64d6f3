"""The three verbs of a direct call: ``rpc_sync``, ``rpc_async`` and ``remote``.

A restarted actor may call before it has rejoined its group: such a call is sent as soon as it has.
"""

from __future__ import annotations

import functools
import time
from asyncio import _get_running_loop
from collections.abc import Callable, Sequence
from typing import Any

import torch

from raytorchrpc.calls import rejoin
from raytorchrpc.calls.client.future import Future, call_back, result_of
from raytorchrpc.calls.client.outgoing import LOST, OutgoingCall, Repeats
from raytorchrpc.calls.clients import own_groups
from raytorchrpc.calls.member import awaiting, current, reaching, resolved
from raytorchrpc.calls.options import CallOptions, checked_retry, takes_timeout
from raytorchrpc.calls.peers import PeerRoute
from raytorchrpc.calls.scope import on_loop, refuse_on_loop
from raytorchrpc.errors import RayTorchRpcError, RpcTimeout
from raytorchrpc.process import threads
from raytorchrpc.process.completion import Completion
from raytorchrpc.process.workers import process_deadlines

#: Tensors to receive a result into: a list or a tuple.
Into = Sequence[torch.Tensor] | None
Target = Any  # ActorHandle | str | int | Member: an ActorHandle's class cannot be imported without Ray


class _Method(functools.partial[Any]):
    """One method of a proxy. Calling it makes the call."""

    __slots__ = ()

    @property
    def remote(self) -> Any:
        raise AttributeError(
            f".{self.args[-1]}.remote(...) is for Ray's handles: write .{self.args[-1]}(...) after "
            "raytorchrpc.rpc_sync, rpc_async or remote"
        )

    def __repr__(self) -> str:
        target, _, name = self.args
        verb = self.func.__name__.strip("_")
        return f"<{verb if verb == 'remote' else f'rpc_{verb}'}({target!r}).{name}: call it, .{name}(...)>"


class _Proxy:
    """``proxy.method(...)`` makes the call, as its verb does."""

    __slots__ = ("_options", "_send", "_target", "_verb")

    def __init__(self, verb: str, send: Callable[..., Any], target: Target, options: CallOptions) -> None:
        self._verb, self._send, self._target, self._options = verb, send, target, options

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Method(self._send, self._target, self._options, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"{self._verb}(target)(...) names no method: write {self._verb}(target).method(...)")

    def __repr__(self) -> str:
        return f"<{self._verb}({self._target!r}): call a method of it>"


def _sync(_target: Target, _options: CallOptions, _name: str, /, *args: Any, **kwargs: Any) -> Any:
    if _get_running_loop() is not None:
        refuse_on_loop("rpc_sync", f"`await raytorchrpc.rpc_async(target).{_name}(...)`")
    local, options = current.local, _options
    if local is None or options.group is not None:
        local, options = _member(_target, options)
    # No variable for the call: it may hold the error, whose traceback holds this frame.
    return result_of(local.outgoing.call(_target, _name, args, kwargs, options))


def _async(_target: Target, _options: CallOptions, _name: str, /, *args: Any, **kwargs: Any) -> Any:
    if (current.local is None or _options.group is not None) and on_loop() and _joined(_target, _options) is None:
        return Future(_DeferredCall(_target, _name, args, kwargs, _options))
    local, options = _member(_target, _options)
    return Future(local.outgoing.call(_target, _name, args, kwargs, options))


def _remote(_target: Target, _options: CallOptions, _name: str, /, *args: Any, **kwargs: Any) -> Any:
    local, options = _member(_target, _options)
    return local.outgoing.remote(_target, _name, args, kwargs, options.timeout)


def _member(target: Target, options: CallOptions) -> tuple[Any, CallOptions]:
    """The LocalMember that sends the call, and its options. Blocks until this process is a member, or a client of the
    group that it formed or fetched and that has the target; the rest of the call's time is for the call.
    """
    if (local := _joined(target, options)) is None:
        joining = _joining(target, options)
        if not joining.done():
            refuse_on_loop("joining a group", "`await raytorchrpc.rpc_async(target)...`, which joins it on a thread")
        local, remaining_s = rejoin.outcome_of(joining)
        local = resolved(local, target, options.group)
        options = options._replace(timeout=remaining_s)
    return local, options


def _joined(target: Target, options: CallOptions) -> Any:
    """The LocalMember that sends the call; None if this process first has to join a group that may have the target."""
    group = options.group
    if current.local is not None and group is None:
        return current.local
    local = reaching(target, group) or own_groups.joined(target, options.timeout, group)
    if local is None and current.members and not rejoin.pending() and not own_groups.may_have(target, group):
        return awaiting(target, options.timeout, group)
    return local


def _joining(target: Target, options: CallOptions) -> Any:
    """What is settled with the LocalMember that sends the call: see ``rejoin.outcome_of``."""
    return own_groups.join(target, options.timeout, options.group) or rejoin.awaited(options.timeout)


class _DeferredCall(OutgoingCall):
    """A call that waits for this process to become a member or a client. A worker sends it then, as one whose peer was
    lost.
    """

    _route: Any
    """None until it is being sent."""
    _awaited: Any
    """What is settled with the LocalMember that this process becomes, until it is; see ``rejoin.outcome_of``."""

    def __init__(self, target: Any, method: str, args: tuple[Any, ...], kwargs: Any, options: CallOptions) -> None:
        unknown: Any = None
        super().__init__(unknown, unknown, method, options)
        self._target = target
        self.cancellable, self._phase, self.pending = True, LOST, Completion()
        self.repeats = Repeats(args, kwargs, target, 0)
        self._awaited = awaited = _joining(target, options)
        awaited.add_done_callback(self._joined)

    def _joined(self, awaited: Any) -> None:
        repeats = self.repeats
        assert repeats is not None
        if (error := awaited.exception()) is not None:
            self._end_sending(repeats, self.pending, error)
            return
        try:
            local = resolved(awaited.result(), self._target, self._options.group)
        except RayTorchRpcError as refused:
            self._end_sending(repeats, self.pending, refused)
            return
        self._calls, self.deadline = local.outgoing, awaited.until
        self._awaited = None
        self._calls.repeats.submit(self._send_again, repeats, self.pending)

    def _next_route(self, repeats: Repeats) -> PeerRoute | None:
        if self._route is not None:
            return super()._next_route(repeats)
        route = self._calls.peers.route_for_call(self._target)
        usual = route.retries.get(self._method, 0)
        repeats.count = usual if self._options.retry is None else self._options.retry
        return route

    @property
    def label(self) -> str:
        return f"{self._target}.{self._method}"

    def remaining(self) -> float:
        awaited = self._awaited
        return super().remaining() if awaited is None else max(0.0, awaited.until - time.monotonic())

    def _late(self) -> RpcTimeout:
        awaited = self._awaited
        if awaited is None:
            return super()._late()
        return RpcTimeout(f"{self.label} was not sent by its deadline: {awaited.why_late()}")

    def at_deadline(self, callback: Callable[[], None]) -> Callable[[], None]:
        return process_deadlines().at(time.monotonic() + self.remaining(), callback)

    def run_callback(self, callback: Callable[[Any], object], argument: Any) -> None:
        threads.start(call_back, callback, argument, name="raytorchrpc-deferred-callback")


@takes_timeout
def rpc_sync(
    target: Target,
    *,
    timeout: float | None = None,
    share: bool = False,
    keep: bool = False,
    into: Into = None,
    retry: int | None = None,
    group: str | None = None,
) -> Any:
    """Call a method of another member and return its result: ``rpc_sync(target).method(*args)``.

    Blocks until the result has arrived. Meanwhile a call that comes back to this actor runs, on another thread and not
    in this thread's grad or inference mode. On an event loop it raises RayTorchRpcError: use ``await
    rpc_async(target).method(*args)`` there. Arguments may hold tensors anywhere; the method gets private copies. If the
    device map brings tensors of a GPU to the CPU, they are copied before the call is sent.

    Raises what the method raised, with its own type where possible (``__cause__`` shows the remote traceback), or a
    ``RayTorchRpcError``.

    Args:
        target: an actor handle, a member's name, its rank, or a ``Member``.
        timeout: seconds until ``RpcTimeout``; None takes ``GroupConfig.rpc_timeout_s``. A call made on behalf of
            another call ends by the other's deadline at the latest.
        share: share CUDA arguments with a target on the same physical GPU instead of copying them, in a time that does
            not depend on their size. Strides are kept.

            Both processes then use the same memory, and each sees what the other writes. This process keeps the memory
            of all tensors of the call until the target has dropped the last of them, whatever happens to the tensors
            here. CUDA work that the method queued precedes what this thread queues after the call. If the target keeps
            a tensor, later work is not ordered: run ``torch.cuda.current_stream().synchronize()`` before you notify
            the other side.

            Everything else is copied as usual: tensors for a target on another GPU or for the caller itself, CPU
            tensors, tensors inside a distributed autograd context, and memory that CUDA cannot share. For results see
            ``method(share=True)``.
        keep: copy each tensor and array of the result into memory of its own. Use it for results that you keep for
            long. For arguments see ``method(keep=True)``.
        into: a list or tuple of tensors (buffers) that receive the dense tensors of the result, in the order in which
            these appear in it. A tensor that appears twice counts once; numpy arrays do not count. The result holds
            the buffers themselves (``result[0] is into[0]``), with their own attributes and ``requires_grad``.

            Number, shapes and dtypes must match; otherwise ConfigurationError names the mismatch and no buffer is
            changed. Buffers may have any strides, be on any device and require grad (no gradient is recorded), but
            must not overlap. ``into`` cannot be used inside a distributed autograd context (ConfigurationError).

            The thread that takes the result fills the buffers: here before this function returns, with ``rpc_async``
            in ``wait``, ``result``, ``exception`` or ``await``. Nothing else writes to them, before or afterwards.
            Filling CPU buffers blocks; copies to a GPU are queued on that thread's current stream. If the result
            cannot be fetched completely (``PeerLost``), the buffers may be partly overwritten. If the method raises,
            or the deadline passes without a reply, they are unchanged.

            CPU tensors are copied once, out of shared memory, which the sender gets back when this function returns.
            CUDA tensors of 1 MiB and more, or all if the result has at most four, are written straight into buffers
            that are contiguous and on the GPU where the result arrives (not with nixl); others take one more copy.
        retry: how often the call may be sent again if the target is lost. Each time it waits, within its deadline, for
            the restarted actor. None takes the number of ``method(retry=...)``, which is 0 by default.
        group: the name of the group that has the target, for a process in several groups. None: a handle or a
            ``Member`` is found in whichever group has it; a name or a rank is one of the group whose call this thread
            serves, or of the only group that has it. Raises ConfigurationError where that leaves several.

    Examples:
        >>> rtr.rpc_sync("learner").double(21)
        42
        >>> rtr.rpc_sync(learner, timeout=5).double(torch.ones(2))
        tensor([2., 2.])
    """
    retries = None if retry is None else checked_retry(retry)
    return _Proxy("rpc_sync", _sync, target, CallOptions(timeout, share, keep, into, retries, True, group=group))


@takes_timeout
def rpc_async(
    target: Target,
    *,
    timeout: float | None = None,
    share: bool = False,
    keep: bool = False,
    into: Into = None,
    retry: int | None = None,
    group: str | None = None,
) -> Any:
    """Like ``rpc_sync``, but return a ``Future`` at once.

    Argument tensors must not change until the future is done; with ``share``, the target sees what changes in them.
    Blocks while tensors are copied to the CPU for the device map, and while the credit window to the target is full
    (on an event loop, PeerBusy is raised instead).

    Examples:
        >>> future = rtr.rpc_async("learner").double(21)
        >>> future.result(timeout=5)
        42
    """
    retries = None if retry is None else checked_retry(retry)
    return _Proxy(
        "rpc_async", _async, target, CallOptions(timeout, share, keep, into, retries, False, True, group=group)
    )


@takes_timeout
def remote(target: Target, *, timeout: float | None = None, group: str | None = None) -> Any:
    """Like ``rpc_async``, also as to ``group``, but leave the result on the target and return torch's ``RRef`` at once.

    Examples:
        >>> rref = rtr.remote("learner").double(21)
        >>> rref.to_here()
        42
    """
    if callable(target):
        raise TypeError(
            "raytorchrpc.remote decorates neither classes nor functions: decorate the class with @ray.remote, and its "
            "methods with @raytorchrpc.method"
        )
    return _Proxy("remote", _remote, target, CallOptions(timeout, group=group))
