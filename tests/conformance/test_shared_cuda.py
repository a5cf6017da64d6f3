"""GPU memory that two processes on one GPU share: no copy, and exactly as long as somebody uses it.

Two processes, ``a`` and ``b``, each with the lane of tests/conformance/test_tensor_lanes.py on GPU 0; functions with an
underscore run in them.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from raytorchrpc.lanes.base import Copies, PeerAddress
from raytorchrpc.lanes.cuda_ipc.lane import CudaIpcLane
from raytorchrpc.tensors import host_device_copy
from tests.conformance import peers
from tests.conformance.peers import Process, TensorNode, in_process, same, tensors
from tests.polling import wait_until

pytestmark = pytest.mark.gpu

MIB = 1 << 20
#: Larger than what torch's allocator puts together with other tensors: an allocation of its own.
OWN = 64 * MIB


@pytest.fixture
def pair(spawn: Callable[[], Process]) -> tuple[Process, Process]:
    a, b = spawn(), spawn()
    for process in (a, b):
        process.begin(_open)
    address_a, address_b = a.result(), b.result()
    a.run(peers.meet, "b", address_b)
    b.run(peers.meet, "a", address_a)
    return a, b


def _open(mappings: int = 2) -> Any:
    """A lane that keeps two mappings open, so that a third one closes the first."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    torch.cuda.init()
    peers._tensors = TensorNode(CudaIpcLane((0,), mappings), "cuda")
    return tensors().lane.open()


def _share(name: str, make: Callable[..., torch.Tensor], *args: Any) -> Any:
    """Share what ``make`` makes, and keep it under that name."""
    tensor = tensors().kept[name] = make(*args)
    exported = tensors().lane.share([tensor], "b", {0: 0})
    tensors().exports.append(exported)
    return exported.descriptor, [(tensor.dtype, tuple(tensor.shape))]


def _borrow(name: str, sent: Any) -> None:
    (tensors().kept[name],) = tensors().lane.read("a", *sent)


def _drop(name: str) -> None:
    del tensors().kept[name]
    gc.collect()


def _is(name: str, value: float) -> bool:
    return bool((tensors().kept[name] == value).all())


def _fill(name: str, value: float) -> None:
    tensors().kept[name].fill_(value)
    torch.cuda.synchronize()


def _full(size: int, value: float) -> torch.Tensor:
    return torch.full((size // 4,), value, device="cuda")


def _out() -> int:
    lane = tensors().lane
    assert isinstance(lane, CudaIpcLane)
    return lane.outstanding


def _all_back() -> bool:
    return wait_until(lambda: _out() == 0, 5)


def _comes_down_to(size: int) -> bool:
    """The thread that hears of it lets go of the memory a moment later."""
    return wait_until(lambda: _allocated() <= size, 5)


def _allocated() -> int:
    return torch.cuda.memory_allocated()


def test_both_see_what_either_writes_and_nothing_is_copied(pair: tuple[Process, Process]) -> None:
    a, b = pair
    sent = a.run(_share, "x", _full, OWN, 1.0)
    before = b.run(_allocated)
    b.run(_borrow, "x", sent)
    assert b.run(_is, "x", 1.0)
    assert b.run(_allocated) == before
    b.run(_fill, "x", 2.0)
    assert a.run(_is, "x", 2.0)
    a.run(_fill, "x", 3.0)
    assert b.run(_is, "x", 3.0)


def test_the_sender_keeps_the_memory_until_the_last_tensor_over_it_is_gone(pair: tuple[Process, Process]) -> None:
    a, b = pair
    sent = a.run(_share, "x", _full, OWN, 1.0)
    b.run(_borrow, "x", sent)
    held = a.run(_allocated)
    a.run(_drop, "x")
    a.run(_forget_exports)
    assert a.run(_allocated) == held
    b.run(_keep_a_view, "x")
    a.run(_churn, OWN)
    assert b.run(_is, "view", 1.0), "its memory was handed out again"
    assert a.run(_out) == 1
    b.run(_drop, "view")
    assert a.run(_all_back)
    assert a.run(_comes_down_to, held - OWN)


def _forget_exports() -> None:
    tensors().exports.clear()


def _keep_a_view(name: str) -> None:
    tensors().kept["view"] = tensors().kept.pop(name)[1000:].view(-1, 8)[:, 3]


def _churn(size: int) -> None:
    for value in range(8):
        _full(size, float(100 + value))
    torch.cuda.synchronize()


def test_it_is_handed_out_again_only_after_the_last_kernel_that_uses_it(pair: tuple[Process, Process]) -> None:
    a, b = pair
    sent = a.run(_share, "x", _full, OWN, 1.0)
    b.run(_borrow, "x", sent)
    a.run(_drop, "x")
    a.run(_forget_exports)
    b.run(_read_later_and_drop, "x")
    assert a.run(_all_back)
    a.run(_churn, OWN)
    assert b.run(_is, "read", 1.0)


def _read_later_and_drop(name: str) -> None:
    torch.cuda._sleep(200_000_000)
    tensors().kept["read"] = tensors().kept[name] * 1
    _drop(name)


def test_what_is_not_fetched_or_not_sent_is_given_back(pair: tuple[Process, Process]) -> None:
    a, b = pair
    sent = a.run(_share, "x", _full, OWN, 1.0)
    b.run(lambda: tensors().lane.release("a", sent[0]))
    assert a.run(_all_back)
    a.run(_share, "x", _full, OWN, 1.0)
    a.run(lambda: tensors().exports[-1].cancel())
    assert a.run(_out) == 0


def test_a_mapping_in_use_is_never_closed(pair: tuple[Process, Process]) -> None:
    a, b = pair
    for number in range(5):
        b.run(_borrow, f"x{number}", a.run(_share, f"x{number}", _full, OWN, float(number)))
    for number in range(5):
        assert b.run(_is, f"x{number}", float(number))
        b.run(_drop, f"x{number}")
    assert a.run(_all_back)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.uint8, torch.bfloat16, torch.complex64], ids=str)
