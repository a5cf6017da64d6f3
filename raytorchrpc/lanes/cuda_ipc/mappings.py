"""Tensors over GPU memory that belongs to another process.

A tensor's storage keeps a window alive, by the CUDA array interface. The window keeps the loan, which informs the owner
when the last window is gone, and the mapping, which is closed when it is unused.

If the owner dies first, the tensors stay valid: in CUDA's implementation memory lives as long as any process has it
mapped. CUDA's documentation does not promise this, so copy what is needed from such tensors.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from weakref import WeakValueDictionary

import torch

from raytorchrpc.errors import LaneUnavailable
from raytorchrpc.process import fork
from raytorchrpc.process.cuda_driver import driver
from raytorchrpc.process.locks import Lock
from raytorchrpc.tensors.dtypes import Shape, strided_span, within


class Mapped:
    """A peer's allocation, mapped into this process until the last reference is gone."""

    __slots__ = ("__weakref__", "device", "pointer", "size")

    def __init__(self, pointer: int, size: int, device: torch.device) -> None:
        self.pointer, self.size, self.device = pointer, size, device

    def at(self, offset: int, size: int) -> int:
        """Return the address of ``size`` bytes in it. Raises OutOfBounds."""
        within(offset, size, self.size)
        return self.pointer + offset

    def __del__(self) -> None:
        if fork.forked():
            return
        with contextlib.suppress(Exception):  # the process may be ending
            torch.cuda.synchronize(self.device)  # rare: a copy from it may be in progress
            with driver().on(self.device.index):
                driver().close(self.pointer)


class Mappings:
    """Peers' allocations that stay mapped: those used last, and those that tensors use. Thread-safe."""

    def __init__(self, limit: int) -> None:
        """``limit``: most that stay mapped without a tensor."""
        self._limit = limit
        self._lock = Lock()
        self._kept: OrderedDict[bytes, Mapped] = OrderedDict()
        self._alive: WeakValueDictionary[bytes, Mapped] = WeakValueDictionary()
        """Those, and others that tensors use."""
        self._is_closed = False

    def is_mapped(self, handle: bytes) -> bool:
        return handle in self._kept

    def get(self, handle: bytes, device: torch.device) -> Mapped:
        """Map the allocation of that handle. Raises LaneUnavailable."""
        with self._lock:
            mapping = self._kept.get(handle)
            if mapping is not None:
                self._kept.move_to_end(handle)
                return mapping
            if self._is_closed:
                raise LaneUnavailable("cuda_ipc", "this member leaves the group")
            if len(self._kept) >= self._limit:
                self._kept.popitem(last=False)  # unmapped as soon as no tensor uses it
            mapping = self._alive.get(handle)
            if mapping is None:
                pointer = driver().open(handle)
                mapping = Mapped(pointer, driver().size_of(pointer), device)
            self._kept[handle] = self._alive[handle] = mapping
            return mapping

    def has(self, base: int) -> bool:
        """Whether an allocation that begins at ``base`` belongs to a peer."""
        return any(mapping.pointer == base for mapping in list(self._alive.values()))

    def close(self, devices: Sequence[int]) -> None:
        """Keep none mapped, and map no more. Waits for ``devices``, which may still read."""
        with self._lock:
            self._is_closed = True
            kept, self._kept = self._kept, OrderedDict()
        if kept:
            for index in devices:
                torch.cuda.synchronize(index)
        kept.clear()  # unmaps those that no tensor uses


class Loan:
    """Held by all tensors of one message. ``over()`` is called once, by the thread that drops the last of them."""

    __slots__ = ("_over",)

    def __init__(self, over: Callable[[], None]) -> None:
        self._over = over

    def __del__(self) -> None:
        if fork.forked():  # the parent may still use what this process drops
            return
        with contextlib.suppress(Exception):  # likewise
            self._over()


def tensor_over(
    mapped: Mapped, offset: int, size: int, shape: Shape, strides: Sequence[int], loan: Loan
) -> torch.Tensor:
    """Make a tensor over ``size`` bytes of mapped memory, without a copy. It keeps the mapping and the loan.

    Raises OutOfBounds.
    """
    dtype, extents = shape
    within(0, strided_span(extents, strides, dtype.itemsize), size)
    described = {"shape": (size,), "typestr": "|u1", "data": (mapped.at(offset, size), False), "version": 2}
    # The loan comes first, so that it is released before the mapping.
    window = SimpleNamespace(loan=loan, mapped=mapped, __cuda_array_interface__=described)
    flat = torch.as_tensor(window, device=mapped.device)
    return flat.view(dtype).as_strided(extents, tuple(strides))
