"""The receiving side of Ray Direct Transport: pulls of tensors."""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent import futures
from functools import partial
from typing import TYPE_CHECKING

import torch

from raytorchrpc._compat import ray_internals, torch_internals
from raytorchrpc.calls import scope as _scope
from raytorchrpc.calls.client.future import Call
from raytorchrpc.calls.member import LocalMember, current_local
from raytorchrpc.calls.options import CallOptions
from raytorchrpc.calls.peers import Member
from raytorchrpc.calls.server.services import DeferredReply
from raytorchrpc.errors import LaneUnavailable, NotAMember, PeerLost, RpcTimeout, TransferFailed
from raytorchrpc.process import this_process, threads
from raytorchrpc.process.workers import Workers
from raytorchrpc.rdt import source as sources
from raytorchrpc.rdt.source import PULL, Source
from raytorchrpc.tensors.codec import Codec
from raytorchrpc.tensors.host_device_copy import copy_into

if TYPE_CHECKING:
    from raytorchrpc.lanes.nng.offers import NngClient

#: A pull may take this share of Ray's time limit for a transfer: its own error says more than Ray's.
_SHARE_OF_TIME = 0.8
#: How often a wait checks whether Ray has aborted the transfer (seconds).
_CHECK_S = 0.1
#: Errors of the group's lanes after which the source's server is asked.
_UNREACHABLE = (PeerLost, NotAMember, LaneUnavailable)

_workers = Workers("raytorchrpc-pull")
_in_flight: weakref.WeakSet[Pull] = weakref.WeakSet()
_lock = threading.Lock()


def abort(object_id: str) -> None:
    """End the pulls of this object that are in flight here: waits for them raise TransferFailed."""
    with _lock:
        pulls = [pull for pull in _in_flight if pull.object_id == object_id]
    for pull in pulls:
        pull.fail("Ray aborted the transfer")


class Pull:
    """One pull of an object's tensors. Its constructor starts it and does not block."""

    def __init__(
        self,
        object_id: str,
        source: Source,
        on_gpu: bool,
        targets: Sequence[torch.Tensor] | None = None,
        *,
        caller_waits: bool = False,
    ) -> None:
        """``on_gpu``: the source has some tensor on a GPU. ``targets``: tensors to be filled instead of new ones.
        ``caller_waits``: ``wait`` follows at once.
        """
        self.object_id, self._source, self._on_gpu, self._targets = object_id, source, on_gpu, targets
        self._deadline = time.monotonic() + _SHARE_OF_TIME * ray_internals.transfer_timeout_s()
        # Tensors for CPU targets leave the source as CPU tensors: this process may have no GPU.
        self._to_cpu = bool(targets) and on_gpu and not any(target.is_cuda for target in targets or ())
        self._arrived = DeferredReply()  # has a function that takes the tensors, on the thread that will use them
        self._call: Call | None = None
        """To the source, if it is a member: the waiting thread reads its reply, so no other thread has to wake."""
        with _lock:
            _in_flight.add(self)
        local = current_local()
        member = None if local is None else _member_at(local, source)
        if source.process == this_process.unique:
            self._arrived.settle(self._own)
        elif local is not None and member is not None:
            self._ask_member(local, member, caller_waits)
        else:
            self._ask_server()

    def _own(self) -> list[torch.Tensor]:
        kept = sources.tensors_of(self.object_id, self._source.process)
        kept.make_current()
        return kept.tensors if self._targets is None else filled(self._targets, kept.tensors)

    def _ask_member(self, local: LocalMember, member: Member, caller_waits: bool) -> None:
        try:
            scope = _scope.current_scope.set(_scope.NO_SCOPE)  # with the transfer's deadline, not the caller's
            try:
                with torch_internals.autograd_context(torch_internals.NO_CONTEXT):
                    args = (self.object_id, self._source.process, self._to_cpu)
                    options = CallOptions(self._remaining(), into=self._targets, caller_waits=caller_waits)
                    self._call = local.outgoing.call(member, PULL, args, {}, options)
            finally:
                _scope.current_scope.reset(scope)
        except _UNREACHABLE:
            self._ask_server()

    def _ask_server(self) -> None:
        try:
            _workers.submit(_fetch_for, weakref.ref(self), self._source, self.object_id, self._deadline)
        except threads.ThreadShortage as error:
            self.fail(str(error), error)

    def settle(self, take: Callable[[], list[torch.Tensor]]) -> None:
        """Have waits return what ``take`` returns; no effect once it is done."""
        self._arrived.settle(take)

    def fail(self, cause: str, error: BaseException | None = None) -> None:
        """Have waits raise TransferFailed with this cause; no effect once it is done."""
        failure = TransferFailed(self.object_id, self._source.shown, cause)
        failure.__cause__ = error
        self._arrived.settle(None, failure)

    def _remaining(self) -> float:
        return max(0.001, self._deadline - time.monotonic())

    def _arrives(self, until: float) -> bool:
        """Block until it is done, at most ``until``."""
        call, self._call = self._call, None
        while call is not None and not self._arrived.done():
            left = until - time.monotonic()
            if call.wait(max(0.0, min(left, _CHECK_S))):
                self.settle(partial(_outcome, call))
            elif left <= 0:
                self._call = call  # for the next wait
                return False
        return bool(futures.wait([self._arrived], max(0.0, until - time.monotonic())).done)

    def wait(self, timeout_s: float | None) -> list[torch.Tensor]:
        """Return the tensors, in order; to be called once, on the thread that will use them. Blocks.

        Raises TransferFailed, or TimeoutError if ``timeout_s`` passes first.
        """
        until = self._deadline if timeout_s is None else min(self._deadline, time.monotonic() + timeout_s)
        while True:
            if not self._arrives(until):
                if until < self._deadline:
                    raise TimeoutError(f"object {self.object_id} has not arrived within {timeout_s:.3g} s")
                self.fail(f"it did not come within {_SHARE_OF_TIME * ray_internals.transfer_timeout_s():.3g} s")
            arrived, self._arrived = self._arrived, DeferredReply()
            take: Callable[[], list[torch.Tensor]] = arrived.result()
            try:
                return take()
            except PeerLost:  # the source may have left the group and still run
                self._ask_server()
            except Exception as error:
                raise TransferFailed(self.object_id, self._source.shown, _text(error, self._on_gpu)) from error