def test_dtypes_and_strides_are_kept(pair: tuple[Process, Process], dtype: torch.dtype) -> None:
    a, b = pair
    for index in range(5):
        b.run(_borrow, "x", a.run(_share, "x", _strided, dtype, index))
        assert b.run(_layout, "x") == a.run(_layout, "x")
        assert b.run(_equals, "x", _strided, dtype, index)
        b.run(_fill, "x", 1.0)
        assert a.run(_equals, "x", _strided_filled, dtype, index)
        b.run(_drop, "x")
        assert a.run(_all_back)


def _strided(dtype: torch.dtype, index: int) -> torch.Tensor:
    base = torch.arange(4000.0, device="cuda").to(dtype).view(40, 100)
    return [base.t(), base[3::4, 10:90:7], base[5], base[2, 3], base[:0]][index]


def _strided_filled(dtype: torch.dtype, index: int) -> torch.Tensor:
    return torch.full_like(_strided(dtype, index), 1.0)


def _layout(name: str) -> tuple[Any, ...]:
    tensor = tensors().kept[name]
    return tuple(tensor.shape), tensor.stride()


def _equals(name: str, make: Callable[..., torch.Tensor], *args: Any) -> bool:
    return same(tensors().kept[name].cpu(), make(*args).cpu())


def test_a_borrowed_tensor_is_passed_on_as_a_copy(pair: tuple[Process, Process]) -> None:
    a, b = pair
    b.run(_borrow, "x", a.run(_share, "x", _full, MIB, 4.0))
    for share in (False, True):
        sent = b.run(_pass_back, "x", share)
        a.run(_take_from_b, "y", sent)
        assert a.run(_is, "y", 4.0)
        a.run(_fill, "y", 5.0)
        assert b.run(_is, "x", 4.0)


def _pass_back(name: str, share: bool) -> Any:
    lane, tensor = tensors().lane, tensors().kept[name]
    exported = (lane.share if share else lane.export)([tensor], "a", {0: 0})
    tensors().exports.append(exported)
    return exported.descriptor, [(tensor.dtype, tuple(tensor.shape))]


def _take_from_b(name: str, sent: Any) -> None:
    (tensors().kept[name],) = tensors().lane.read("b", *sent)


def test_what_a_dead_sender_shared_is_still_mapped(pair: tuple[Process, Process]) -> None:
    a, b = pair
    b.run(_borrow, "x", a.run(_share, "x", _full, OWN, 6.0))
    a.kill()
    assert b.run(_is, "x", 6.0)
    b.run(lambda: tensors().lane.disconnect("a"))
    assert b.run(_is, "x", 6.0)
    b.run(_drop, "x")


def test_a_dead_receiver_gives_back(pair: tuple[Process, Process]) -> None:
    a, b = pair
    b.run(_borrow, "x", a.run(_share, "x", _full, OWN, 6.0))
    b.kill()
    assert a.run(_all_back), "the sender has not noticed"


@pytest.mark.parametrize("first", ["a", "b"])
def test_what_is_shared_outlives_the_lanes(pair: tuple[Process, Process], first: str) -> None:
    a, b = pair
    b.run(_borrow, "x", a.run(_share, "x", _full, OWN, 7.0))
    a.run(_drop, "x")
    a.run(_forget_exports)
    a.run(_keep_lane)
    for process in pair if first == "a" else reversed(pair):
        process.run(_leave)
    a.run(_churn, OWN)
    assert b.run(_is, "x", 7.0)
    b.run(_drop, "x")
    assert a.run(_nothing_left_of_the_lane)


def _keep_lane() -> None:
    tensors().kept["lane"] = tensors().lane


def _leave() -> None:
    lane = tensors().lane
    for peer in ("a", "b"):
        lane.disconnect(peer)
    lane.close()
    lane.close()


