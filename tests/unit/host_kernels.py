"""Runs CUDA kernels, compiled from their real source by the system's C++ compiler, in this process's own memory."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from raytorchrpc._compat import torch_internals
from raytorchrpc.process.cuda_driver import Driver, Kernel, KernelSource

#: What the sources use of CUDA. ``launch`` reads the arguments at the offsets that they have in a C struct.
_BEFORE = """
#include <cmath>
#include <cstddef>
#include <tuple>
#include <type_traits>
#ifdef MEETS
#include <barrier>
#include <thread>
#include <vector>
static std::barrier<>* meeting;
#define __syncthreads() meeting->arrive_and_wait()
#define __shared__ static
#endif
#define __global__
#define __device__
struct Place { unsigned x, y, z; };
static thread_local Place blockIdx, threadIdx, blockDim, gridDim;
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
"""
_AFTER = """
template <class Argument> const Argument& next(const char* arguments, size_t& offset) {
    static_assert(std::is_trivially_copyable<Argument>::value, "not an argument of a kernel");
    const size_t begin = (offset + alignof(Argument) - 1) / alignof(Argument) * alignof(Argument);
    offset = begin + sizeof(Argument);
    return *reinterpret_cast<const Argument*>(arguments + begin);
}

template <class... Arguments>
size_t run(void (*kernel)(Arguments...), const char* arguments, size_t size, Place grid, Place block) {
    size_t offset = 0;
    std::tuple<const std::decay_t<Arguments>&...> all{next<std::decay_t<Arguments>>(arguments, offset)...};
    if (offset != size) return offset;
#ifdef MEETS
    std::barrier<> here(block.x);
    meeting = &here;
    std::vector<std::thread> threads;
    for (unsigned x = 0; x < block.x; ++x)
        threads.emplace_back([=, &all, &here] {
            gridDim = grid, blockDim = block, threadIdx.x = x;
            for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y)
                for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) {
                    std::apply(kernel, all);
                    here.arrive_and_wait();
                }
        });
    for (auto& thread : threads) thread.join();
#else
    gridDim = grid, blockDim = block;
    for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y)
        for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x)
            for (threadIdx.x = 0; threadIdx.x < block.x; ++threadIdx.x) std::apply(kernel, all);
#endif
    return size;
}

extern "C" size_t launch(const char* arguments, size_t size, unsigned x, unsigned y, unsigned threads) {
    return run(KERNEL, arguments, size, Place{x, y, 1}, Place{threads, 1, 1});
}
"""
_MEETS = "__syncthreads"
_MOST_ARGUMENTS = 4096
#: Threads of a block that wait for one another: each is a thread of this process.
_MOST_THREADS = 8


@functools.cache
def _compiled(source: KernelSource) -> Any:
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    # A copy of the argument for each thread would take longer than all that the thread does.
    text = re.sub(r"const __grid_constant__ (\w+) ", r"const \1& ", source.source)
    with tempfile.TemporaryDirectory() as folder:
        code, library = Path(folder, "kernel.cpp"), Path(folder, "kernel.so")
        code.write_text(_BEFORE + text + _AFTER.replace("KERNEL", source.name))
        kind = ["-std=c++20", "-DMEETS", "-pthread"] if _MEETS in text else ["-std=c++17"]
        command = [compiler, *kind, "-O1", "-w", "-shared", "-fPIC", "-o", str(library), str(code)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert not done.returncode, done.stderr
        launch: Any = ctypes.CDLL(str(library)).launch
    launch.restype = ctypes.c_size_t
    launch.argtypes = [ctypes.c_char_p, ctypes.c_size_t, *[ctypes.c_uint] * 3]
    return launch


class HostDriver(Driver):
    """Launches one kernel on this process's own memory, thread by thread."""

    def __init__(self, source: KernelSource) -> None:
        """Needs no libcuda. Skips the test where no compiler is."""
        self._launch, self._meets = _compiled(source), _MEETS in source.source
        self.launched: list[tuple[tuple[int, int], bytes]] = []
        """The grid and the arguments of each launch."""

    def on(self, device: int) -> Any:
        return contextlib.nullcontext()

    def launch(self, function: int, grid: tuple[int, int], block: int, arguments: bytes, stream: int) -> None:
        assert len(arguments) <= _MOST_ARGUMENTS and min(*grid, block) > 0 and block <= 1024
        self.launched.append((grid, arguments))
        if self._meets:
            block = min(block, _MOST_THREADS)
        read = self._launch(arguments, len(arguments), *grid, block)
        assert read == len(arguments), f"the kernel's arguments have {read} bytes"


def use(monkeypatch: pytest.MonkeyPatch, source: KernelSource) -> HostDriver:
    """Have this kernel be ready on every device."""
    driver = HostDriver(source)
    monkeypatch.setattr(source, "ready_on", lambda device: Kernel(driver, 0))
    monkeypatch.setattr(torch_internals, "current_cuda_stream", lambda device: 0)
    return driver


def guarded(tensor: torch.Tensor, spare: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """(All memory, a copy of a tensor that lies in it between bytes of 0xA5)."""
    size = tensor.nbytes
    memory = torch.full((size + 2 * spare,), 0xA5, dtype=torch.uint8)
    inner = memory[spare : spare + size].view(tensor.dtype).view(tensor.shape)
    return memory, inner.copy_(tensor)