def _outcome(call: Call) -> list[torch.Tensor]:
    outcome = call.outcome()
    assert outcome is not None  # a pull is never retried
    value, error = outcome
    try:
        if error is not None:
            raise error
        return value  # type: ignore[no-any-return]
    finally:
        del error  # its traceback holds this frame


def filled(targets: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The targets, on any device, filled from the tensors. Raises ValueError if dtypes or shapes differ."""
    for target, tensor in zip(targets, tensors, strict=True):
        if (target.dtype, target.shape) != (tensor.dtype, tensor.shape):
            its, its_target = (f"{one.dtype} {tuple(one.shape)}" for one in (tensor, target))
            raise ValueError(f"a tensor of {its} cannot be received into one of {its_target}")
    copy_into([target.detach() for target in targets], [tensor.detach() for tensor in tensors])
    return list(targets)


def _text(error: BaseException, on_gpu: bool = False) -> str:
    if isinstance(error, LaneUnavailable) and on_gpu:
        return f"{error.reason}; or get it with ray.experimental.set_target_device_for_ref(ref, 'cpu')"
    if isinstance(error, PeerLost):
        return f"it is gone, or cannot be reached from here ({error.cause})"
    known = isinstance(error, (LookupError, LaneUnavailable, RpcTimeout))
    return str(error.args[0]) if known and error.args else f"{type(error).__name__}: {error}"


def _member_at(local: LocalMember, source: Source) -> Member | None:
    """The member whose process is the source, if it is in this process's group."""
    for route in local.peers.routes:
        if route.member.pid == source.pid and route.member.node_id == source.node_id:
            return route.member
    return None


@functools.cache
def _client() -> NngClient:
    from raytorchrpc.lanes.nng.offers import NngClient  # members do not need its library

    return NngClient()


def _fetch_for(waiting: weakref.ref[Pull], source: Source, object_id: str, deadline: float) -> None:
    """Fetch an object from the source's server, for a pull that may have been dropped meanwhile."""
    try:
        if source.server is None:
            raise LaneUnavailable("nng", "it has no server for processes outside its group")
        body = _client().fetch(source.server, source.secret, object_id, max(0.001, deadline - time.monotonic()))
    except BaseException as error:
        pull = waiting()
        if pull is not None:
            pull.fail(_text(error), error)
        return
    pull = waiting()
    if pull is None:
        return
    targets = pull._targets

    def take() -> list[torch.Tensor]:
        tensors, on_gpu = Codec(ray_internals.cloudpickler()).decode(*body)
        return _placed(tensors, on_gpu) if targets is None else filled(targets, tensors)

    pull.settle(take)


def _placed(tensors: list[torch.Tensor], on_gpu: Sequence[int]) -> list[torch.Tensor]:
    """Move the tensors that the source has on a GPU to this process's GPU, if it uses one."""
    if on_gpu and _uses_gpu():
        for position in on_gpu:
            tensors[position] = tensors[position].cuda()
    return tensors


def _uses_gpu() -> bool:
    import ray

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return True
    return torch.cuda.is_available() and bool(ray.get_runtime_context().get_accelerator_ids().get("GPU"))
