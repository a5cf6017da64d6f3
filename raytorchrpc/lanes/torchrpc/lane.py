"""The torchrpc lane: requests and replies with their tensors in band, over TensorPipe, to any peer; or tensors alone,
beside the messages of another lane.

It is the only lane that carries RRefs and distributed autograd. User code never runs on torchrpc's own threads: the
served function returns a torch Future at once, which the member completes later.
"""

from __future__ import annotations

import itertools
import math
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
import torch.distributed.rpc as rpc
from torch.distributed.rpc.internal import RemoteException

from raytorchrpc._compat import torch_internals
from raytorchrpc.errors import LaneUnavailable, PeerLost, RayTorchRpcError, RemoteError, RpcTimeout
from raytorchrpc.lanes.base import (
    Arrived,
    Capabilities,
    Copies,
    Export,
    Message,
    MessageLane,
    PeerAddress,
    Pending,
    Released,
    Serve,
    Spawn,
    TensorCapabilities,
    TensorLane,
    arrived,
    checked,
    never_fetched,
)
from raytorchrpc.lanes.setup import LaneSetup
from raytorchrpc.lanes.torchrpc.agent import AgentPeer, KnownPeer, ProcessAgent, process_agent
from raytorchrpc.process.completion import nothing
from raytorchrpc.process.this_process import MallocTrimmer
from raytorchrpc.tensors.codec import NOTHING, Encoded
from raytorchrpc.tensors.cuda_streams import handoff_streams
from raytorchrpc.tensors.devices import check_mapped
from raytorchrpc.tensors.dtypes import UNCOPIED, Shape, as_copyable, copied
from raytorchrpc.tensors.exceptions import traceback_text

#: Callers wait by their own deadline. After torch's, a call would count as over while the peer still has its arguments.
_NO_LIMIT = 0.0
#: What in torch's messages says that a connection or an agent has ended.
_BROKEN = re.compile(
    "originated at tensorpipe|eof|epipe|econnre|pipe closed|not running|no longer running|shutting down", re.IGNORECASE
)
#: Shortest time between two renewals of broken connections to one peer (seconds).
_RENEW_EVERY_S = 0.5
_serving: dict[str, TorchRpcLane] = {}
"""By generation, those that serve the requests that arrive in this process."""
_trimmer = MallocTrimmer()


