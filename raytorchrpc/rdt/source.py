"""The side of Ray Direct Transport that has the tensors: keeps them, and gives them to whoever asks.

A member of the group asks by an ordinary call, which is answered on a thread of the member's own. Anybody else asks at
the door, an nng server that opens with the first object. The actor's own thread is needed for neither.
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
from raytorchrpc.calls.current import current_local
from raytorchrpc.calls.exposed import Exposed
from raytorchrpc.calls.services import builtin_services
from raytorchrpc.errors import LaneUnavailable
from raytorchrpc.tensors.codec import Codec, Encoded
from raytorchrpc.tensors.cuda_streams import handoff_streams

if TYPE_CHECKING:
    from raytorchrpc.lanes.nng.offers import NngServer, OfferAddress

logger = logging.getLogger(__name__)

#: The name under which every member serves pulls.
PULL = "<pull>"


class Source(NamedTuple):
    """Where an object's tensors are; picklable. It travels with the ObjectRef."""

    node_id: str
    pid: int
    process: bytes
    """Random, made once in the life of a process: pids come back."""
    shown: str
    """Who it is, for messages."""
    door: OfferAddress | None
    """For those who are not in its group; None if it could not be opened."""
    secret: bytes
    """What has to be known at the door."""


class _Kept:
    """The tensors of one object, as they were when Ray took them."""

    __slots__ = ("_streams", "make_current", "tensors")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = list(tensors)
        # This thread queued what makes them, if that still runs; other threads read them.
        self.make_current = handoff_streams(self.tensors)
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        self._streams = [torch.cuda.current_stream(device) for device in devices]

    def let_go(self) -> None:
        """Whoever writes to the tensors from now on, on the stream that made them, does so after all who read them."""
        local = current_local()
        lanes = () if local is None else tuple(local.tensor_lanes.values())
        for stream in self._streams:
            with torch.cuda.stream(stream):
                for lane in lanes:
                    lane.fence(stream.device.index)


class _Door(NamedTuple):
    server: NngServer
    address: OfferAddress | None
    secret: bytes


_lock = threading.Lock()
_objects: dict[str, _Kept] = {}
_process = os.urandom(16)
_door: _Door | None = None


def process_token() -> bytes:
    """This process's, as in ``Source.process``."""
    return _process


def keep(object_id: str, tensors: Sequence[torch.Tensor]) -> None:
    """Hold an object's tensors until ``drop``; to be called on the thread, and streams, that made them."""
    kept = _Kept(tensors)
    with _lock:
        _objects[object_id] = kept
    if _door is not None:
        _door.server.offer(object_id, partial(_for_strangers, kept))


def drop(object_id: str) -> None:
    """Hold it no more. Pulls under way still get it."""
    with _lock:
        kept = _objects.pop(object_id, None)
    if _door is not None:
        _door.server.withdraw(object_id)
    if kept is not None:
        kept.let_go()


def held() -> int:
    """Objects that are kept."""
    return len(_objects)


def tensors_of(object_id: str, process: bytes) -> _Kept:
    """What is kept of an object. Raises LookupError if that is nothing, or another process's."""
    kept = _objects.get(object_id) if process == _process else None
    if kept is None:
        raise LookupError(
            "the actor was restarted since it made the object"
            if process != _process
            else "the object is not kept there any more: its last ObjectRef was dropped"
        )
    return kept


def _pull(instance: Any, object_id: str, process: bytes, to_cpu: bool) -> list[torch.Tensor]:
    """What members call: the tensors of an object."""
    kept = tensors_of(object_id, process)
    kept.make_current()
    return [tensor.cpu() for tensor in kept.tensors] if to_cpu else kept.tensors


builtin_services[PULL] = Exposed(_pull, True, None, False, False, False, frozen=True)


def _for_strangers(kept: _Kept) -> Encoded:
    """The tensors as the door gives them: all on the CPU, with the positions of those that are on a GPU here."""
    kept.make_current()
    on_gpu = [position for position, tensor in enumerate(kept.tensors) if tensor.is_cuda]
    tensors = [tensor.cpu() for tensor in kept.tensors] if on_gpu else kept.tensors
    return Codec(ray_internals.cloudpickler()).encode((tensors, on_gpu), own=True)


def here(node_id: str, node_ip: str, shown: str) -> Source:
    """This process as a source. Opens the door at the first call."""
    global _door
    with _lock:
        door = _door = _door or _opened(node_ip)
    local = current_local()
    if local is not None:
        shown = f"member {local.me.name!r} of group {local.group!r}"
    return Source(node_id, os.getpid(), _process, shown, door.address, door.secret)


def _opened(node_ip: str) -> _Door:
    from raytorchrpc.lanes.nng.offers import NngServer  # only those who make objects need its library

    secret = os.urandom(32)
    server = NngServer("objects", secret, tcp_host=node_ip)
    try:
        return _Door(server, server.open(), secret)
    except LaneUnavailable as error:
        logger.warning("only members of its group can get objects of this process: %s", error)
        return _Door(server, None, secret)
