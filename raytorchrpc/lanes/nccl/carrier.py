"""The interface between the nccl lane and the library that moves its bytes.

It lets tests run the lane's protocol, deadlines and failures without a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from raytorchrpc.tensors.dtypes import Shape

#: The two ends of a channel.
SENDER, RECEIVER = 0, 1


class Broken(Exception):
    """A channel has failed for good. The text says why."""


class Mark(Protocol):
    """A point in a device's queue of work."""

    def reached(self) -> bool:
        """Whether the device has reached it. Never waits."""


class Channel(Protocol):
    """Joins two processes, to move tensors in one direction.

    Both ends begin the same transfers in the same order. No method waits for the peer or the device: it begins an
    operation, and the next one may begin once ``enqueued`` returns True. ``abort`` may be called at any time, the other
    methods by one thread at a time.
    """

    def enqueued(self) -> bool:
        """Whether the device has queued the last operation (the join, or a transfer). Raises Broken."""

    def room(self, shapes: Sequence[Sequence[Shape]]) -> list[torch.Tensor]:
        """Allocate memory for each piece of a message: a tensor for one shape, a flat one for several of one dtype."""

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Begin to send tensors, which are contiguous and complete. Keeps their memory until sent. Raises Broken."""

    def receive(self, tensors: Sequence[torch.Tensor]) -> None:
        """Begin to receive into contiguous tensors, from ``room`` or passed to ``follow``. Raises Broken."""

    def follow(self, tensors: Sequence[torch.Tensor]) -> None:
        """Order the next operation after what the calling thread has queued so far on its own tensors."""

    def mark(self) -> Mark:
        """Return a mark behind all operations, which must be enqueued. Raises Broken."""

    def make_current(self, tensors: Sequence[torch.Tensor]) -> None:
        """Hand tensors that have arrived over to the calling thread's stream."""

    def precede(self) -> None:
        """Order what the calling thread queues from now on after what was sent. From any thread; never raises."""

    def abort(self) -> None:
        """Abandon transfers in progress and free everything, in the background. Idempotent; never waits or raises."""

    def over(self) -> bool:
        """After ``abort``: whether it writes no more. Never waits."""


class Carrier(Protocol):
    """The library, in this process. Thread-safe."""

    def open(self, devices: Sequence[int]) -> Mapping[int, str]:
        """Prepare the devices; returns a globally unique identity of each. Raises LaneUnavailable."""

    def device(self, index: int) -> torch.device:
        """Return torch's name for a device."""

    def mark(self, device: int) -> Mark:
        """Return a mark behind what the calling thread has queued on this device so far."""

    def ticket(self) -> bytes:
        """Make the token that both ends pass to ``join``. Raises Broken."""

    def join(self, ticket: bytes, end: int, device: int) -> Channel:
        """Begin to join. ``end``: SENDER or RECEIVER. The ticket comes from the receiver. Raises Broken."""
