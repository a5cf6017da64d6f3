"""How cuda_ipc orders two processes' work, with streams that run when the test says so: who waits, and for how long."""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator

import pytest
import torch

from raytorchrpc.errors import LaneUnavailable, PeerLost, RpcTimeout
from raytorchrpc.lanes.common.shared_memory import Gone
from raytorchrpc.lanes.cuda_ipc import pages as module
from raytorchrpc.lanes.cuda_ipc.exports import Exported, Exports
from raytorchrpc.lanes.cuda_ipc.pages import NUMBERS, QUEUED, SERIALS, Pages
from tests.polling import wait_until
from tests.threads import in_thread

PATIENCE_S = 20.0
SENDING, OTHER, RECEIVING = 1, 2, 3
_CPU = -1


class Gpu:
    """In the place of the driver: streams of writes and waits, which ``run`` goes through."""

    has_words = True

    def __init__(self) -> None:
        self.streams: dict[int, deque[Callable[[], bool]]] = defaultdict(deque)
        self.registered: set[int] = set()
        self.full = threading.Event()
        self.full.set()

    def on(self, device: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def register(self, address: int, size: int) -> None:
        self.registered.add(address)

    def unregister(self, address: int) -> None:
        self.registered.remove(address)

    def address_on_gpus(self, address: int) -> int:
        return address

    def write(self, address: int, value: int, stream: int) -> None:
        def write() -> bool:
            ctypes.c_uint32.from_address(address).value = value
            return True

        self.streams[stream].append(write)

    def wait(self, address: int, value: int, stream: int) -> None:
        assert self.full.wait(PATIENCE_S)
        self.streams[stream].append(
            lambda: ctypes.c_int32(ctypes.c_uint32.from_address(address).value - value).value >= 0
        )

    def run(self, stream: int) -> bool:
        """Run what is queued, up to a wait that has not ended; returns whether all has run."""
        queue = self.streams[stream]
        while queue and queue[0]():
            queue.popleft()
        return not queue


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()
    monkeypatch.setattr(module, "driver", lambda: made)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return made


class Sender:
    """A member that exports, and the page as its peer has it mapped."""

    def __init__(self, gpu: Gpu) -> None:
        self.pages, self.gpu = Pages(), gpu
        address = self.pages.open((0,))
        self.exports = Exports(self.pages)
        self.receiver = Pages()
        self.pages.peers["receiver"] = self.receiver.open((0,))
        self.receiver.peers["sender"] = address
        self.mapped = self.receiver.of("sender", address.tag)

    def send(self, stream: int = SENDING, *, shared: bool = False) -> tuple[int, Exported]:
        number, out = self.exports.add("receiver", [torch.zeros(1)], shared, stream, self.gpu)
        self.gpu.run(stream)
        return number, out

    def read(self, number: int, out: Exported) -> None:
        """As the receiver does: its copy is queued."""
        self.mapped.copied.write(number, out.serial, RECEIVING, self.gpu)
        self.mapped.state[number] = QUEUED

    def await_ready(self, number: int, out: Exported, timeout_s: float = PATIENCE_S) -> None:
        self.receiver.wait_until_ready("sender", self.pages.tag, number, out.serial, timeout_s)


@pytest.fixture
def sender(gpu: Gpu) -> Iterator[Sender]:
    made = Sender(gpu)
    yield made
    made.exports.close()
    made.pages.close()
    made.receiver.close()


def dead_process(sender: Sender, name: str) -> None:
    """Make the process of a peer one that has ended."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    for pages in (sender.pages, sender.receiver):
        if name in pages.peers:
            pages.peers[name] = pages.peers[name]._replace(pid=ended.pid)


# --- the receiver waits for the sender's GPU -------------------------------------------------------------------------


def test_a_receiver_waits_for_what_the_sender_has_queued(sender: Sender, gpu: Gpu) -> None:
    number, out = sender.exports.add("receiver", [torch.zeros(1)], False, SENDING, gpu)
    join = in_thread(sender.await_ready, number, out)
    with pytest.raises(RpcTimeout, match=r"the GPU of 'sender' has not computed its tensors within 0\.03 s"):
        sender.await_ready(number, out, 0.03)
    assert gpu.run(SENDING)
    join()
    sender.await_ready(number, out, 0.0)


def test_a_receiver_gives_up_on_a_sender_whose_process_has_ended(sender: Sender, gpu: Gpu) -> None:
    ready = sender.send()
    number, out = sender.exports.add("receiver", [torch.zeros(1)], False, SENDING, gpu)
    join = in_thread(sender.await_ready, number, out)
    dead_process(sender, "sender")
    with pytest.raises(PeerLost, match="'sender': its process ended, or left the group, before its GPU"):
        join()
    sender.await_ready(*ready)  # that was written before


@pytest.mark.parametrize(
    "change",
    [
        lambda sender: sender.receiver.peers.update(sender=Pages().open((0,))),
        lambda sender: sender.receiver.peers.pop("sender"),
        lambda sender: sender.receiver.close(),
    ],
    ids=["it restarts", "it leaves", "this one closes"],
)
def test_a_receiver_gives_up_on_a_sender_that_is_no_longer_a_peer(
    sender: Sender, gpu: Gpu, change: Callable[[Sender], object]
) -> None:
    number, out = sender.exports.add("receiver", [torch.zeros(1)], False, SENDING, gpu)
    join = in_thread(sender.await_ready, number, out)
    change(sender)
    with pytest.raises((PeerLost, Gone)):
        join()


# --- the sender's streams wait for the receiver's GPU ----------------------------------------------------------------


def test_memory_is_kept_until_it_has_been_read(sender: Sender, gpu: Gpu) -> None:
    number, out = sender.send()
    sender.exports.reap()
    assert len(sender.exports) == 1, "nobody has fetched it"
    sender.read(number, out)
    sender.exports.reap()
    assert len(sender.exports) == 1, "the copy is only queued"
    gpu.run(RECEIVING)
    sender.exports.reap()
    assert not len(sender.exports)


def test_work_after_a_call_follows_the_copy(sender: Sender, gpu: Gpu) -> None:
    number, out = sender.send()
    sender.exports.finish(number, out, SENDING)
    assert gpu.run(SENDING), "it was not fetched: there is nothing to wait for"
    sender.read(number, out)
    sender.exports.finish(number, out, SENDING)
    sender.exports.fence(_CPU, OTHER)
    assert not gpu.run(SENDING) and not gpu.run(OTHER)
    gpu.run(RECEIVING)
    assert gpu.run(SENDING) and gpu.run(OTHER)
    sender.exports.finish(number, out, SENDING)
    assert not len(sender.exports) and gpu.run(SENDING)


def test_work_after_a_call_follows_the_last_use_of_what_is_shared(sender: Sender, gpu: Gpu) -> None:
    number, out = sender.send(shared=True)
    sender.mapped.used.write(number, out.serial, RECEIVING, gpu)
    sender.mapped.is_used[number] = True
    sender.exports.finish(number, out, SENDING)
    assert not gpu.run(SENDING)
    gpu.run(RECEIVING)
    assert gpu.run(SENDING) and len(sender.exports) == 1, "the receiver keeps it"
    sender.read(number, out)
    gpu.run(RECEIVING)
    sender.exports.reap()
    assert not len(sender.exports)


@pytest.mark.parametrize("shared", [False, True])
def test_streams_go_on_when_the_receiver_ends_before_it_has_read(sender: Sender, gpu: Gpu, shared: bool) -> None:
    number, out = sender.send(shared=shared)
    if shared:
        sender.mapped.used.write(number, out.serial, RECEIVING, gpu)
        sender.mapped.is_used[number] = True
    else:
        sender.read(number, out)
    sender.exports.finish(number, out, SENDING)
    assert not gpu.run(SENDING)
    dead_process(sender, "receiver")
    out.address = sender.pages.peers["receiver"]
    assert wait_until(lambda: gpu.run(SENDING), PATIENCE_S) and not len(sender.exports)


def test_streams_go_on_when_the_group_has_lost_the_receiver(sender: Sender, gpu: Gpu) -> None:
    number, out = sender.send()
    sender.read(number, out)
    sender.exports.finish(number, out, SENDING)
    assert not sender.exports.drop("receiver", dead=False)
    assert gpu.run(SENDING)


def test_a_full_stream_does_not_keep_the_janitor_from_ending_its_waits(sender: Sender, gpu: Gpu) -> None:
    number, out = sender.send()
    sender.read(number, out)
    gpu.full.clear()
    join = in_thread(sender.exports.finish, number, out, SENDING)
    in_thread(lambda: sender.exports.drop("receiver", dead=True))()
    gpu.full.set()
    join()
    assert gpu.run(SENDING)


# --- numbers ---------------------------------------------------------------------------------------------------------


def all_numbers(sender: Sender) -> set[int]:
    """Use each number that is free, once."""
    found = set[int]()
    while True:
        number, _ = sender.send(OTHER)
        sender.exports.cancel(number)
        if number in found:
            return found
        found.add(number)


def test_a_number_is_used_again_only_when_no_gpu_will_write_to_it(sender: Sender, gpu: Gpu) -> None:
    """A GPU that is late would set the word of another export back."""
    late, _ = sender.exports.add("receiver", [torch.zeros(1)], False, SENDING, gpu)
    sender.exports.cancel(late)  # not sent, and still to be written
    departed, out = sender.send(OTHER)
    sender.read(departed, out)
    sender.exports.drop("receiver", dead=False)  # it lives, and will have read it
    kept, _ = sender.send(OTHER)
    assert len({late, departed, kept}) == 3
    assert all_numbers(sender) == set(range(NUMBERS)) - {late, departed, kept}
    gpu.run(SENDING)
    assert late in all_numbers(sender)


def test_each_export_has_another_serial_number(sender: Sender, gpu: Gpu) -> None:
    number, last = 7, SERIALS - 2
    sender.exports._serials[number] = last
    for word in (sender.pages.page.ready, sender.pages.page.copied):
        word._words[number] = last
    serials = []
    for _ in range(3):
        sender.exports._last = number - 1
        number, out = sender.send()
        sender.await_ready(number, out, 0.0)
        sender.read(number, out)
        sender.exports.finish(number, out, OTHER)
        assert not gpu.run(OTHER)
        gpu.run(RECEIVING)
        assert gpu.run(OTHER)
        sender.exports.reap()
        assert not len(sender.exports)
        serials.append(out.serial)
    assert serials == [SERIALS - 1, 0, 1]


def test_no_number_is_left(sender: Sender, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raytorchrpc.lanes.cuda_ipc.exports.NUMBERS", 4)
    for _ in range(4):
        sender.send()
    with pytest.raises(LaneUnavailable, match="4 messages with tensors are in flight"):
        sender.send()


# --- pages -----------------------------------------------------------------------------------------------------------


def test_a_page_stays_registered_as_long_as_it_is_used(sender: Sender, gpu: Gpu) -> None:
    """A tensor that is shared returns its memory by the page, also after its owner has left."""
    kept = [sender.mapped]
    del sender.mapped
    kept[0].copied.write(1, 1, RECEIVING, gpu)
    before = len(gpu.registered)
    sender.receiver.forget("sender", keep_page=False)
    assert not wait_until(lambda: len(gpu.registered) < before, 0.1)
    kept.clear()
    assert len(gpu.registered) == before - 1
    with pytest.raises(Gone, match="unknown here"):
        sender.receiver.of("sender", sender.pages.tag)


def test_an_old_driver_is_refused(gpu: Gpu) -> None:
    gpu.has_words = False
    with pytest.raises(LaneUnavailable, match=r"older than that of CUDA 11\.7"):
        Pages().open((0,))
