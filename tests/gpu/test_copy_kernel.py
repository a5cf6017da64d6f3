"""The kernel that makes many copies, and memory that is mapped while a pull is planned."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch

from raytorchrpc.lanes.base import Copies, Copy, Target
from raytorchrpc.lanes.common.gpu_copies import COPY_ROWS, RowCopies, Scatter
from raytorchrpc.process.cuda_driver import Kernel, driver

pytestmark = pytest.mark.gpu

_COMPILE_S = 60.0


def kernel() -> Kernel:
    """As soon as it is compiled."""
    until = time.monotonic() + _COMPILE_S
    found = COPY_ROWS.on(0, driver())
    while found is None and time.monotonic() < until:
        for thread in threading.enumerate():
            if thread.name == "raytorchrpc-nvrtc":
                thread.join(_COMPILE_S)
        found = COPY_ROWS.on(0, driver())
    assert found is not None, "NVRTC comes with torch"
    return found


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.complex128])
def test_any_rows_arrive(dtype: torch.dtype) -> None:
    """At any alignment, contiguous and strided, tiny and of many megabytes; nothing beside them is written."""
    chance, device = random.Random(str(dtype)), torch.device("cuda", 0)
    flat = torch.randint(0, 256, (64 << 20,), dtype=torch.uint8, device=device)
    described, targets, guards = list[Copy](), list[torch.Tensor](), []
    for number in range(200):
        large = number % 20 == 0
        shape = (chance.randint(1, 2000), chance.randint(1, 1000 if large else 60))
        whole = torch.zeros(shape[0], shape[1] + chance.choice([0, 1, 8]), dtype=dtype, device=device)
        target = whole[:, : shape[1]]
        stride = shape[1] + chance.choice([0, 0, 1, 3, 64])
        size = (shape[0] - 1) * stride + shape[1]
        offset = chance.randrange(0, flat.numel() - size * dtype.itemsize, dtype.itemsize)
        described.append(Copy(0, Target.of(target), offset, (stride, 1)))
        targets.append(target)
        guards.append(whole)
    cuda, ready = driver(), kernel()
    with cuda.on(0):
        copies, whole_shape = Copies(described, targets), (torch.uint8, (flat.numel(),))
        scatter = Scatter.of(copies, [flat.numel()], device)
        stream = torch.cuda.current_stream().cuda_stream
        left = scatter.queue(copies, flat.data_ptr(), [whole_shape], device, cuda, lambda: ready, stream)
        for index, source in left:
            targets[index].copy_(source)
    assert len(scatter.direct.rows) > 100
    for (_, _, offset, strides), target, whole in zip(described, targets, guards, strict=True):
        size = (target.shape[0] - 1) * (strides or (0,))[0] + target.shape[1]
        source = flat[offset : offset + size * dtype.itemsize].clone().view(dtype)
        wanted = source.as_strided(tuple(target.shape), strides or ())
        assert torch.equal(target.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))
        assert not whole[:, target.shape[1] :].any()


def test_it_runs_on_the_stream_that_it_is_given() -> None:
    ready, cuda, side = kernel(), driver(), torch.cuda.Stream()
    source, target = torch.ones(1 << 20, device="cuda"), torch.zeros(1 << 20, device="cuda")
    rows = [(target.data_ptr() + at, at, 4096, 1, 0, 0) for at in range(0, 4 << 20, 4096)]
    torch.cuda.synchronize()
    with cuda.on(0), torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        source.fill_(2)
        RowCopies(rows).queue(source.data_ptr(), cuda, lambda: ready, side.cuda_stream)
    assert not target.any(), "the other stream still sleeps"
    side.synchronize()
    assert int(target.min()) == 2
