"""The three verbs of a direct call: ``rpc_sync``, ``rpc_async`` and ``remote``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from raytorchrpc.calls import deferred
from raytorchrpc.calls.current import current_local
from raytorchrpc.calls.future import Call, Future
from raytorchrpc.calls.options import CallOptions, checked_retry

#: Tensors to receive a result into: a list or a tuple.
Into = Sequence[torch.Tensor] | None
Target = Any  # ActorHandle | str | int | Member: an ActorHandle's class cannot be imported without Ray


class _Proxy:
    """``proxy.method(...)`` sends the call; the subclass is the verb."""

    __slots__ = ("_options", "_target")

    def __init__(self, target: Target, options: CallOptions) -> None:
        self._target, self._options = target, options

    def _call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        local = current_local()
        call = deferred.call if local is None else local.outgoing.call
        return call(self._target, name, args, kwargs, self._options)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return functools.partial(self._send, name)

    def _send(self, _name: str, /, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class _Sync(_Proxy):
    __slots__ = ()

    def _send(self, _name: str, /, *args: Any, **kwargs: Any) -> Any:
        # No variable for the call: it may hold the error, whose traceback holds this frame.
        return Future(self._call(_name, args, kwargs)).wait()


class _Async(_Proxy):
    __slots__ = ()

    def _send(self, _name: str, /, *args: Any, **kwargs: Any) -> Any:
        return Future(self._call(_name, args, kwargs))


class _Remote(_Proxy):
    __slots__ = ()

    def _send(self, _name: str, /, *args: Any, **kwargs: Any) -> Any:
        local = current_local()
        remote = deferred.remote if local is None else local.outgoing.remote
        return remote(self._target, _name, args, kwargs, self._options.timeout)


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
    retries = None if retry is None else checked_retry(retry)
    return _Sync(target, CallOptions(timeout, share, keep, into, retries, caller_waits=True))


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
    retries = None if retry is None else checked_retry(retry)
    return _Async(target, CallOptions(timeout, share, keep, into, retries))


def remote(target: Target, *, timeout: float | None = None) -> Any:
    """As ``rpc_async``, but the result stays on the target; returns torch's ``RRef`` to it at once."""
    return _Remote(target, CallOptions(timeout))
