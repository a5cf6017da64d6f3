"""What the nccl lane asks of the library that moves its bytes, and the answers of NCCL and CUDA.

Tests subclass ``Carrier`` and ``Channel``, to run the lane's protocol, deadlines and failures without a GPU.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from raytorchrpc.lanes.common import packing
from raytorchrpc.lanes.nccl.libnccl import Broken, library
from raytorchrpc.process import threads
from raytorchrpc.tensors.dtypes import Shape

#: Whether a device has reached a point in its queue of work. Never waits.
Mark = Callable[[], bool]


def _mark(stream: torch.cuda.Stream) -> Mark:
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    reached: Mark = event.query
    return reached


class Channel:
    """Joins two processes, to move tensors in one direction: a communicator of two ranks, with a stream of its own.

    Both ends begin the same transfers in the same order. No method waits for the peer or the device: it begins an
    operation, and the next one may begin once ``enqueued`` returns True. ``abort`` may be called at any time, the other
    methods by one thread at a time.
    """

    def __init__(self, ticket: bytes, end: int, device: int) -> None:
        self._end, self._device = end, device
        self._lock = threading.Lock()
        self._last: Mark | None = None
        self._stream = library().take_stream(device)
        try:
            self._comm: ctypes.c_void_p | None = library().join(ticket, end, device)
        except BaseException:
            library().give_back(device, self._stream)
            raise

    def _with_comm(self, use: Callable[[ctypes.c_void_p], Any]) -> Any:
        with self._lock:  # so that ``abort`` does not free a communicator in use
            if self._comm is None:
                raise Broken("the channel was aborted")
            return use(self._comm)

    def enqueued(self) -> bool:
        """Whether the device has queued the last operation (the join, or a transfer). Raises Broken."""
        return bool(self._with_comm(library().enqueued))

    def room(self, shapes: Sequence[Sequence[Shape]]) -> list[torch.Tensor]:
        """Allocate memory for each piece of a message: a tensor for one shape, a flat one for several of one dtype."""
        # On this channel's stream, so that it need not wait for what the user has queued.
        with torch.cuda.stream(self._stream):
            return [packing.room(piece, torch.device("cuda", self._device)) for piece in shapes]

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Begin to send tensors, which are contiguous and complete. Keeps their memory until sent. Raises Broken."""
        for tensor in tensors:
            tensor.record_stream(self._stream)
        self._move(tensors)

    def receive(self, tensors: Sequence[torch.Tensor]) -> None:
        """Begin to receive into contiguous tensors, from ``room`` or passed to ``follow``. Raises Broken."""
        self._move(tensors)

    def _move(self, tensors: Sequence[torch.Tensor]) -> None:
        stream: int = self._stream.cuda_stream
        self._with_comm(lambda comm: library().move(comm, self._end, tensors, stream))

    def follow(self, tensors: Sequence[torch.Tensor]) -> None:
        """Order the next operation after what the calling thread has queued so far on its own tensors."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for tensor in tensors:
            tensor.record_stream(self._stream)

    def mark(self) -> Mark:
        """Return a mark behind all operations, which must be enqueued. Raises Broken."""
        return _mark(self._stream)

    def make_current(self, tensors: Sequence[torch.Tensor]) -> None:
        """Hand tensors that have arrived over to the calling thread's stream."""
        stream = torch.cuda.current_stream(self._device)
        for tensor in tensors:
            tensor.record_stream(stream)

    def precede(self) -> None:
        """Order what the calling thread queues from now on after what was sent. From any thread; never raises."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def abort(self) -> None:
        """Abandon transfers in progress and free everything, in the background. Idempotent; never waits or raises."""
        with self._lock:
            comm, self._comm = self._comm, None
        if comm is not None:
            # It waits for the device, as does the memory that it frees, so it runs on a thread of its own.
            try:
                threads.start(self._free, comm, name="raytorchrpc-nccl-abort")
            except threads.ThreadShortage as error:
                threads.report(error, "a thread waits for a communicator to end")
                self._free(comm)

    def _free(self, comm: ctypes.c_void_p) -> None:
        library().abort(comm)
        self._last = self.mark()
        library().give_back(self._device, self._stream)

    def over(self) -> bool:
        """After ``abort``: whether it writes no more. Never waits."""
        return self._last is not None and self._last()


class Carrier:
    """The library, in this process. Thread-safe."""

    def open(self, devices: Sequence[int]) -> Mapping[int, str]:
        """Prepare the devices; returns a globally unique identity of each. Raises LaneUnavailable."""
        library()
        return {index: str(getattr(torch.cuda.get_device_properties(index), "uuid", "")) for index in devices}

    def device(self, index: int) -> torch.device:
        """Return torch's name for a device."""
        return torch.device("cuda", index)

    def mark(self, device: int) -> Mark:
        """Return a mark behind what the calling thread has queued on this device so far."""
        return _mark(torch.cuda.current_stream(device))

    def ticket(self) -> bytes:
        """Make the token that both ends pass to ``join``. Raises Broken."""
        return library().ticket()

    def join(self, ticket: bytes, end: int, device: int) -> Channel:
        """Begin to join. ``end``: SENDER or RECEIVER. The ticket comes from the receiver. Raises Broken."""
        return Channel(ticket, end, device)