class TorchRpcLane(MessageLane):
    """Blocks only in ``Pending.wait``. Arguments are sent without a copy, so they must not change until the call is
    done. Addresses are AgentPeer tuples.
    """

    name: ClassVar[str] = "torchrpc"
    capabilities: ClassVar[Capabilities] = Capabilities(
        in_band_bytes=None, in_band_cuda=True, copies_at_once=False, rrefs=True
    )

    def __init__(
        self,
        me: str,
        agent: ProcessAgent,
        devices: Sequence[int],
        maps: Mapping[str, Mapping[int, int]],
        fetch_timeout_s: float = 60.0,
        generation: str = "",
    ) -> None:
        """``me``: this member's name. ``maps``: by the peer's member name, own GPU -> its GPU. ``generation``: of the
        group.
        """
        self._me, self._agent, self._generation = me, agent, generation
        self._beside = TorchRpcTensors(self, fetch_timeout_s)
        self.devices: list[int | str | torch.device] = [torch.device("cuda", index) for index in devices]
        self._maps = maps
        self.hosts: dict[str, str] = {}
        """Where peers listen, by member name."""
        self._rpc_names: dict[str, str] = {}
        """torchrpc's names, by member name."""
        self._broken: dict[str, Any] = {}
        """By member name: the WorkerInfo whose connections broke. The member may still live."""
        self._renewed_at: dict[str, float] = {}

    @property
    def beside(self) -> TorchRpcTensors:
        """See MessageLane."""
        return self._beside

    def open(self, serve: Serve, spawn: Spawn) -> AgentPeer:
        self.serve, self.spawn = serve, spawn
        _serving[self._generation] = self
        return self._agent.address

    def connect(self, peers: Sequence[PeerAddress]) -> None:
        if (identity := self._agent.identity) is not None:
            self._rpc_names[self._me] = identity.name
        self._rpc_names.update({peer.peer: peer.address.name for peer in peers})
        self.hosts.update({peer.peer: peer.address.host for peer in peers})
        self._beside.maps.update({peer.peer: peer.devices_back for peer in peers})
        addresses = ((peer.address, peer.devices_back) for peer in peers)
        mapped = [address._replace(inverse_map=back) if back else address for address, back in addresses]
        self._agent.add_peers(mapped, self._generation)

    def call(
        self, peer: str, message: Message, timeout_s: float, *, caller_waits: bool = False, on_released: Released = None
    ) -> Pending:
        return self.request(peer, _serve, _as_torch(message), _NO_LIMIT, message.body.tensors, on_released)

    def request(
        self,
        peer: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        timeout_s: float,
        tensors: Sequence[torch.Tensor] = (),
        on_released: Released = None,
    ) -> Pending:
        """Have the peer run a function of this module, whose result is what ``_as_torch`` returns."""
        worker = self._known(peer, tensors).worker
        try:
            with self._agent.sending:
                future = torch_internals.invoke_async(worker, function, args, timeout_s)
        except RuntimeError as error:
            raise self._failed(error, peer, worker, sent=False) from error
        return _TorchPending(future, partial(self._failed, peer=peer, worker=worker, sent=True), on_released)

    def remote(self, peer: str, message: Message, timeout_s: float) -> Any:
        """Like ``call``, but the result stays at the peer. Returns torch's RRef to it at once."""
        known = self._known(peer, message.body.tensors)
        if (obstacle := self._agent.rref_obstacle(known)) is not None:
            raise LaneUnavailable(self.name, f"no RRef to {peer!r}: {obstacle}")
        try:
            with self._agent.sending:
                return rpc.remote(known.worker, _serve_value, args=_as_torch(message), timeout=timeout_s)
        except RuntimeError as error:
            raise self._failed(error, peer, known.worker, sent=False) from error

    def _known(self, peer: str, tensors: Sequence[torch.Tensor]) -> KnownPeer:
        check_mapped(tensors, peer, self._maps.get(peer, {}), self.name)
        if self._agent.shares_autograd_id and torch_internals.current_autograd_context() != torch_internals.NO_CONTEXT:
            raise LaneUnavailable(
                self.name,
                "distributed autograd keeps the id of a process for life, and another member may have the same; "
                "restart this actor",
            )
        name = self._rpc_names.get(peer)
        if name is None:  # lost while this message was prepared
            raise self._unknown(peer)
        if self._broken and (broken := self._broken.get(peer)) is not None:
            # It may live: it had no descriptor left, or the network closed its connections. Do not renew them often,
            # because the supervisor soon announces a peer that is dead.
            now = time.monotonic()
            if now - self._renewed_at.get(peer, -math.inf) >= _RENEW_EVERY_S:
                self._renewed_at[peer] = now
                self._broken.pop(peer, None)
                self._agent.renew(name, broken)
        try:
            return self._agent.peer(name)
        except PeerLost as lost:
            raise PeerLost(peer, lost.cause, may_have_run=False) from lost

    def _failed(self, error: RuntimeError, peer: str, worker: Any, sent: bool) -> RayTorchRpcError:
        """Return the error to raise for one of torch: a RuntimeError for every failure, which only its text tells."""
        text = str(error)
        if "RPC ran for more than set timeout" in text:
            return RpcTimeout(f"no reply from {peer!r} in time over torchrpc; the call may still run there")
        if "has left the group" in text or "could not find destination" in text:  # the latter: it was removed just now
            return PeerLost(peer, "it has left the group", may_have_run=False)
        if not _BROKEN.search(text):
            return RayTorchRpcError(f"torchrpc failed between this member and {peer!r}: {text}")
        if peer in self._rpc_names:
            self._broken[peer] = worker
        return PeerLost(peer, text.split("(this error originated")[0].strip(), may_have_run=sent)

    def disconnect(self, peer: str) -> None:
        self._broken.pop(peer, None)
        self.hosts.pop(peer, None)
        name = self._rpc_names.pop(peer, None)
        if name is not None and peer != self._me:  # the agent outlives the group, and keeps its own entry
            self._agent.remove_peer(name, self._generation)

    def close(self) -> None:
        if _serving.get(self._generation) is self:
            del _serving[self._generation]
        for peer in list(self._rpc_names):
            self.disconnect(peer)


