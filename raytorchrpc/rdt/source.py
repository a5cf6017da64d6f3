"""The sending side of Ray Direct Transport: keeps the tensors of objects until they are fetched.

A member of the group fetches them with an ordinary call, which a thread of the member's own serves. Any other process
uses an nng server, which starts with the first object. Neither needs the actor's own thread.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from raytorchrpc._compat import ray_internals
from raytorchrpc.calls.member import current_local
from raytorchrpc.calls.server.exposed import Exposed
from raytorchrpc.calls.server.services import builtin_services
from raytorchrpc.errors import LaneUnavailable
from raytorchrpc.lanes.base import windows
from raytorchrpc.process import this_process
from raytorchrpc.tensors.codec import Codec, Encoded
from raytorchrpc.tensors.cuda_streams import handoff_streams

if TYPE_CHECKING:
    from raytorchrpc.lanes.nng.offers import NngServer, OfferAddress

logger = logging.getLogger(__name__)

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

    __slots__ = ("_streams", "make_current", "tensors")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = list(tensors)
        # CUDA work that computes them may still be queued on this thread's streams; other threads read them.
        self.make_current = handoff_streams(self.tensors)
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        self._streams = [torch.cuda.current_stream(device) for device in devices]

    def let_go(self) -> None:
        """Order later writes on the streams that made the tensors after all reads."""
        local = current_local()
        lanes = () if local is None else windows(local.tensor_lanes)
        for stream in self._streams:
            with torch.cuda.stream(stream):
                for lane in lanes:
                    lane.fence(stream.device.index)


_lock = threading.Lock()
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
    """The number of objects that are kept."""
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


builtin_services[PULL] = Exposed(_pull, True, None, False, False, False, frozen=True)


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
    local = current_local()
    if local is not None:
        shown = f"member {local.me.name!r} of group {local.group!r}"
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
