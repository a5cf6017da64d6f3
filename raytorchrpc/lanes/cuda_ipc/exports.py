"""The tensors that a member has exported over cuda_ipc, kept until their receivers have copied or released them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from raytorchrpc.errors import LaneUnavailable
from raytorchrpc.lanes.common.exports import Janitor
from raytorchrpc.lanes.common.shared_memory import SharedAddress, is_gone
from raytorchrpc.lanes.cuda_ipc.events import FLAGS, USES, SharedEvents

#: States of a flag byte: in flight; discarded; copied (plus the place of the event that follows the copy).
OUT, UNUSED, COPIED = 1, 2, 16
#: Pause between two rounds of the janitor (seconds).
_PAUSE_S = 0.02
#: The same while only shared tensors are out, which may stay for long.
_SHARED_PAUSE_S = 0.5
#: Rounds between two checks whether the peers live.
_ROUNDS_PER_CENSUS = 50


@dataclass(eq=False)
class Exported:
    """One export in flight."""

    peer: str
    address: SharedAddress | None
    """The peer's page."""
    tensors: Sequence[torch.Tensor]
    """The exported or packed tensors. They are kept until copied, and shared ones until released."""
    shared: bool
    flag: int = OUT
    """As last read."""

    @property
    def device(self) -> int:
        """The GPU that the tensors are on."""
        return self.tensors[0].get_device()


class Exports:
    """Exports by number. Each number has a flag in this member's page, which the receiver sets. Thread-safe."""

    def __init__(self, events: SharedEvents) -> None:
        self._events = events
        self._lock = threading.Lock()
        self._numbers = itertools.cycle(range(FLAGS))
        self._out: dict[int, Exported] = {}
        self._freeing: dict[int, torch.cuda.Stream] = {}
        self._rounds = itertools.count(1)
        self._janitor = Janitor("raytorchrpc-cuda-ipc", self._reclaim)

    def __len__(self) -> int:
        return len(self._out)

    def open(self, devices: Sequence[int]) -> None:
        """``devices``: the GPUs that tensors are exported from."""
        self._freeing = {index: torch.cuda.Stream(index) for index in devices}  # type: ignore[no-untyped-call]

    def add(self, peer: str, tensors: Sequence[torch.Tensor], shared: bool) -> tuple[int, Exported]:
        """Keep tensors; returns their number. Raises LaneUnavailable if all numbers are in use."""
        out = Exported(peer, self._events.peers.get(peer), tensors, shared)
        with self._lock:
            if len(self._out) >= FLAGS - 1:
                raise LaneUnavailable("cuda_ipc", f"{FLAGS - 1} messages with tensors are in flight")
            number = next(self._numbers)
            while number in self._out:
                number = next(self._numbers)
            self._events.page[number] = OUT
            self._events.page[USES + number] = 0
            self._out[number] = out
        self._janitor.wake(hurry=not shared)
        return number, out

    def cancel(self, number: int) -> None:
        """Forget an export that was not sent."""
        with self._lock:
            self._out.pop(number, None)

    def reap(self) -> None:
        """Release the tensors that have been fetched. Does not wait for the GPU."""
        if not self._out:
            return
        with self._lock:
            flags = self._events.page
            for number in [number for number in self._out if flags[number] != OUT]:
                out = self._out.pop(number)
                out.flag = int(flags[number])
                # Have the allocator reuse the memory only after the receiver's copy, on the GPU.
                self._order_after(out, out.flag - COPIED, self._freeing[out.device])

    def fence(self, device: int) -> None:
        """See TensorLane.fence."""
        self.reap()
        with self._lock:  # a thread that reaps at the same time has queued its part as well
            freeing = self._freeing.get(device)
            if freeing is not None:
                self._events.current(device)[0].wait_stream(freeing)

    def finish(self, number: int, out: Exported) -> None:
        """The call is over: order what this thread queues from now on after the receiver's copy."""
        with self._lock:
            flag = int(self._events.page[number])
            if self._out.get(number) is out and flag != OUT:
                del self._out[number]
                out.flag = flag
            place = int(self._events.page[USES + number]) - 1 if out.flag == OUT else out.flag - COPIED
        self._order_after(out, place, self._events.current(out.device)[0])

    def _order_after(self, out: Exported, place: int, stream: torch.cuda.Stream) -> None:
        """Order a stream after the receiver's event at that place; a negative place means that there is none."""
        tag = out.address.tag if out.address is not None else ""
        event = self._events.recorded(out.peer, tag, place, out.device) if place >= 0 else None
        if event is not None:
            event.wait(stream)
            for tensor in out.tensors:
                tensor.record_stream(stream)

    def _reclaim(self) -> float | None:
        """See Janitor. Needed for results, whose receivers confirm nothing."""
        self.reap()
        only_shared = all(out.shared for out in list(self._out.values()))
        if only_shared or next(self._rounds) % _ROUNDS_PER_CENSUS == 0:
            self._drop_dead()
        if not self._out:
            return None
        return _SHARED_PAUSE_S if only_shared else _PAUSE_S

    def _drop_dead(self) -> None:
        """Release what was exported to processes that have ended."""
        with self._lock:
            held = list(self._out.items())
        gone = {address for address in {out.address for _, out in held} if address is not None and is_gone(address)}
        with self._lock:
            for number, out in held:
                if out.address in gone and self._out.get(number) is out:
                    del self._out[number]

    def drop(self, peer: str, *, dead: bool) -> bool:
        """Release what was exported to a peer that left. Returns whether shared tensors remain, which a living peer
        may still use.
        """
        with self._lock:
            of_peer = [number for number, out in self._out.items() if out.peer == peer]
            kept = [number for number in of_peer if self._out[number].shared and not dead]
            for number in set(of_peer).difference(kept):
                del self._out[number]
        return bool(kept)

    def close(self) -> None:
        """Release everything but shared tensors; those stay until their receivers release them."""
        with self._lock:
            self._out = {number: out for number, out in self._out.items() if out.shared}
        self._janitor.close()
