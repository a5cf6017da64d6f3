"""The few CUDA driver calls that torch does not offer: handles of allocations, registered host memory, and copies by
address. And CUDA kernels from their source, compiled by NVRTC, the compiler that comes with torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import logging
import os
import struct
import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from raytorchrpc.errors import LaneUnavailable
from raytorchrpc.process import threads
from raytorchrpc.process.locks import Lock

logger = logging.getLogger(__name__)

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_BUFFER_ID = 7
_PORTABLE, _DEVICE_MAP = 1, 2
#: What ``wait`` compares a word by: at least, in the cyclic order of 32 bits.
_AT_LEAST = 0
_HOST_MEMORY, _DEVICE_MEMORY = 1, 2
#: Most bytes from one row of a 2-D copy to the next (CU_DEVICE_ATTRIBUTE_MAX_PITCH).
MAX_PITCH = (1 << 31) - 1
#: Names of what ``extra`` of cuLaunchKernel has.
_END, _ARGUMENTS, _THEIR_SIZE = None, 1, 2
_SUCCESS = 0
_INVALID_VALUE = 1
_CANNOT_SHARE = (
    "memory from expandable_segments:True or cudaMallocAsync, and memory that another process shared with this one, "
    "cannot be shared: set PYTORCH_CUDA_ALLOC_CONF without them, or send a clone()"
)


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


#: CUDA_MEMCPY2D of cuda.h: x, y, type of memory, host, device, array and pitch of the source, then of the target; then
#: width and height.
_COPY_2D = struct.Struct("@NNiPQPNNNiPQPNNN")


_ready = threading.local()


class Driver:
    """libcuda, with this process's primary contexts. Thread-safe. Calls are quick unless documented otherwise."""

    def __init__(self, library: type[ctypes.CDLL] = ctypes.CDLL) -> None:
        """``library``: PyDLL keeps the interpreter lock in calls."""
        try:
            self._cuda = library("libcuda.so.1")
        except OSError as error:
            raise LaneUnavailable("cuda_ipc", f"no CUDA driver library: {error}") from error
        self._cuda.cuIpcOpenMemHandle_v2.argtypes = [ctypes.c_void_p, _Handle, ctypes.c_uint]
        device, host, size = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t
        self._cuda.cuMemcpyDtoDAsync_v2.argtypes = [device, device, size, ctypes.c_void_p]
        self._cuda.cuMemcpy2DAsync_v2.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self._cuda.cuMemcpyHtoDAsync_v2.argtypes = [device, host, size, ctypes.c_void_p]
        self._cuda.cuMemcpyDtoHAsync_v2.argtypes = [host, device, size, ctypes.c_void_p]
        self._cuda.cuMemHostRegister_v2.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
        self._cuda.cuMemHostUnregister.argtypes = [ctypes.c_void_p]
        self._cuda.cuMemHostGetDevicePointer_v2.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint]
        self._cuda.cuIpcCloseMemHandle.argtypes = [ctypes.c_uint64]
        number, pointer = ctypes.c_uint, ctypes.c_void_p
        self._cuda.cuLaunchKernel.argtypes = [pointer, *[number] * 7, pointer, pointer, pointer]
        self._write = getattr(self._cuda, "cuStreamWriteValue32_v2", None)
        self._wait = getattr(self._cuda, "cuStreamWaitValue32_v2", None)
        for operation in filter(None, (self._write, self._wait)):
            operation.argtypes = [pointer, device, ctypes.c_uint32, number]
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._lock = Lock()

    def on(self, device: int) -> _On:
        """``with driver().on(device):`` makes that device's context current on this thread, for other calls."""
        return _On(self, device)

    def enter(self, device: int) -> None:
        """Make that device's context current on this thread, without an end."""
        if getattr(_ready, "device", None) == device == torch.cuda.current_device():
            return
        context = self._contexts.get(device)
        if context is None:
            with self._lock:
                number, context = ctypes.c_int(), ctypes.c_void_p()
                self._check(self._cuda.cuDeviceGet(ctypes.byref(number), device), "cuDeviceGet")
                self._check(
                    self._cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), number), "cuDevicePrimaryCtxRetain"
                )
                self._contexts[device] = context
        self._check(self._cuda.cuCtxSetCurrent(context), "cuCtxSetCurrent")
        _ready.device = device

    def identity_at(self, pointer: int) -> int:
        """The identity of the allocation that contains an address; never used again. Raises LaneUnavailable."""
        identity = ctypes.c_uint64()
        code = self._cuda.cuPointerGetAttribute(ctypes.byref(identity), _BUFFER_ID, ctypes.c_uint64(pointer))
        if code != _SUCCESS:
            raise LaneUnavailable("cuda_ipc", f"this allocation has no identity (driver error {code}); {_CANNOT_SHARE}")
        return identity.value

    def base_of(self, pointer: int) -> int:
        """The address at which the allocation begins that contains an address. Raises LaneUnavailable."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        code = self._cuda.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(pointer))
        if code != _SUCCESS:
            raise LaneUnavailable("cuda_ipc", f"this allocation has no base (driver error {code}); {_CANNOT_SHARE}")
        return base.value

    def size_of(self, base: int) -> int:
        """Return the size in bytes of the allocation that begins at ``base``."""
        size = ctypes.c_size_t()
        code = self._cuda.cuMemGetAddressRange_v2(None, ctypes.byref(size), ctypes.c_uint64(base))
        self._check(code, "cuMemGetAddressRange")
        return size.value

    def handle_of(self, base: int) -> bytes:
        """Return the handle by which another process can map an allocation. Raises LaneUnavailable if it has none."""
        handle = _Handle()
        code = self._cuda.cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(base))
        if code != _SUCCESS:
            raise LaneUnavailable("cuda_ipc", f"this allocation has no handle (driver error {code}); {_CANNOT_SHARE}")
        return ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES)

    def open(self, handle: bytes) -> int:
        """Map another process's allocation; returns its address here. Takes 6 to 17 ms."""
        if len(handle) != HANDLE_BYTES:
            raise LaneUnavailable("cuda_ipc", f"a handle of GPU memory has {HANDLE_BYTES} bytes, not {len(handle)}")
        filled, pointer = _Handle(), ctypes.c_uint64()
        ctypes.memmove(ctypes.byref(filled), handle, HANDLE_BYTES)
        code = self._cuda.cuIpcOpenMemHandle_v2(ctypes.byref(pointer), filled, _LAZY_PEER_ACCESS)
        if code != _SUCCESS:
            raise LaneUnavailable("cuda_ipc", f"cannot map the peer's GPU memory (driver error {code})")
        return pointer.value

    def close(self, pointer: int) -> None:
        """Unmap an allocation, which the GPU must not use any more."""
        self._cuda.cuIpcCloseMemHandle(pointer)

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Queue a copy on a stream."""
        self._check(self._cuda.cuMemcpyDtoDAsync_v2(target, source, size, stream), "cuMemcpyDtoDAsync")

    def copy_all(self, copies: Iterable[tuple[int, int, int, int, int, int]], source: int, stream: int) -> None:
        """Queue copies on a stream: (target, offset from ``source``, width, rows, pitches of source and target)."""
        copy = self._cuda.cuMemcpyDtoDAsync_v2
        for target, offset, width, rows, source_pitch, target_pitch in copies:
            if rows > 1:
                self.copy_rows(target, source + offset, width, rows, target_pitch, source_pitch, stream)
            elif code := copy(target, source + offset, width, stream):
                self._check(code, "cuMemcpyDtoDAsync")

    def copy_rows(
        self, target: int, source: int, width: int, rows: int, target_pitch: int, source_pitch: int, stream: int
    ) -> None:
        """Queue a copy of ``rows`` rows of ``width`` bytes. The pitches, at most MAX_PITCH, lead from row to row."""
        if rows == 1:
            self.copy(target, source, width, stream)
            return
        ends = (0, 0, _DEVICE_MEMORY, 0, source, 0, source_pitch), (0, 0, _DEVICE_MEMORY, 0, target, 0, target_pitch)
        described = _COPY_2D.pack(*ends[0], *ends[1], width, rows)
        code = self._cuda.cuMemcpy2DAsync_v2(described, stream)
        if code == _INVALID_VALUE:  # within a GPU, CUDA guarantees it only for pitches of cuMemAllocPitch
            for row in range(rows):
                self.copy(target + row * target_pitch, source + row * source_pitch, width, stream)
            return
        self._check(code, "cuMemcpy2DAsync")

    def function_in(self, image: bytes, name: str) -> int:
        """Load a compiled module into the current context, for good; returns a function in it. May wait for the GPU."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._check(self._cuda.cuModuleLoadData(ctypes.byref(module), image), "cuModuleLoadData")
        code = self._cuda.cuModuleGetFunction(ctypes.byref(function), module, name.encode())
        self._check(code, "cuModuleGetFunction")
        return function.value or 0

    def launch(self, function: int, grid: tuple[int, int], block: int, arguments: bytes, stream: int) -> None:
        """Queue a kernel on a stream. ``block``: threads of each block. ``arguments``: as a C struct has them."""
        packed, size = ctypes.create_string_buffer(arguments), ctypes.c_size_t(len(arguments))
        where = ctypes.addressof(packed), ctypes.addressof(size)
        extra = (ctypes.c_void_p * 5)(_ARGUMENTS, where[0], _THEIR_SIZE, where[1], _END)
        code = self._cuda.cuLaunchKernel(function, *grid, 1, block, 1, 1, 0, stream, None, extra)
        self._check(code, "cuLaunchKernel")

    def copy_in(self, target: int, source: int, size: int, stream: int) -> None:
        """Queue a copy from host memory to the GPU. Slow if the host memory is not registered."""
        self._check(self._cuda.cuMemcpyHtoDAsync_v2(target, source, size, stream), "cuMemcpyHtoDAsync")

    def copy_in_by_engine(self, target: int, source: int, size: int, stream: int) -> None:
        """As ``copy_in``, from registered host memory, by a copy engine also if it is small, if ``size`` is even.

        One row of less than 32 KB is copied by what runs kernels, for which processes that share a GPU wait until it is
        their turn: 0.14 ms for each of them (H100). Two rows are not.
        """
        rows = 1 if size % 2 else 2
        width = size // rows
        ends = (0, 0, _HOST_MEMORY, source, 0, 0, width), (0, 0, _DEVICE_MEMORY, 0, target, 0, width)
        described = _COPY_2D.pack(*ends[0], *ends[1], width, rows)
        self._check(self._cuda.cuMemcpy2DAsync_v2(described, stream), "cuMemcpy2DAsync")

    def copy_out(self, target: int, source: int, size: int, stream: int) -> None:
        """Queue a copy from the GPU to host memory. Slow if the host memory is not registered."""
        self._check(self._cuda.cuMemcpyDtoHAsync_v2(target, source, size, stream), "cuMemcpyDtoHAsync")

    def register(self, address: int, size: int) -> None:
        """Lock whole pages of host memory, so that every GPU can access them directly.

        Slow for much memory that has never been touched. Raises LaneUnavailable if it cannot be locked.
        """
        flags = _PORTABLE | _DEVICE_MAP
        self._check(self._cuda.cuMemHostRegister_v2(address, size, flags), "cuMemHostRegister")

    def address_on_gpus(self, address: int) -> int:
        """Return the address of registered host memory for the GPUs."""
        mapped = ctypes.c_uint64()
        code = self._cuda.cuMemHostGetDevicePointer_v2(ctypes.byref(mapped), address, 0)
        self._check(code, "cuMemHostGetDevicePointer")
        return mapped.value

    @property
    def has_words(self) -> bool:
        """Whether streams can ``write`` and ``wait``: with the driver of CUDA 11.7 or newer."""
        return self._write is not None and self._wait is not None

    def write(self, address: int, value: int, stream: int) -> None:
        """Have a stream write a word of 32 bits, at an address for the GPUs, behind all that is queued on it."""
        assert self._write is not None
        self._check(self._write(stream, address, value, 0), "cuStreamWriteValue32")

    def wait(self, address: int, value: int, stream: int) -> None:
        """Have a stream wait until a word of 32 bits has at least this value, in cyclic order.

        The CPU may write the word too, which ends the wait.
        """
        assert self._wait is not None
        self._check(self._wait(stream, address, value, _AT_LEAST), "cuStreamWaitValue32")

    def unregister(self, address: int) -> None:
        """Undo ``register``, before the memory is unmapped. The GPUs must not use it any more."""
        self._cuda.cuMemHostUnregister(address)

    def _check(self, code: int, operation: str) -> None:
        if code != _SUCCESS:
            raise LaneUnavailable("cuda_ipc", f"{operation} failed with driver error {code}")


