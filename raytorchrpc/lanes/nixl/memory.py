"""Memory that stays registered with NIXL, because registering costs more than most transfers.

``HostPool``: reusable blocks of host memory. ``Segments``: allocations of torch's CUDA allocator, each registered as a
whole when a tensor in it is first used.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections import deque
from collections.abc import Sequence

import numpy
import torch

from raytorchrpc.errors import LaneUnavailable
from raytorchrpc.lanes.common import packing
from raytorchrpc.lanes.common.packing import Members
from raytorchrpc.lanes.nixl.agent import LANE, Agent, Place, Registered
from raytorchrpc.process.cuda_driver import driver
from raytorchrpc.process.locks import Lock
from raytorchrpc.tensors.dtypes import Shape, span_of, within

_SMALLEST = 1 << 16

NOTHING: Place = (0, b"", 0, 0)


class Block:
    """A block of registered host memory, which its user gives back once."""

    __slots__ = ("bytes", "flat", "memory", "size")

    def __init__(self, agent: Agent, size: int) -> None:
        """Raises LaneUnavailable."""
        try:
            mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError) as error:
            raise LaneUnavailable(LANE, f"cannot map {size} bytes of memory: {error}") from error
        if hasattr(mmap, "MADV_HUGEPAGE") and size >= 2 << 20:
            mapped.madvise(mmap.MADV_HUGEPAGE)  # fewer page faults while registering
        self.size = size
        self.bytes = numpy.frombuffer(mapped, dtype=numpy.uint8)
        self.flat = torch.from_numpy(self.bytes)
        self.memory: Registered = agent.register("cpu", self.bytes.ctypes.data, size)


class HostPool:
    """A pool of blocks. Thread-safe. Sizes are rounded up, by an eighth at most, so that blocks can be reused."""

    def __init__(self, agent: Agent, capacity: int) -> None:
        """``capacity``: most bytes, in use or spare."""
        self.capacity = capacity
        self._agent = agent
        self._lock = Lock()
        self._free: dict[int, list[Block]] = {}
        self._returned: deque[Block] = deque()
        self._given: dict[int, Block] = {}
        self._total = 0
        self._spare = 0
        self._closed = False

    @property
    def used(self) -> int:
        with self._lock:
            self._collect()
            return self._total - self._spare

    def take(self, size: int, *, beyond: bool = False) -> Block:
        """Take a block of at least ``size`` bytes. ``beyond``: even if the pool is full.

        Registers new memory if no spare block fits. Raises LaneUnavailable.
        """
        size = _rounded(size)
        with self._lock:
            self._collect()
            if self._closed:
                raise LaneUnavailable(LANE, "the lane is closed")
            for fits in (size, *(larger for larger in sorted(self._free) if size < larger <= 2 * size)):
                if self._free.get(fits):
                    self._spare -= fits
                    return self._free[fits].pop()
            self._make_room(size)
            if self._total + size > self.capacity and not beyond:
                raise LaneUnavailable(
                    LANE,
                    f"no room for {size} bytes: {(self._total - self._spare) >> 20} MiB of {self.capacity >> 20} MiB "
                    f"are in flight or in use; clone() tensors that are kept, or raise GroupConfig.shm_bytes",
                )
            self._total += size
        try:
            return Block(self._agent, size)
        except BaseException:
            with self._lock:
                self._total -= size
            raise

    def give(self, block: Block) -> None:
        """Give a block back. Takes no lock, because finalizers call it too, on any thread."""
        self._returned.append(block)

    def as_array(self, block: Block, size: int, *, copy: bool) -> numpy.ndarray:
        """Return the block's first bytes. The block is given back when no tensor uses them.

        ``copy``: return a copy instead, and give the block back at once.
        """
        if copy:
            copied: numpy.ndarray = block.bytes[:size].copy()
            self.give(block)
            return copied
        view: numpy.ndarray = block.bytes[:size]
        self._given[id(block)] = block
        weakref.finalize(view, self._come_back, id(block)).atexit = False
        return view

    def _come_back(self, number: int) -> None:
        if (block := self._given.pop(number, None)) is not None:  # else the pool has been closed
            self.give(block)

    def close(self) -> None:
        """Deregister all memory. Tensors keep what they use, as ordinary memory."""
        with self._lock:
            self._closed = True
            self._collect()
            blocks = [block for kept in self._free.values() for block in kept]
            blocks += list(self._given.values())
            self._free.clear()
            self._given.clear()
        self._agent.deregister(*(block.memory for block in blocks))

    def _collect(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            if self._closed:
                continue
            if self._total > self.capacity:
                self._drop(block)
            else:
                self._free.setdefault(block.size, []).append(block)
                self._spare += block.size

    def _make_room(self, size: int) -> None:
        for largest in sorted(self._free, reverse=True):
            while self._free[largest] and self._total + size > self.capacity:
                self._spare -= largest
                self._drop(self._free[largest].pop())
            if not self._free[largest]:
                del self._free[largest]

    def _drop(self, block: Block) -> None:
        self._total -= block.size
        self._agent.deregister(block.memory)


def _rounded(size: int) -> int:
    """Round up to one of eight sizes between two powers of two."""
    if size <= _SMALLEST:
        return _SMALLEST
    step = 1 << ((size - 1).bit_length() - 4)
    return -(-size // step) * step


def lay_out(
    pool: HostPool, tensors: Sequence[torch.Tensor]
) -> tuple[list[Block], tuple[Place, ...], tuple[Members, ...]]:
    """Copy CPU tensors into blocks. Returns the blocks, and what a receiver needs. Raises LaneUnavailable."""
    blocks: list[Block] = []
    places: list[Place] = []
    pieces = packing.by_size([tensor.nbytes for tensor in tensors])
    try:
        for size, members in pieces:
            if not size:
                places.append(NOTHING)
                continue
            block = pool.take(size)
            blocks.append(block)
            places.append((block.memory.number, block.memory.blob, block.memory.address, size))
            for index, offset in members:
                packing.write(tensors[index], block.flat, offset)
    except BaseException:
        for block in blocks:
            pool.give(block)
        raise
    return blocks, tuple(places), tuple(members for _, members in pieces)


def check_members(places: Sequence[Place], members: Sequence[Members], shapes: Sequence[Shape]) -> None:
    """Check that the tensors of each piece lie in it, and that it is no larger than needed. Raises OutOfBounds."""
    for (_, _, _, size), group in zip(places, members, strict=True):
        sizes = [math.prod(shapes[index][1]) * shapes[index][0].itemsize for index, _ in group]
        within(0, size, sum(sizes) + packing.ALIGN * len(sizes))
        for (_, offset), nbytes in zip(group, sizes, strict=True):
            if nbytes:
                within(offset, nbytes, size)


def register_all(agent: Agent, tensors: Sequence[torch.Tensor]) -> list[Registered]:
    """Register the memory of CPU tensors, once where they overlap. Raises LaneUnavailable."""
    ends: list[list[int]] = []
    for begin, size in sorted((tensor.data_ptr(), _span(tensor)) for tensor in tensors):
        if ends and begin < ends[-1][1]:
            ends[-1][1] = max(ends[-1][1], begin + size)
        elif size:
            ends.append([begin, begin + size])
    registered: list[Registered] = []
    try:
        for begin, end in ends:
            registered.append(agent.register("cpu", begin, end - begin))
    except LaneUnavailable:
        agent.deregister(*registered)
        raise
    return registered


def _span(tensor: torch.Tensor) -> int:
    return span_of(tensor.shape, tensor.stride()) * tensor.itemsize


class Segments:
    """Registered CUDA allocations. Thread-safe. Freed ones are deregistered when the next one is registered."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = Lock()
        self._known: dict[int, Registered] = {}  # by the allocation's identity, which is never reused

    def covering(self, tensor: torch.Tensor) -> Registered:
        """Return the registered allocation that contains a CUDA tensor, which is not empty. Raises LaneUnavailable."""
        pointer, device = tensor.data_ptr(), tensor.device.index
        with driver().on(device):
            identity = driver().identity_at(pointer)
            with self._lock:
                known = self._known.get(identity)
                if known is None:
                    self._drop_freed()
                    base = driver().base_of(pointer)
                    known = self._agent.register("cuda", base, driver().size_of(base))
                    self._known[identity] = known
                return known

    def _drop_freed(self) -> None:
        for identity, memory in list(self._known.items()):
            try:
                alive = driver().identity_at(memory.address) == identity
            except LaneUnavailable:
                alive = False  # there is no allocation now
            if not alive:
                self._agent.deregister(self._known.pop(identity))

    def close(self) -> None:
        with self._lock:
            self._agent.deregister(*self._known.values())
            self._known.clear()
