"""Processes that are killed in each phase of a transfer over cuda_ipc: what they leave, and that the other end goes on.

Functions with an underscore run in the processes, each with a lane of its own: of the survivor, and of the victims.
"""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from raytorchrpc.errors import PeerLost
from raytorchrpc.lanes.cuda_ipc.lane import CudaIpcLane
from tests.conformance import peers
from tests.conformance.peers import Process, TensorNode, tensors
from tests.conformance.test_tensor_lanes import region
from tests.polling import wait_until

pytestmark = pytest.mark.gpu

MIB = 1 << 20
#: How long the GPU of a process that is killed would still work: longer than any test waits (clock cycles).
_FOR_EVER = 200_000_000_000
#: Longest time in which a survivor goes on (seconds).
_SOON_S = 10.0
#: Processes that are started ahead of their turn.
_AHEAD = 6


def _open(gpu: int) -> Any:
    os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
    torch.cuda.init()
    peers._tensors = TensorNode(CudaIpcLane((0,)), "cuda")
    address = tensors().lane.open()
    torch.cuda._sleep(1)  # loads the kernel
    torch.full((8,), 1.0, device="cuda").add_(1)
    torch.cuda.synchronize()
    return address


class Ends:
    """One process that survives, and many that are killed, each started ahead of its turn."""

    def __init__(self, gpu: int) -> None:
        """``gpu``: of the victims. The survivor's is 0."""
        self._gpu, self._waiting, self._names = gpu, deque[Process](), itertools.count()
        self.on_one_gpu = gpu == 0
        self.survivor = self._start(0)
        self._address = self.survivor.result()
        self._begin()

    def _start(self, gpu: int) -> Process:
        process = Process()
        process.begin(_open, gpu)
        return process

    def _begin(self) -> None:
        while len(self._waiting) < _AHEAD:
            self._waiting.append(self._start(self._gpu))

    def victim(self) -> tuple[str, Process]:
        """One that has met the survivor, and its name; the survivor's is "survivor"."""
        process, name = self._waiting.popleft(), f"victim_{next(self._names)}"
        self._begin()
        address = process.result()
        self.survivor.run(peers.meet, name, address)
        process.run(peers.meet, "survivor", self._address)
        return name, process

    def close(self) -> None:
        for process in (self.survivor, *self._waiting):
            process.kill()