class TorchRpcTensors(TensorLane):
    """Carries tensors, and the RRefs of a result, beside the messages of another lane: the sender keeps them, and the
    receiver fetches them.
    """

    name: ClassVar[str] = "torchrpc"
    capabilities: ClassVar[TensorCapabilities] = TensorCapabilities(
        devices=frozenset({"cpu", "cuda"}), reads_later=True
    )

    def __init__(self, lane: TorchRpcLane, fetch_timeout_s: float) -> None:
        self._lane, self._fetch_timeout_s = lane, fetch_timeout_s
        self.maps: dict[str, Mapping[int, int]] = {}
        """By peer: own GPU -> the peer's, for what the peer fetches."""
        self._closed = False

    def open(self) -> None:
        """Do nothing: the message lane listens."""

    def export(self, tensors: Sequence[torch.Tensor], peer: str, devices: Mapping[Any, Any]) -> Export:
        for index in {tensor.device.index for tensor in tensors if tensor.is_cuda}:
            there = self.maps.get(peer, {}).get(index)
            if there != devices.get(index) or torch.device("cuda", index) not in self._lane.devices:
                raise LaneUnavailable(
                    self.name, f"its agents have no map of both directions between cuda:{index} and member {peer!r}"
                )
        # torch would send the storage behind a view, and the strides: elements that overlap would arrive so.
        whole = [
            tensor if tensor.is_contiguous() else as_copyable(tensor).contiguous().view(tensor.dtype)
            for tensor in tensors
        ]
        return self._keep(peer, Encoded(b"", whole, (), 0), handoff_streams(whole))

    def export_rrefs(self, rrefs: Sequence[Any], peer: str) -> Export:
        """As ``export``; ``read`` without shapes returns the RRefs."""
        return self._keep(peer, Encoded(b"", (), rrefs, 0), nothing)

    def _keep(self, peer: str, body: Encoded, make_current: Callable[[], None]) -> Export:
        number = next(_numbers)
        _kept[number] = _Kept(self, peer, Message((), body, make_current))
        forget = partial(_kept.pop, number, None)
        if self._closed or peer not in self._lane._rpc_names:  # or it was forgotten before this was kept
            forget()
            raise LaneUnavailable(self.name, f"this member or {peer!r} has left the group")
        return Export(number, forget, forget)

    @checked
    def read(self, peer: str, descriptor: Any, shapes: Sequence[Shape], copies: Copies | None = None) -> Arrived:
        try:
            with torch_internals.autograd_context(torch_internals.NO_CONTEXT):
                pending = self._lane.request(peer, _hand_over, (descriptor, self._lane._me), self._fetch_timeout_s)
                if not pending.wait(self._fetch_timeout_s):
                    raise RpcTimeout(f"no tensors from {peer!r} in time over torchrpc")
                header, body = pending.take()[:2]
        except BaseException:
            self.release(peer, descriptor)  # it may be kept there yet
            raise
        if header:
            raise never_fetched(peer)
        if not shapes:
            return list(body.rrefs)
        if [(tensor.dtype, tuple(tensor.shape)) for tensor in body.tensors] != list(shapes):
            raise ValueError("other tensors arrived than the message tells of")
        return arrived(body.tensors, copies)

    def release(self, peer: str, descriptor: Any) -> None:
        with suppress(RayTorchRpcError):
            self._lane.request(peer, _drop, (descriptor, self._lane._me), self._fetch_timeout_s)

    def disconnect(self, peer: str) -> None:
        self.maps.pop(peer, None)
        self._forget(peer)

    def close(self) -> None:
        self._closed = True
        self._forget()

    def _forget(self, *peers: str) -> None:
        """What is kept for these peers; without any, for all."""
        for number, kept in _kept.copy().items():
            if kept.lane is self and (not peers or kept.peer in peers):
                _kept.pop(number, None)


class _Kept(NamedTuple):
    """What one peer may fetch."""

    lane: TorchRpcTensors
    peer: str
    message: Message


_kept: dict[int, _Kept] = {}
_numbers = itertools.count(secrets.randbits(60))  # unlike those of an earlier process of this member


def _take(number: int, peer: str) -> _Kept | None:
    kept = _kept.get(number)
    return _kept.pop(number, None) if kept is not None and kept.peer == peer else None


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def _hand_over(number: int, peer: str) -> torch.futures.Future[Any]:
    """Reply with what is kept for that peer under that number, once. Runs on a torchrpc thread."""
    kept = _take(number, peer)
    message = _GONE if kept is None else kept.message
    future: torch.futures.Future[Any] = torch.futures.Future(devices=[] if kept is None else kept.lane._lane.devices)
    message.make_current()
    future.set_result(_as_torch(message))
    return future


def _drop(number: int, peer: str) -> tuple[Any, ...]:
    """That peer will not fetch what is kept for it under that number."""
    _take(number, peer)
    return _as_torch(_GONE)


_GONE = Message(("gone",), NOTHING)


