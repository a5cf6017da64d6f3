"""Kernels where none can be compiled; tests/gpu/test_copy_kernel.py has those that run."""

from __future__ import annotations

import logging
import threading

import pytest
import torch

from raytorchrpc.process.cuda_driver import Driver, KernelSource

_LONG_S = 30.0


class NoDriver(Driver):
    def __init__(self) -> None:
        """Needs no libcuda."""


def await_compiler() -> int:
    """How many compilers have run, and have ended."""
    found = [thread for thread in threading.enumerate() if thread.name == "raytorchrpc-nvrtc"]
    for thread in found:
        thread.join(_LONG_S)
        assert not thread.is_alive()
    return len(found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here it compiles")
def test_without_a_compiler_there_is_no_kernel_and_no_error(caplog: pytest.LogCaptureFixture) -> None:
    source = KernelSource("nothing", 'extern "C" __global__ void nothing() {}')
    with caplog.at_level(logging.INFO, "raytorchrpc"):
        assert source.on(0, NoDriver()) is None
        await_compiler()
        assert source.on(0, NoDriver()) is None
    assert await_compiler() == 0, "it is not tried again for each copy"
    assert "cuda:0" in caplog.text
