"""CUDA kernels from their source, compiled by NVRTC, the compiler that comes with torch."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import logging
import threading
from pathlib import Path
from typing import NamedTuple

import torch

from raytorchrpc.errors import LaneUnavailable
from raytorchrpc.process import threads
from raytorchrpc.process.cuda_driver import Driver, driver

logger = logging.getLogger(__name__)


class Kernel(NamedTuple):
    """A kernel for one GPU."""

    driver: Driver
    function: int

    def launch(self, grid: tuple[int, int], block: int, arguments: bytes, stream: int) -> None:
        """Queue it on a stream. The GPU's context is current on this thread; see ``Driver.launch``."""
        self.driver.launch(self.function, grid, block, arguments, stream)


class KernelSource:
    """The source of a kernel, and what it was compiled to. Thread-safe."""

    def __init__(self, name: str, source: str) -> None:
        """``name``: of an ``extern "C" __global__`` function in it."""
        self.name, self.source = name, source
        self._lock = threading.Lock()
        self._compiled: dict[int, Kernel | None] = {}

    def on(self, device: int, driver: Driver) -> Kernel | None:
        """The kernel for a GPU; None while it is compiled, which the first call begins, and where that fails.

        Does not block: compiling takes 0.1 to 2 s, on a thread of its own.
        """
        if device not in self._compiled:
            with self._lock:
                if device not in self._compiled:
                    with contextlib.suppress(threads.ThreadShortage):  # the next call tries again
                        threads.start(self._compile, device, driver, name="raytorchrpc-nvrtc")
                        self._compiled.setdefault(device, None)
        return self._compiled.get(device)

    def ready_on(self, device: torch.device) -> Kernel | None:
        """``on`` for any device: None also where there are no GPUs."""
        if device.type != "cuda":
            return None
        try:
            return self.on(device.index, driver())
        except LaneUnavailable:
            return None

    def _compile(self, device: int, driver: Driver) -> None:
        try:
            capability = torch.cuda.get_device_capability(device)
            image = _compile(self.name, self.source, "sm_{}{}".format(*capability))
            with driver.on(device):
                self._compiled[device] = Kernel(driver, driver.function_in(image, self.name))
        except Exception as error:  # everything works without it, only slower
            logger.info("kernel %s is not used on cuda:%d: %s", self.name, device, error)


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    """Raises LaneUnavailable if there is none."""
    name = f"libnvrtc.so.{str(torch.version.cuda).partition('.')[0]}"
    found = importlib.util.find_spec("nvidia")  # where pip puts it
    places = [] if found is None else list(found.submodule_search_locations or ())
    for candidate in [Path(name), *(path for place in places for path in Path(place).glob(f"*/lib/{name}"))]:
        with contextlib.suppress(OSError):
            if candidate.is_absolute():  # it opens these by their name, which leads nowhere unless they are loaded
                for builtins in candidate.parent.glob("libnvrtc-builtins.so.*"):
                    ctypes.CDLL(str(builtins))
            return ctypes.CDLL(str(candidate))
    raise LaneUnavailable("cuda_ipc", f"there is no {name}")


def _compile(name: str, source: str, architecture: str) -> bytes:
    nvrtc, program, size = _nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    options = (ctypes.c_char_p * 1)(f"--gpu-architecture={architecture}".encode())
    text, title = source.encode(), f"{name}.cu".encode()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, title, 0, None, None), "nvrtcCreateProgram")
    try:
        code = nvrtc.nvrtcCompileProgram(program, 1, options)
        if code:
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise LaneUnavailable("cuda_ipc", f"{name} does not compile: {log.value.decode(errors='replace')}")
        _check(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)), "nvrtcGetCUBINSize")
        image = ctypes.create_string_buffer(size.value)
        _check(nvrtc.nvrtcGetCUBIN(program, image), "nvrtcGetCUBIN")
        return image.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _check(code: int, what: str) -> None:
    if code:
        raise LaneUnavailable("cuda_ipc", f"{what} failed with error {code}")
