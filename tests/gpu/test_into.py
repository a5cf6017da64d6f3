"""Between actors: results received into buffers on GPUs, and across from and to the CPU.

``a`` and ``b`` are on one GPU, ``h`` has none; ``c`` is on another GPU, where there is one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import raytorchrpc as rtr
from tests import insides
from tests.gpu.ends import Runner, ends
from tests.insides import in_actor

pytestmark = pytest.mark.gpu

#: Elements of float32: above and below what travels in a message, and what travels alone.
LARGE, SMALL = 3_000_000, 1000
_LATE = 100_000_000


class Source(Runner):
    """Gives tensors."""

    @rtr.method
    def filled(self, device: str, value: float, *sizes: int) -> list[torch.Tensor]:
        if device == "cuda":
            torch.cuda._sleep(_LATE)  # the data is not there yet when this returns
        return [torch.full((size,), value + number, device=device) for number, size in enumerate(sizes)]

    @rtr.method(share=True)
    def shared(self, value: float, *sizes: int) -> list[torch.Tensor]:
        return [torch.full((size,), value + number, device="cuda") for number, size in enumerate(sizes)]


@pytest.fixture(scope="module")
def actors() -> Iterator[dict[str, Any]]:
    with ends("a", "b", host="h", other="c", cls=Source) as made, rtr.init_group(made):
        yield made


def check(peer: str, from_device: str, buffer_device: str, sizes: tuple[int, ...], strided: bool) -> None:
    """The same buffers, again and again, with work of this stream's own before and behind."""
    wide = [torch.zeros(size, 2, device=buffer_device) for size in sizes]
    buffers = [tensor[:, 1] if strided else tensor[:, 1].contiguous() for tensor in wide]
    for value in range(8):
        torch.cuda._sleep(_LATE // 10)
        for buffer in buffers:
            buffer.fill_(-1.0)
        result = rtr.rpc_sync(peer, into=buffers).filled(from_device, float(value), *sizes)
        assert all(tensor is buffer for tensor, buffer in zip(result, buffers, strict=True))
        for number, buffer in enumerate(buffers):
            assert bool((buffer == value + number).all()), (value, number)
    if strided:
        assert not any(tensor[:, 0].any() for tensor in wide)


SIZES = [(LARGE,), (SMALL,), (SMALL, LARGE, 0, LARGE + 1), (SMALL,) * 300]


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=len)
@pytest.mark.parametrize(("from_device", "to"), [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
def test_on_one_gpu(actors: dict[str, Any], from_device: str, to: str, sizes: tuple[int, ...], strided: bool) -> None:
    in_actor(actors["a"], check, "b", from_device, to, sizes, strided)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=len)
@pytest.mark.parametrize(("from_device", "to"), [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
def test_on_two_gpus(actors: dict[str, Any], from_device: str, to: str, sizes: tuple[int, ...], strided: bool) -> None:
    in_actor(actors["a"], check, "c", from_device, to, sizes, strided)


@pytest.mark.parametrize("strided", [False, True])
def test_from_a_member_without_a_gpu(actors: dict[str, Any], strided: bool) -> None:
    for sizes in SIZES:
        in_actor(actors["a"], check, "h", "cpu", "cuda", sizes, strided)


def test_to_oneself(actors: dict[str, Any]) -> None:
    for from_device, to in (("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")):
        in_actor(actors["a"], check, "a", from_device, to, (SMALL, LARGE), False)


def test_out_of_shared_memory_of_one_gpu(actors: dict[str, Any]) -> None:
    in_actor(actors["a"], take_shared)
    assert in_actor(actors["b"], nothing_is_out), "the memory is the sender's again"


def take_shared() -> None:
    for sizes in SIZES:
        buffers = [torch.zeros(size, device="cuda") for size in sizes]
        for value in range(5):
            rtr.rpc_sync("b", into=buffers).shared(float(value), *sizes)
            assert all(bool((buffer == value + number).all()) for number, buffer in enumerate(buffers))
        insides.saved.kept = buffers


def nothing_is_out() -> bool:
    from tests.polling import wait_until

    lane = insides.tensor_lane("cuda_ipc")
    return wait_until(lambda: not lane.outstanding, 5)


def test_a_mismatch_changes_no_buffer(actors: dict[str, Any]) -> None:
    in_actor(actors["a"], mismatch)
    assert in_actor(actors["b"], nothing_is_out)


def mismatch() -> None:
    buffers = [torch.zeros(LARGE, device="cuda"), torch.zeros(3, device="cuda")]
    with pytest.raises(rtr.ConfigurationError, match="buffer 1 of into= is float32"):
        rtr.rpc_sync("b", into=buffers).filled("cuda", 1.0, LARGE, 4)
    assert not any(buffer.any() for buffer in buffers)


def test_a_strided_tensor_in_registered_memory(actors: dict[str, Any]) -> None:
    in_actor(actors["a"], bring_columns)


def bring_columns() -> None:
    """Into contiguous and strided tensors on the GPU, out of memory that the GPU accesses directly."""
    import mmap

    from raytorchrpc.tensors import host_device_copy

    memory = mmap.mmap(-1, 4 << 20)
    matrix = torch.frombuffer(memory, dtype=torch.float32).view(1024, 1024).copy_(torch.rand(1024, 1024))
    host_device_copy.announce(matrix.data_ptr(), matrix.nbytes)
    try:
        wide = torch.zeros(1024, 512, device="cuda")
        targets = [torch.zeros(1024, 300, device="cuda"), wide[:, 100:400]]
        for target in targets:
            host_device_copy.copy_into([target], [matrix[:, 7:307]])
            assert torch.equal(target.cpu(), matrix[:, 7:307])
        assert not wide[:, :100].any() and not wide[:, 400:].any()
    finally:
        host_device_copy.withdraw(matrix.data_ptr())