def _nothing_left_of_the_lane() -> bool:
    lane = tensors().kept["lane"]
    threads = lambda: [thread.name for thread in threading.enumerate() if thread.name == "raytorchrpc-cuda-ipc"]  # noqa: E731
    return wait_until(lambda: not lane.outstanding and not threads(), 5)


@pytest.mark.gpu(2)
@in_process
def test_the_users_current_device_stays_what_it_was() -> None:
    """A lane that is its own peer would map what it has exported itself; so it only exports, and staging copies."""
    lane = CudaIpcLane((0, 1))
    lane.connect([PeerAddress("b", lane.open())])
    for current in (0, 1):
        torch.cuda.set_device(current)
        other = torch.ones(1000, device=f"cuda:{1 - current}")
        lane.export([other], "b", {0: 0, 1: 1}).cancel()
        assert torch.cuda.current_device() == current
        room = torch.empty(1000)
        host_device_copy.copy_out(other, room.data_ptr())
        host_device_copy.wait_for([other])
        assert float(room.sum()) == 1000.0
        assert torch.cuda.current_device() == current
    lane.close()


@in_process
def test_a_member_that_exchanges_no_cuda_tensor_needs_no_context() -> None:
    lane = CudaIpcLane((0,))
    lane.connect([PeerAddress("b", lane.open())])
    assert not torch.cuda.is_initialized()
    lane.export([torch.ones(100_000, device="cuda")], "b", {0: 0}).cancel()
    assert torch.cuda.is_initialized()
    lane.disconnect("b")
    lane.close()


# --- small tensors ---------------------------------------------------------------------------------------------------


def _export(make: Callable[[], list[torch.Tensor]], busy: bool) -> tuple[Any, list[Any], int]:
    """What is sent, and how many exports the sender keeps. ``busy``: the GPU still works on the tensors then."""
    made = make()
    later = [tensor + 1 for tensor in made]  # loads the kernels, which waits for the GPU
    torch.cuda.synchronize()
    if busy:
        torch.cuda._sleep(200_000_000)
        for tensor, target in zip(made, later, strict=True):
            torch.add(tensor, 1, out=target)
        made = later
    exported = tensors().lane.export(made, "b", {0: 0})
    tensors().exports.append(exported)
    return exported.descriptor, [(tensor.dtype, tuple(tensor.shape)) for tensor in made], _out()


def _small() -> list[torch.Tensor]:
    return [torch.full((3, 100), 7.0, device="cuda"), torch.arange(5, device="cuda"), torch.empty(0, device="cuda")]


def _received(sent: Any, shapes: list[Any]) -> list[list[float]]:
    target = torch.zeros(shapes[0][1], dtype=shapes[0][0], device="cuda")
    first, *others = tensors().lane.read("a", sent, shapes, Copies.whole([target, *[None] * (len(shapes) - 1)]))
    assert first is None and [(tensor.dtype, tuple(tensor.shape)) for tensor in others] == shapes[1:]
    return [tensor.flatten()[:3].tolist() for tensor in (target, *others)]


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_small_tensors_travel_in_the_message_if_the_gpu_is_idle(pair: tuple[Process, Process], busy: bool) -> None:
    """While it is busy, they would keep the sender waiting."""
    a, b = pair
    sent, shapes, kept = a.run(_export, _small, busy)
    assert kept == busy
    assert b.run(_received, sent, shapes) == [[7.0 + busy] * 3, [busy + 0, busy + 1, busy + 2], []]


def _many_small() -> list[tuple[Any, list[Any]]]:
    sent = []
    for value in range(200):
        made = [torch.full((size,), value, dtype=torch.uint8, device="cuda") for size in (1250, 1251, 40_000, 1)]
        torch.cuda.synchronize()
        exported = tensors().lane.export(made, "b", {0: 0})
        sent.append((exported.descriptor, [(tensor.dtype, tuple(tensor.shape)) for tensor in made]))
    return sent


def _received_in_a_row(sent: list[tuple[Any, list[Any]]]) -> list[bool]:
    """Receive all on two streams, which are idle or not, before looking at any."""
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    arrived = []
    for number, (descriptor, shapes) in enumerate(sent):
        with torch.cuda.stream(streams[number % 2]):
            if number % 20 == 7:
                torch.cuda._sleep(2_000_000)
            arrived.append(tensors().lane.read("a", descriptor, shapes))
    torch.cuda.synchronize()
    return [all(bool((tensor == value).all()) for tensor in its) for value, its in enumerate(arrived)]


def test_small_tensors_that_arrive_one_after_another_keep_their_data(pair: tuple[Process, Process]) -> None:
    """The copies are queued, from memory that the next message needs too."""
    a, b = pair
    sent = a.run(_many_small)
    assert all(type(descriptor[0]) is bytes for descriptor, _ in sent)
    assert b.run(_received_in_a_row, sent) == [True] * len(sent)