class _On:
    __slots__ = ("_device", "_driver", "_guard")

    def __init__(self, driver: Driver, device: int) -> None:
        self._driver, self._device = driver, device
        self._guard: Any = None

    def __enter__(self) -> None:
        if torch.cuda.current_device() != self._device:  # restored afterwards: it is the user's choice
            self._guard = torch.cuda.device(self._device)
            self._guard.__enter__()
        self._driver.enter(self._device)

    def __exit__(self, *raised: object) -> None:
        if self._guard is not None:
            self._guard.__exit__(*raised)


@functools.cache
def identity_of(device: int) -> str:
    """A globally unique identity of a GPU; empty if torch does not tell it."""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))


@functools.cache
def driver() -> Driver:
    """Return this process's driver. Raises LaneUnavailable if there is none."""
    return Driver()


@functools.cache
def quick_driver() -> Driver:
    """As ``driver``, but calls keep the interpreter lock, which a process with busy threads gets back late.

    Only for what is queued on an idle stream: a call blocks while a stream is full.
    """
    return Driver(ctypes.PyDLL)


def is_idle(stream: torch.cuda.Stream) -> bool:
    """Whether the current stream of the current GPU has no work. False while a CUDA graph is captured: then it may not
    be asked.
    """
    return not torch.cuda.is_current_stream_capturing() and stream.query()


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
        self._lock = Lock()
        self._compiled: dict[int, Kernel | None] = {}

    def on(self, device: int, driver: Driver) -> Kernel | None:
        """The kernel for a GPU; None while it is compiled, which the first call begins, and where that fails.

        Does not block: compiling takes 0.1 to 2 s, on a thread of its own.
        """
        if device not in self._compiled:
            with self._lock:
                if device not in self._compiled:
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
    package = importlib.util.find_spec("nvidia")  # where pip puts it
    places = [] if package is None else list(package.submodule_search_locations or ())
    folders = [os.path.join(place, each, "lib") for place in places for each in os.listdir(place)]
    for folder in ["", *(folder for folder in folders if os.path.exists(os.path.join(folder, name)))]:
        with contextlib.suppress(OSError):
            for each in os.listdir(folder) if folder else ():
                if each.startswith("libnvrtc-builtins.so."):  # it opens these by name, which only finds loaded ones
                    ctypes.CDLL(os.path.join(folder, each))
            return ctypes.CDLL(os.path.join(folder, name))
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


def _check(code: int, operation: str) -> None:
    if code:
        raise LaneUnavailable("cuda_ipc", f"{operation} failed with error {code}")
