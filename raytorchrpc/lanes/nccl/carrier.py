"""What a two-sided lane needs of the library that moves its bytes.

An interface, so that the lane's order, its deadlines and its endings do not depend on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from raytorchrpc.tensors.dtypes import Shape

#: The two ends of a channel.
SENDER, RECEIVER = 0, 1


class Broken(Exception):
    """A channel can carry nothing more. The text says why."""


class Mark(Protocol):
    """A place in the order of a device's work."""

    def reached(self) -> bool:
        """Whether the device has come to it. Never waits."""


class Channel(Protocol):
    """Two processes, joined to move tensors in one direction.

    Both ends begin the same transfers in the same order. Nothing here waits for the peer or the device: work is
    begun, and ``enqueued`` tells when the next may be. ``abort`` may be called at any time, the rest by one thread at a
    time.
    """

    def enqueued(self) -> bool:
        """Whether what was begun (the joining, a transfer) is in the device's hands. Raises Broken."""

    def room(self, shapes: Sequence[Sequence[Shape]]) -> list[torch.Tensor]:
        """Memory for each piece of a message: one tensor for one shape, a flat one for several of one dtype."""

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Begin to send these, which are contiguous and complete. Keeps their memory until sent. Raises Broken."""

    def receive(self, tensors: Sequence[torch.Tensor]) -> None:
        """Begin to receive into these, which are contiguous: from ``room``, or given to ``follow``. Raises Broken."""

    def follow(self, tensors: Sequence[torch.Tensor]) -> None:
        """What the calling thread has queued so far comes before what is begun next; these are its own tensors."""

    def mark(self) -> Mark:
        """Behind everything begun; to be asked for when enqueued. Raises Broken."""

    def make_current(self, tensors: Sequence[torch.Tensor]) -> None:
        """Hand what has arrived to the calling thread."""

    def precede(self) -> None:
        """What the calling thread queues from now on comes after what was sent. Any thread; never raises."""

    def abort(self) -> None:
        """Give up what is under way and let go of everything, in the background. Idempotent; never waits or raises."""

    def over(self) -> bool:
        """After ``abort``: whether nothing is going to be written any more. Never waits."""


class Carrier(Protocol):
    """The library, in this process. Thread-safe."""

    def open(self, devices: Sequence[int]) -> Mapping[int, str]:
        """Get ready; returns what tells each device from every other in the world. Raises LaneUnavailable."""

    def device(self, index: int) -> torch.device:
        """As which torch knows a device."""

    def mark(self, device: int) -> Mark:
        """Behind what the calling thread has queued on this device so far."""

    def ticket(self) -> bytes:
        """What two processes that are to be joined must both have. Raises Broken."""

    def join(self, ticket: bytes, end: int, device: int) -> Channel:
        """Begin to join. ``end``: SENDER or RECEIVER; the ticket is from the receiver. Raises Broken."""
