"""The tensors of objects: kept in the process that made them, and pulled from it.

A member of the group fetches them with an ordinary call, which a thread of the source's own serves. Any other process
uses an nng server, which starts with the first object. Neither needs the actor's own thread.
"""

from __future__ import annotations

import functools
import logging
import os
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import ray
import torch

from raytorchrpc._compat import ray_internals, torch_internals
from raytorchrpc.calls import scope as _scope
from raytorchrpc.calls.client.outgoing import OutgoingCall
from raytorchrpc.calls.member import LocalMember, current
from raytorchrpc.calls.options import CallOptions
from raytorchrpc.calls.peers import Member
from raytorchrpc.calls.server.exposed import Exposed
from raytorchrpc.calls.server.services import DeferredReply
from raytorchrpc.errors import LaneUnavailable, NotAMember, PeerLost, RpcTimeout, SerializationError, TransferFailed
from raytorchrpc.process import this_process
from raytorchrpc.process.locks import Lock
from raytorchrpc.process.workers import Workers
from raytorchrpc.tensors.codec import Codec, Encoded
from raytorchrpc.tensors.cuda_streams import handoff_streams
from raytorchrpc.tensors.dtypes import FREED, dense_obstacle, is_freed
from raytorchrpc.tensors.host_device_copy import copy_into

if TYPE_CHECKING:
    from raytorchrpc.lanes.nng.offers import NngClient, NngServer, OfferAddress

logger = logging.getLogger(__name__)

#: The name for ``@ray.method(tensor_transport=...)`` and ``ray.put(..., _tensor_transport=...)``.
TRANSPORT = "TORCHRPC"

#: The name of the service with which every member serves pulls.
PULL = "<pull>"


class Source(NamedTuple):
    """The process that keeps an object's tensors; picklable. It travels with the ObjectRef."""

    node_id: str
    pid: int
    process: str  # ``this_process.unique``, because pids are reused
    shown: str  # names the process in messages
    server: OfferAddress | None  # for processes outside its group; None if the server could not start
    secret: bytes  # authenticates processes at the server


class _Kept:
    """The tensors of one object, as the method returned them."""

    __slots__ = ("_handoff", "_streams", "tensors")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raises SerializationError for a tensor whose storage was freed."""
        self.tensors = list(tensors)
        self._refuse_freed()
        # CUDA work that computes them may still be queued on this thread's streams; other threads read them.
        self._handoff = handoff_streams(self.tensors)
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        self._streams = [torch.cuda.current_stream(device) for device in devices]

    def make_current(self) -> None:
        """Order this thread's CUDA streams after what computes the tensors.

        Raises SerializationError if the program has freed the storage of one since.
        """
        self._refuse_freed()
        self._handoff()

    def _refuse_freed(self) -> None:
        for tensor in self.tensors:
            if dense_obstacle(tensor) is None and is_freed(tensor):
                raise SerializationError(f"a tensor of shape {tuple(tensor.shape)} of this object {FREED}")

    def let_go(self) -> None:
        """Order later writes on the streams that made the tensors after all reads."""
        lanes = [lane for local in current.members.values() for lane in local.tensor_lanes.copy().values()]
        for stream in self._streams:
            with torch.cuda.stream(stream):
                for lane in lanes:
                    lane.fence(stream.device.index)


_lock = Lock()
_objects: dict[str, _Kept] = {}
_server: tuple[NngServer, OfferAddress | None, bytes] | None = None
"""With its address, None if it could not start, and its secret."""


def keep(object_id: str, tensors: Sequence[torch.Tensor]) -> None:
    """Keep an object's tensors until ``drop``; to be called on the thread, and streams, that made them."""
    kept = _Kept(tensors)
    with _lock:
        _objects[object_id] = kept
    if _server is not None:
        _server[0].offer(object_id, partial(_on_cpu, kept))


def drop(object_id: str) -> None:
    """Drop an object's tensors. Pulls in flight still get them."""
    with _lock:
        kept = _objects.pop(object_id, None)
    if _server is not None:
        _server[0].withdraw(object_id)
    if kept is not None:
        kept.let_go()


def held() -> int:
    """The number of objects whose tensors this process keeps: those with live ObjectRefs, and pulls in flight."""
    return len(_objects)


def tensors_of(object_id: str, process: str) -> _Kept:
    """The kept tensors of an object. Raises LookupError if there are none, or another process has them."""
    kept = _objects.get(object_id) if process == this_process.unique else None
    if kept is None:
        raise LookupError(
            "the actor was restarted since it made the object"
            if process != this_process.unique
            else "the object is not kept there any more: its last ObjectRef was dropped"
        )
    return kept


def _pull(instance: Any, object_id: str, process: str, to_cpu: bool) -> list[torch.Tensor]:
    """The service for members: the tensors of an object."""
    kept = tensors_of(object_id, process)
    kept.make_current()
    return [tensor.cpu() for tensor in kept.tensors] if to_cpu else kept.tensors


SERVICES = {PULL: Exposed(_pull, concurrent=True, frozen=True)}


def _on_cpu(kept: _Kept) -> Encoded:
    """The tensors as the server sends them: all on the CPU, with the positions of those that are on a GPU here."""
    kept.make_current()
    on_gpu = [position for position, tensor in enumerate(kept.tensors) if tensor.is_cuda]
    tensors = [tensor.cpu() for tensor in kept.tensors] if on_gpu else kept.tensors
    return Codec(ray_internals.cloudpickler()).encode((tensors, on_gpu), own=True)


