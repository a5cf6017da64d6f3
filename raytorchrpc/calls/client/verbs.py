"""The three verbs of a direct call: ``rpc_sync``, ``rpc_async`` and ``remote``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from raytorchrpc.calls.client import deferred
from raytorchrpc.calls.client.future import Future, result_of
from raytorchrpc.calls.member import current_local
from raytorchrpc.calls.options import CallOptions, checked_retry, takes_timeout
from raytorchrpc.calls.scope import on_loop, refuse_on_loop

#: Tensors to receive a result into: a list or a tuple.
Into = Sequence[torch.Tensor] | None
Target = Any  # ActorHandle | str | int | Member: an ActorHandle's class cannot be imported without Ray


class _Proxy:
    """``proxy.method(...)`` makes the call, as its verb does."""

    __slots__ = ("_options", "_send", "_target", "_verb")

    def __init__(self, verb: str, send: Callable[..., Any], target: Target, options: CallOptions) -> None:
        self._verb, self._send, self._target, self._options = verb, send, target, options

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return functools.partial(self._send, self._target, self._options, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"{self._verb}(target)(...) names no method: write {self._verb}(target).method(...)")

    def __repr__(self) -> str:
        return f"<{self._verb}({self._target!r}): call a method of it>"


def _sync(_target: Target, _options: CallOptions, _name: str, /, *args: Any, **kwargs: Any) -> Any:
    if on_loop():
        refuse_on_loop("rpc_sync", f"`await raytorchrpc.rpc_async(target).{_name}(...)`")
    # No variable for the call: it may hold the error, whose traceback holds this frame.
    return result_of(_calls().call(_target, _name, args, kwargs, _options))


def _async(_target: Target, _options: CallOptions, _name: str, /, *args: Any, **kwargs: Any) -> Any:
    return Future(_calls().call(_target, _name, args, kwargs, _options))


def _remote(_target: Target, _options: CallOptions, _name: str, /, *args: Any, **kwargs: Any) -> Any:
    return _calls().remote(_target, _name, args, kwargs, _options.timeout)


def _calls() -> Any:
    """What sends calls: this member, or ``deferred`` until this process is one."""
    local = current_local()
    return deferred if local is None else local.outgoing


@takes_timeout
def rpc_sync(
    target: Target,
    *,
    timeout: float | None = None,
    share: bool = False,
    keep: bool = False,
    into: Into = None,
    retry: int | None = None,
) -> Any:
    """Call a method of another member and return its result: ``rpc_sync(target).method(*args)``.

    Blocks until the result has arrived. Meanwhile a call that comes back to this actor runs on this thread. On an event
    loop it raises RayTorchRpcError: use ``await rpc_async(target).method(*args)`` there. Arguments
    may hold tensors anywhere; the method gets private copies. If the device map brings tensors of a GPU to the CPU,
    they are copied before the call is sent.

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

    Examples:
        >>> rtr.rpc_sync("learner").double(21)
        42
        >>> rtr.rpc_sync(learner, timeout=5).double(torch.ones(2))
        tensor([2., 2.])
    """
    retries = None if retry is None else checked_retry(retry)
    return _Proxy("rpc_sync", _sync, target, CallOptions(timeout, share, keep, into, retries, True))


@takes_timeout
def rpc_async(
    target: Target,
    *,
    timeout: float | None = None,
    share: bool = False,
    keep: bool = False,
    into: Into = None,
    retry: int | None = None,
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
    return _Proxy("rpc_async", _async, target, CallOptions(timeout, share, keep, into, retries, False, True))


@takes_timeout
def remote(target: Target, *, timeout: float | None = None) -> Any:
    """Like ``rpc_async``, but leave the result on the target and return torch's ``RRef`` to it at once.

    Examples:
        >>> rref = rtr.remote("learner").double(21)
        >>> rref.to_here()
        42
    """
    return _Proxy("remote", _remote, target, CallOptions(timeout))
