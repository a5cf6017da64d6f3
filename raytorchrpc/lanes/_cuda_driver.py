"""The few calls of the CUDA driver that torch does not offer: handles of allocations, and copies by address."""

from __future__ import annotations

import ctypes
import functools
import threading

import torch

from raytorchrpc.errors import LaneUnavailable

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_BUFFER_ID = 7
_SUCCESS = 0


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


_ready = threading.local()


class Driver:
    """libcuda, with this process's primary contexts. Thread-safe; every call is short unless it says otherwise."""

    def __init__(self) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise LaneUnavailable("cuda_ipc", f"no CUDA driver library: {error}") from error
        self._cuda.cuIpcOpenMemHandle_v2.argtypes = [ctypes.c_void_p, _Handle, ctypes.c_uint]
        self._cuda.cuMemcpyDtoDAsync_v2.argtypes = [
            ctypes.c_uint64,
            ctypes.c_uint64,
            ctypes.c_size_t,
            ctypes.c_void_p,
        ]
        self._cuda.cuIpcCloseMemHandle.argtypes = [ctypes.c_uint64]
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._lock = threading.Lock()

    def enter(self, device: int) -> None:
        """Make the device's context current on this thread; the other calls need it."""
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

    def allocation(self, pointer: int) -> tuple[int, int]:
        """(base address, identity) of the allocation that ``pointer`` lies in; the identity never comes back."""
        base, size, identity = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_uint64()
        address = ctypes.c_uint64(pointer)
        self._check(
            self._cuda.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), address), "cuMemGetAddressRange"
        )
        self._check(
            self._cuda.cuPointerGetAttribute(ctypes.byref(identity), _BUFFER_ID, address), "cuPointerGetAttribute"
        )
        return base.value, identity.value

    def handle_of(self, base: int) -> bytes:
        """The handle by which another process can map an allocation. Raises LaneUnavailable if it has none."""
        handle = _Handle()
        code = self._cuda.cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(base))
        if code != _SUCCESS:
            raise LaneUnavailable(
                "cuda_ipc",
                f"this allocation cannot be shared (driver error {code}); memory from expandable_segments:True or "
                f"cudaMallocAsync cannot: set PYTORCH_CUDA_ALLOC_CONF without them",
            )
        return ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES)

    def open(self, handle: bytes) -> int:
        """Map another process's allocation; returns its address here. Takes 6 to 17 ms."""
        filled, pointer = _Handle(), ctypes.c_uint64()
        ctypes.memmove(ctypes.byref(filled), handle, HANDLE_BYTES)
        code = self._cuda.cuIpcOpenMemHandle_v2(ctypes.byref(pointer), filled, _LAZY_PEER_ACCESS)
        if code != _SUCCESS:
            raise LaneUnavailable("cuda_ipc", f"cannot map the peer's GPU memory (driver error {code})")
        return pointer.value

    def close(self, pointer: int) -> None:
        """Unmap. The GPU must have finished with it."""
        self._cuda.cuIpcCloseMemHandle(pointer)

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Queue a copy on a stream."""
        self._check(self._cuda.cuMemcpyDtoDAsync_v2(target, source, size, stream), "cuMemcpyDtoDAsync")

    def _check(self, code: int, what: str) -> None:
        if code != _SUCCESS:
            raise LaneUnavailable("cuda_ipc", f"{what} failed with driver error {code}")


@functools.cache
def driver() -> Driver:
    """This process's. Raises LaneUnavailable where there is none."""
    return Driver()