@pytest.fixture(scope="module", params=[0, pytest.param(1, marks=pytest.mark.gpu(2))], ids=["one GPU", "two GPUs"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    made = Ends(request.param)
    yield made
    made.close()


# --- what the processes do -------------------------------------------------------------------------------------------


def _send(to: str, value: float, busy: bool, share: bool = False) -> Any:
    """Export a tensor of that value. ``busy``: the GPU does not get to write it."""
    made = torch.zeros(MIB, device="cuda")
    torch.cuda.synchronize()
    if busy:
        torch.cuda._sleep(_FOR_EVER)
    made.fill_(value)
    exported = (tensors().lane.share if share else tensors().lane.export)([made], to, {0: 0})
    if not busy:
        torch.cuda.synchronize()
    tensors().exports.append(exported)
    return exported.descriptor, [(made.dtype, tuple(made.shape))]


def _take(sender: str, sent: Any, value: float) -> None:
    """Fetch it, and find it as it was sent."""
    (arrived,) = tensors().lane.read(sender, *sent)
    assert bool((arrived == value).all())


def _fail_to_take(sender: str, sent: Any) -> float:
    """Returns how long it takes to raise the loss of the sender (seconds)."""
    began = time.monotonic()
    with pytest.raises(PeerLost, match=sender):
        tensors().lane.read(sender, *sent)
    return time.monotonic() - began


def _fail_to_copy(sender: str, sent: Any) -> float:
    descriptor, ((dtype, shape),) = sent
    target = torch.zeros(shape, dtype=dtype, device="cuda")
    flat = [(torch.uint8, (target.nbytes,))]
    began = time.monotonic()
    with pytest.raises(PeerLost, match=sender):
        tensors().lane.read(sender, descriptor, flat, region(0, target))
    assert not target.any(), "something was written"
    return time.monotonic() - began


def _take_later(sender: str, sent: Any) -> None:
    """Only queue the copy, behind work that lasts for a moment."""
    torch.cuda._sleep(500_000_000)
    tensors().kept["taken"] = tensors().lane.read(sender, *sent)


def _has_taken(value: float) -> bool:
    (arrived,) = tensors().kept.pop("taken")
    return bool((arrived == value).all())


def _take_never(sender: str, sent: Any) -> None:
    """Queue the copy behind work that does not end."""
    torch.cuda._sleep(_FOR_EVER)
    tensors().lane.read(sender, *sent)


def _use_for_ever(sender: str, sent: Any) -> None:
    """What a method does that keeps a shared tensor, and uses it behind work that does not end."""
    tensors().kept["kept"] = tensors().lane.read(sender, *sent)
    torch.cuda._sleep(_FOR_EVER)
    tensors().lane.used(sender, sent[0])


def _go_on(victim: str) -> float:
    """The call is over, and its receiver is gone. Returns how long the survivor's stream waits for it (seconds)."""
    lane = tensors().lane
    tensors().exports.pop().finished()
    lane.fence(0)
    began = time.monotonic()
    event = torch.cuda.Event()
    event.record()
    assert wait_until(event.query, _SOON_S), f"the stream still waits for {victim}"
    return time.monotonic() - began


def _nothing_is_left(victim: str) -> bool:
    """As the group has a lane do once it knows, and without that: all that was lent comes back."""
    lane = tensors().lane
    assert isinstance(lane, CudaIpcLane)
    came_back = wait_until(lambda: not lane.outstanding, _SOON_S)
    lane.disconnect(victim)
    return came_back


def _begin_in_a_thread(function: Callable[..., Any], *args: Any) -> None:
    def work() -> None:
        try:
            tensors().kept["result"] = function(*args)
        except BaseException as error:
            tensors().kept["result"] = error

    tensors().kept["thread"] = threading.Thread(target=work)
    tensors().kept["thread"].start()


def _end_of_thread() -> Any:
    tensors().kept.pop("thread").join(_SOON_S)
    result = tensors().kept.pop("result", AssertionError("it still waits"))
    if isinstance(result, BaseException):
        raise result
    return result


# --- phases: each kills a new process --------------------------------------------------------------------------------


def sender_while_it_computes_and_is_awaited(ends: Ends) -> None:
    for fail in (_fail_to_take, _fail_to_copy):
        name, victim = ends.victim()
        sent = victim.run(_send, "survivor", 1.0, True)
        ends.survivor.run(_begin_in_a_thread, fail, name, sent)
        victim.kill()
        assert ends.survivor.run(_end_of_thread) < _SOON_S
        assert ends.survivor.run(_nothing_is_left, name)


def sender_while_it_computes(ends: Ends) -> None:
    name, victim = ends.victim()
    sent = victim.run(_send, "survivor", 1.0, True)
    victim.kill()
    assert ends.survivor.run(_fail_to_take, name, sent) < _SOON_S
    assert ends.survivor.run(_nothing_is_left, name)


def sender_once_it_has_computed(ends: Ends) -> None:
    name, victim = ends.victim()
    sent = victim.run(_send, "survivor", 1.0, False)
    victim.kill()
    assert ends.survivor.run(_fail_to_take, name, sent) < _SOON_S  # its memory is gone with it
    assert ends.survivor.run(_nothing_is_left, name)


def sender_while_the_copy_is_queued(ends: Ends) -> None:
    name, victim = ends.victim()
    ends.survivor.run(_take_later, name, victim.run(_send, "survivor", 3.0, False))
    victim.kill()
    assert ends.survivor.run(_has_taken, 3.0)
    assert ends.survivor.run(_nothing_is_left, name)


def receiver_before_it_fetches(ends: Ends) -> None:
    name, victim = ends.victim()
    ends.survivor.run(_send, name, 1.0, False)
    victim.kill()
    assert ends.survivor.run(_go_on, name) < _SOON_S
    assert ends.survivor.run(_nothing_is_left, name)


def receiver_while_the_copy_is_queued(ends: Ends) -> None:
    name, victim = ends.victim()
    victim.run(_take_never, "survivor", ends.survivor.run(_send, name, 1.0, False))
    ends.survivor.run(_begin_in_a_thread, _go_on, name)
    victim.kill()
    assert ends.survivor.run(_end_of_thread) < _SOON_S
    assert ends.survivor.run(_nothing_is_left, name)


def receiver_that_uses_what_is_shared(ends: Ends) -> None:
    name, victim = ends.victim()
    victim.run(_use_for_ever, "survivor", ends.survivor.run(_send, name, 1.0, False, ends.on_one_gpu))
    victim.kill()
    assert ends.survivor.run(_go_on, name) < _SOON_S
    assert ends.survivor.run(_nothing_is_left, name)


def neither(ends: Ends) -> None:
    """The survivor still sends and receives, whatever was killed before."""
    name, other = ends.victim()
    ends.survivor.run(_take, name, other.run(_send, "survivor", 5.0, False), 5.0)
    other.run(_take, "survivor", ends.survivor.run(_send, name, 6.0, False), 6.0)
    assert ends.survivor.run(_go_on, name) < _SOON_S
    other.kill()
    assert ends.survivor.run(_nothing_is_left, name)


PHASES = [
    sender_while_it_computes_and_is_awaited,
    sender_while_it_computes,
    sender_once_it_has_computed,
    sender_while_the_copy_is_queued,
    receiver_before_it_fetches,
    receiver_while_the_copy_is_queued,
    receiver_that_uses_what_is_shared,
]


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.__name__)
def test_the_other_end_goes_on(ends: Ends, phase: Callable[[Ends], None]) -> None:
    phase(ends)
    neither(ends)


@pytest.mark.slow
def test_the_other_end_survives_a_hundred_of_them(ends: Ends) -> None:
    chosen = random.Random(7)
    began = time.monotonic()
    for _ in range(100):
        chosen.choice(PHASES)(ends)
    neither(ends)
    print(f"100 kills in {time.monotonic() - began:.1f} s")
