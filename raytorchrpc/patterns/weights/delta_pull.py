"""What a pull brings as deltas: of tensors of which few elements have changed, only these elements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from raytorchrpc.calls.client.future import Future
from raytorchrpc.patterns.weights import published
from raytorchrpc.patterns.weights.deltas import TINY, apply, bounds_of, delta_bytes
from raytorchrpc.patterns.weights.pull_plan import Selection
from raytorchrpc.patterns.weights.slices import KnownLayout
from raytorchrpc.patterns.weights.source_lease import SourceLease


class DeltaPull:
    """The deltas of one pull from one home, by the thread that uses it: a message after the other."""

    def __init__(self, lease: SourceLease, messages: Sequence[Selection]) -> None:
        self._lease, self._requests, self._messages = lease, lease.requests, messages
        self._sent: Future[Any] | None = None

    def begin(self, caller_waits: bool) -> None:
        """Request the first message. Then call ``receive``."""
        self._sent = self._request(self._messages[0], caller_waits)

    def receive(self) -> None:
        """Apply all deltas to the model. Each message is requested before the one before it is applied."""
        sent, self._sent = self._sent, None
        for number, message in enumerate(self._messages):
            answer = (sent or self._request(message, caller_waits=True)).wait()
            sent = self._request(self._messages[number + 1]) if number + 1 < len(self._messages) else None
            apply(message.regions, message.targets, answer)
            size = sum(tensor.nbytes for tensor in answer[1])
            self._requests.counter.expect(self._lease.leased.version, size - message.nbytes)
            self._requests.count(self._lease.home, size)

    def _request(self, message: Selection, caller_waits: bool = False) -> Future[Any]:
        spans = [(transfer.place[0], *bounds_of(transfer.region)) for transfer in message.transfers]
        return self._lease.request(published.DELTAS, spans, caller_waits=caller_waits)


def divide(
    selection: Selection, deltas: Mapping[int, int], layout: KnownLayout, times: int, most: int
) -> tuple[list[Selection], Selection]:
    """Divide what a pull brings: the messages of what comes as deltas, of at most ``most`` bytes, and what comes whole.

    ``times``: how often the source sends a delta for each time that it would send the whole tensors.
    """
    sizes: dict[int, int] = {}  # of what comes as deltas
    is_worth_a_request = False
    for index, (transfer, target) in enumerate(zip(selection.transfers, selection.targets, strict=True)):
        place, conversion = transfer.place
        if conversion is None and place in deltas and target.numel():
            elements = math.prod(layout.rows[place][2])
            is_tiny = elements * target.itemsize < TINY
            size = delta_bytes(transfer.region, elements, target.itemsize, deltas[place])
            if is_tiny or size * times < target.nbytes:
                sizes[index] = size
                is_worth_a_request |= not is_tiny
    if not is_worth_a_request:
        return [], selection
    rest = [index for index in range(len(selection.transfers)) if index not in sizes]
    return selection.at(list(sizes)).messages(most, list(sizes.values())), selection.at(rest)
