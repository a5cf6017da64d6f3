"""Tensors over GPU memory that belongs to another process.

A tensor's storage keeps a window alive, through the protocol by which libraries hand each other CUDA arrays. The window
keeps the loan, which tells the owner when the last window is gone, and the mapping, which is closed when nobody needs
it any more.

Should the owner die first, the memory is not taken from under the tensors: in CUDA's implementation it lives as long as
a process has it mapped. CUDA's documents promise that to nobody, so treat such tensors as what is left to be copied.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch

from raytorchrpc.process import fork
from raytorchrpc.process.cuda_driver import driver
from raytorchrpc.tensors.bounds import OutOfBounds, within
from raytorchrpc.tensors.dtypes import Shape


def span_of(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last of a strided tensor, both counted; 0 for an empty one."""
    if 0 in shape:
        return 0
    return 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))


class Mapped:
    """A peer's allocation in this process. It is unmapped when the last reference goes."""

    __slots__ = ("__weakref__", "device", "pointer", "size")

    def __init__(self, pointer: int, size: int, device: torch.device) -> None:
        self.pointer, self.size, self.device = pointer, size, device

    def at(self, offset: int, size: int) -> int:
        """The address of so many bytes in it. Raises OutOfBounds."""
        within(offset, size, self.size)
        return self.pointer + offset

    def __del__(self) -> None:
        if fork.forked():
            return
        with contextlib.suppress(Exception):  # this may be the end of the process
            torch.cuda.synchronize(self.device)  # rare: a copy out of it may be under way
            with driver().on(self.device.index):
                driver().close(self.pointer)


class Mappings:
    """Peers' allocations that stay mapped: the ones used last, and those in which tensors lie. Thread-safe."""

    def __init__(self, limit: int) -> None:
        """``limit``: most to keep open that nothing lies in."""
        self._limit = limit
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, Mapped] = OrderedDict()
        self._alive: WeakValueDictionary[bytes, Mapped] = WeakValueDictionary()
        """Those, and others in which tensors lie."""

    def get(self, handle: bytes, device: torch.device) -> Mapped:
        """The allocation of that handle. Raises LaneUnavailable."""
        with self._lock:
            mapping = self._kept.get(handle)
            if mapping is not None:
                self._kept.move_to_end(handle)
                return mapping
            if len(self._kept) >= self._limit:
                self._kept.popitem(last=False)  # closed as soon as nothing lies in it
            mapping = self._alive.get(handle)
            if mapping is None:
                pointer = driver().open(handle)
                mapping = Mapped(pointer, driver().size_of(pointer), device)
            self._kept[handle] = self._alive[handle] = mapping
            return mapping

    def has(self, base: int) -> bool:
        """Whether memory that begins there is a peer's."""
        return any(mapping.pointer == base for mapping in list(self._alive.values()))

    def close(self, devices: Sequence[int]) -> None:
        """Keep none. ``devices``: that may still read there; waits for them."""
        with self._lock:
            kept, self._kept = self._kept, OrderedDict()
        if kept:
            for index in devices:
                torch.cuda.synchronize(index)
        kept.clear()  # those that nothing lies in are closed


class Loan:
    """What the tensors of one message hold together. ``over()`` is called once, with the last of them, on whatever
    thread drops it.
    """

    __slots__ = ("_over",)

    def __init__(self, over: Callable[[], None]) -> None:
        self._over = over

    def __del__(self) -> None:
        if fork.forked():  # what this process drops, its parent may still use
            return
        with contextlib.suppress(Exception):  # likewise
            self._over()


class Window:
    """Bytes of mapped memory, as torch takes them."""

    def __init__(self, mapped: Mapped, offset: int, size: int, loan: Loan) -> None:
        self._loan = loan  # goes before the mapping
        self._mapped = mapped
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (mapped.at(offset, size), False),
            "version": 2,
        }


def tensor_over(
    mapped: Mapped, offset: int, size: int, shape: Shape, strides: Sequence[int], loan: Loan
) -> torch.Tensor:
    """A tensor of those ``size`` bytes of mapped memory, without a copy; it keeps the mapping and the loan.

    Raises OutOfBounds.
    """
    dtype, extents = shape
    if any(stride < 0 for stride in strides):
        raise OutOfBounds(f"strides {strides}")
    within(0, span_of(extents, strides) * dtype.itemsize, size)
    flat = torch.as_tensor(Window(mapped, offset, size, loan), device=mapped.device)
    return flat.view(dtype).as_strided(extents, tuple(strides))