def here(node_id: str, node_ip: str, shown: str) -> Source:
    """This process as a source. Starts the server at the first call."""
    global _server
    with _lock:
        _, address, secret = _server = _server or _started(node_ip)
    if names := [f"member {local.me.name!r} of group {local.group!r}" for local in current.members.values()]:
        shown = " and ".join(names)
    return Source(node_id, os.getpid(), this_process.unique, shown, address, secret)


def _started(node_ip: str) -> tuple[NngServer, OfferAddress | None, bytes]:
    from raytorchrpc.lanes.nng.offers import NngServer  # only processes that create objects need its library

    secret = os.urandom(32)
    server = NngServer("objects", secret, tcp_host=node_ip)
    try:
        return server, server.open(), secret
    except LaneUnavailable as error:
        logger.warning("only members of its group can get objects from this process: %s", error)
        return server, None, secret


# --- at the receiver -------------------------------------------------------------------------------------------------

#: A pull may take this share of Ray's time limit for a transfer: its own error says more than Ray's.
_SHARE_OF_TIME = 0.8
#: How often a wait checks whether Ray has aborted the transfer (seconds).
_CHECK_S = 0.1
#: Errors of the group's lanes after which the source's server is asked.
_UNREACHABLE = (PeerLost, NotAMember, LaneUnavailable)

_workers = Workers("raytorchrpc-pull")
_in_flight: weakref.WeakSet[Pull] = weakref.WeakSet()
_pulls_lock = Lock()


def abort(object_id: str) -> None:
    """End the pulls of this object that are in flight here: waits for them raise TransferFailed."""
    with _pulls_lock:
        pulls = [pull for pull in _in_flight if pull.object_id == object_id]
    for pull in pulls:
        pull.fail("Ray aborted the transfer")


class Pull:
    """One pull of an object's tensors. Its constructor starts it; it blocks only until the request is sent."""

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
        self._call: OutgoingCall | None = None
        """To the source, if it is a member: the waiting thread reads its reply, so no other thread has to wake."""
        with _pulls_lock:
            _in_flight.add(self)
        shared = _member_at(source)
        if source.process == this_process.unique:
            self._arrived.settle(self._own)
        elif shared is not None:
            self._ask_member(*shared, caller_waits)
        else:
            self._ask_server()

    def _own(self) -> list[torch.Tensor]:
        kept = tensors_of(self.object_id, self._source.process)
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
        except Exception as error:  # it may have to connect first, and to wait until the call may be sent
            self.fail(_text(error, self._on_gpu), error)

    def _ask_server(self) -> None:
        _workers.submit(_fetch_for, weakref.ref(self), self._source, self.object_id, self._deadline)

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
            seconds = until - time.monotonic()
            if call.wait(max(0.0, min(seconds, _CHECK_S))):
                self.settle(partial(_outcome, call))
            elif seconds <= 0:
                self._call = call  # for the next wait
                return False
        return self._arrived.wait(max(0.0, until - time.monotonic()))

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


def _outcome(call: OutgoingCall) -> list[torch.Tensor]:
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
    """The targets, on any device, filled from the tensors. Raises ValueError for one that does not fit, or is freed."""
    for target, tensor in zip(targets, tensors, strict=True):
        if is_freed(target):
            raise ValueError(f"a target of shape {tuple(target.shape)} {FREED}")
        if (target.dtype, target.shape) != (tensor.dtype, tensor.shape):
            given, wanted = (f"{one.dtype} {tuple(one.shape)}" for one in (tensor, target))
            raise ValueError(f"a tensor of {given} cannot be received into one of {wanted}")
    copy_into([target.detach() for target in targets], [tensor.detach() for tensor in tensors])
    return list(targets)


def _text(error: BaseException, on_gpu: bool = False) -> str:
    if isinstance(error, LaneUnavailable) and on_gpu:
        return f"{error.reason}; or get it with ray.experimental.set_target_device_for_ref(ref, 'cpu')"
    if isinstance(error, PeerLost):
        return f"it is gone, or cannot be reached from here ({error.cause})"
    known = isinstance(error, (LookupError, LaneUnavailable, RpcTimeout))
    return str(error.args[0]) if known and error.args else f"{type(error).__name__}: {error}"


def _member_at(source: Source) -> tuple[LocalMember, Member] | None:
    """The membership by which this process reaches the source, and the member there, if they share a group."""
    for local in current.members.values():
        for member in local.peers.members:
            if member.pid == source.pid and member.node_id == source.node_id:
                return local, member
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
        tensors: list[torch.Tensor]
        tensors, on_gpu = Codec(ray_internals.cloudpickler()).decode(*body)
        if targets is not None:
            return filled(targets, tensors)
        if on_gpu and _uses_gpu():  # what the source has on a GPU goes to the GPU of this process
            for position in on_gpu:
                tensors[position] = tensors[position].cuda()
        return tensors

    pull.settle(take)


def _uses_gpu() -> bool:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return True
    return torch.cuda.is_available() and bool(ray.get_runtime_context().get_accelerator_ids().get("GPU"))
