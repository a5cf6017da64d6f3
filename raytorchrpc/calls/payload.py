"""Decides how a body travels: by which lane, in the message or out of band, copied to which device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from typing import Any

import torch

from raytorchrpc._compat import torch_internals
from raytorchrpc.calls.out_of_band import Payload, PayloadSplitter, PendingTensors, joined, owned, snapshot
from raytorchrpc.calls.peers import PeerRoute
from raytorchrpc.calls.protocol import STREAM, ReplyHeader
from raytorchrpc.errors import RayTorchRpcError
from raytorchrpc.lanes.base import Message, MessageLane, Pending
from raytorchrpc.process.workers import DeferredCleanup
from raytorchrpc.tensors import host_device_copy
from raytorchrpc.tensors.codec import Encoded
from raytorchrpc.tensors.cuda_streams import check_mapped
from raytorchrpc.tensors.devices import CPU, Device


class PayloadStep:
    """The payload step of one member: packs what it sends, unpacks what it receives. Thread-safe."""

    def __init__(self, rank: int, splitter: PayloadSplitter, cleanup: DeferredCleanup) -> None:
        """``rank``: of this member. ``cleanup``: discards what nobody takes."""
        self._rank, self._splitter, self.cleanup = rank, splitter, cleanup

    def pack_request(self, route: PeerRoute, method: str, body: Encoded, share: bool) -> tuple[MessageLane, Payload]:
        """The lane for a request, and its payload. Raises LaneUnavailable. Blocks while tensors are copied.

        ``share``: CUDA tensors may be shared with a peer on the same GPU instead of copied.
        """
        # The tensors that a method computes from its own parameters belong to the caller's autograd context too.
        if body.rrefs or torch_internals.current_autograd_context() != torch_internals.NO_CONTEXT:
            return route.fabric, _in_message(body, route.devices)
        if not body.tensors:
            return route.tensors if method in route.heavy_results else route.calls, Payload(body)
        lane = route.calls
        if lane.capabilities.carries(body.tensors):
            return lane, _in_message(body, route.devices)
        self._check_mapped(route, body.tensors, route.devices)
        share = share and _on_one_gpu(body, route.devices, route.same_gpus)
        payload = self._split(route, lane, body, route.devices, share)
        return (route.tensors, _in_message(body, route.devices)) if payload is None else (lane, payload)

    def pack_reply(
        self, route: PeerRoute, lane: MessageLane, body: Encoded, share: bool, frozen: bool
    ) -> tuple[bool, Payload]:
        """Whether ``lane``, which brought the request, can carry the result, and the payload. If it cannot, the caller
        has to fetch the payload over another lane. Raises LaneUnavailable. Blocks while tensors are copied.

        ``share``: as for ``pack_request``. ``frozen``: this process does not change the tensors any more. All others
        are copied if a lane reads them later and the actor may still hold them.
        """
        can, devices = lane.capabilities, route.devices_back
        if not body.tensors:
            return can.rrefs or not body.rrefs, Payload(body)
        self.check_reply(route, body.tensors)
        if can.carries(body.tensors) and (can.rrefs or not body.rrefs):
            body = host_device_copy.outbound(body, devices)
            as_is = can.copies_at_once or any(tensor.requires_grad for tensor in body.tensors)
            return True, Payload(body if as_is else _unshared(body, frozen))
        if not body.rrefs:
            share = share and _on_one_gpu(body, devices, route.same_gpus)
            # A lane copies what stays on GPUs later, from where it is.
            later = any(tensor.is_cuda and not host_device_copy.goes_to_cpu(tensor, devices) for tensor in body.tensors)
            split = snapshot(body) if later and not share and not frozen else body
            payload = self._split(route, lane, split, devices, share)
            if payload is not None:
                return True, payload
        return False, Payload(_unshared(host_device_copy.outbound(body, devices), frozen))

    def check_reply(self, route: PeerRoute, tensors: Sequence[torch.Tensor]) -> None:
        """Raise LaneUnavailable for a result on a GPU that has no mapping to that caller."""
        self._check_mapped(route, tensors, route.devices_back)

    def receive(self, route: PeerRoute, message: Message) -> list[PendingTensors]:
        """Take charge of a message's out-of-band tensors; to be called for every message that has any.

        Raises LaneUnavailable after this process has left the group.
        """
        return self._splitter.receive(route.member.name, message.manifests)

    def discard_reply(self, route: PeerRoute, pending: Pending, close_stream: Callable[[int], None]) -> None:
        """Discard the out-of-band tensors of a reply that nobody takes, once it arrives, and close the stream that it
        opens. For finalizers: no lock. ``close_stream(number)``: likewise.
        """
        self.cleanup.leave(_discard_when_done, self._splitter, route.member.name, pending, close_stream)

    def unpack(
        self, message: Message, pending: Sequence[PendingTensors], *, arrives_on: Device | None = None, keep: bool
    ) -> Encoded:
        """The body of a message with all its tensors, on the thread that will use them. Blocks while they are fetched.

        Args:
            pending: what ``receive`` returned.
            arrives_on: the GPU to copy CPU tensors to; None or "cpu" leaves them.
            keep: copy each tensor into memory of its own.
        """
        body = message.body
        if pending:
            body = joined(body, pending)
        if arrives_on is not None and arrives_on != CPU and body.tensors:
            body = host_device_copy.inbound(body, arrives_on)
        return owned(body) if keep else body

    def _check_mapped(self, route: PeerRoute, tensors: Sequence[torch.Tensor], devices: Mapping[Any, Device]) -> None:
        if route.member.rank != self._rank:
            check_mapped(tensors, route.member.name, devices, "torchrpc")

    def _split(
        self, route: PeerRoute, lane: MessageLane, body: Encoded, devices: Mapping[Device, Device], share: bool
    ) -> Payload | None:
        """Export what the message cannot hold; None if no tensor lane takes it."""
        if not route.beside and CPU not in devices.values():
            return None
        in_band = lane.capabilities.in_band_bytes or 0
        return self._splitter.split(body, route.member.name, route.beside, devices, in_band, share)


def _discard_when_done(
    splitter: PayloadSplitter, peer: str, pending: Pending, close_stream: Callable[[int], None]
) -> None:
    pending.add_done_callback(lambda: _discard(splitter, peer, pending, close_stream))


def _discard(splitter: PayloadSplitter, peer: str, pending: Pending, close_stream: Callable[[int], None]) -> None:
    try:
        message = pending.take()
    except RayTorchRpcError as error:  # the call failed: nothing came
        error.__traceback__ = None  # nothing else has seen it; its frames lead to the call, which leads to it
        return
    header = ReplyHeader(*message.header)
    if header.kind == STREAM:
        close_stream(header.number)
    with suppress(RayTorchRpcError):
        splitter.receive(peer, message.manifests).clear()


def _in_message(body: Encoded, devices: Mapping[Device, Device]) -> Payload:
    return Payload(host_device_copy.outbound(body, devices))


def _unshared(body: Encoded, frozen: bool) -> Encoded:
    # A lane that reads CUDA tensors later cannot be told when they may change again: those are copied even if frozen.
    return body if frozen and not any(tensor.is_cuda for tensor in body.tensors) else snapshot(body)


def _on_one_gpu(body: Encoded, devices: Mapping[Device, Device], same: Set[tuple[Any, Any]]) -> bool:
    """Whether each CUDA tensor that stays on a GPU arrives on the same physical GPU."""
    stay = (tensor for tensor in body.tensors if tensor.is_cuda and not host_device_copy.goes_to_cpu(tensor, devices))
    indices = {tensor.device.index for tensor in stay}
    return bool(same) and all((index, devices.get(index)) in same for index in indices)