class AbsentLane(MessageLane):
    """Takes the place of TorchRpcLane between members that do not use torchrpc: refuses every call, with the reason."""

    name: ClassVar[str] = "torchrpc"
    capabilities: ClassVar[Capabilities] = Capabilities(
        in_band_bytes=0, in_band_cuda=False, copies_at_once=True, rrefs=False
    )

    def __init__(self, reason: str, remedy: str = "allow it in GroupConfig.lanes") -> None:
        """``reason``: why torchrpc is not used."""
        self._reason, self._remedy = reason, remedy

    def open(self, serve: Serve, spawn: Spawn) -> None:
        """Do nothing."""

    @property
    def beside(self) -> NoReturn:
        """Raises LaneUnavailable."""
        self.call()

    def call(self, *request: Any, **options: Any) -> NoReturn:
        raise LaneUnavailable(self.name, f"{self._reason}; RRefs and distributed autograd need it: {self._remedy}")

    remote = call


class _TorchPending(Pending):
    __slots__ = ("_failed", "_future")

    def __init__(
        self,
        future: torch.futures.Future[Any],
        failed: Callable[[RuntimeError], RayTorchRpcError],
        on_released: Released,
    ) -> None:
        super().__init__(on_released)
        self._future, self._failed = future, failed
        future.add_done_callback(lambda _: self.settle(None))

    def take(self) -> Message:
        try:
            # Makes this thread's CUDA streams wait for the tensors, so it runs on this thread.
            header, *body = self._future.wait()
        except RuntimeError as error:
            raise self._failed(error) from error
        return Message(header, _received(Encoded(*body)))


def _received(body: Encoded) -> Encoded:
    for tensor in body.tensors:
        if tensor.is_cpu:
            torch_internals.make_resizable(tensor)
    return _counted(body)


def _counted(body: Encoded) -> Encoded:
    if body.tensors:
        _trimmer.count(sum(tensor.nbytes for tensor in body.tensors if tensor.is_cpu))
    return body


def _as_torch(message: Message) -> tuple[Any, ...]:
    """Return what torch sends of a message: its header, and the fields of its body."""
    body = _counted(message.body)
    # torch sends a small part of a large storage as a clone, and aborts the process if it cannot clone the dtype.
    tensors = [copied(tensor) if tensor.dtype in UNCOPIED else tensor for tensor in body.tensors]
    return message.header, body.payload, tensors, list(body.rrefs), body.buffers


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def _serve(*request: Any) -> torch.futures.Future[Any]:
    """Pass a request on, and return a Future of the reply. Runs on a torchrpc thread."""

    def reply(future: torch.futures.Future[Any], message: Message) -> None:
        result = _as_torch(message)  # raises for want of memory: then nothing is sent
        try:
            future.set_result(result)
        except RuntimeError as error:  # a tensor on a device that the agent does not have
            future.set_exception(error)

    return _pass_on(request, reply)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def _serve_value(*request: Any) -> torch.futures.Future[Any]:
    """Like ``_serve``, for ``remote``: the reply's header holds the result itself, which stays here."""

    def reply(future: torch.futures.Future[Any], message: Message) -> None:
        failed, value = message.header
        # A torch Future's exception would become the RRef's value, but torch raises a RemoteException in to_here().
        future.set_result(_remote_exception(value) if failed else value)

    return _pass_on(request, reply)


def _pass_on(
    request: tuple[Any, ...], reply: Callable[[torch.futures.Future[Any], Message], None]
) -> torch.futures.Future[Any]:
    header, *body = request
    serving = _serving.copy()
    # The only one refuses what is not meant for it.
    lane = serving.popitem()[1] if len(serving) == 1 else serving.get(header[2].partition(".")[0])
    if lane is None:
        raise RuntimeError("raytorchrpc: this process has left the group")
    future: torch.futures.Future[Any] = torch.futures.Future(devices=lane.devices)
    encoded = _received(Encoded(*body))
    work = lane.serve(Message(header, encoded, handoff_streams(encoded.tensors)), partial(reply, future))
    if work is not None:
        lane.spawn(work)
    return future


def _remote_exception(error: BaseException) -> RemoteException:
    """Return the error as torch carries it: a text, and a type to raise. RemoteError if its own type cannot be used."""
    cls: type[BaseException] = type(error)
    try:
        text = str(error.args[0] if len(error.args) == 1 else error)
        usable = cls.__module__ in ("builtins", RayTorchRpcError.__module__) and str(cls(text)) == str(error)
    except BaseException:  # its constructor needs other arguments, or its text fails
        usable = False
    if not usable or not isinstance(error, Exception):
        cls, text = RemoteError, traceback_text(error)
    return RemoteException(text.encode("unicode_escape").decode(), cls)  # torch unescapes it


def make(setup: LaneSetup) -> TorchRpcLane:
    """See registry.Lane.make. The process's agent must be running."""
    timeout_s = setup.config.rpc_timeout_s
    generation = setup.credentials.generation
    return TorchRpcLane(setup.member, process_agent(), setup.devices, setup.device_maps, timeout_s, generation)
