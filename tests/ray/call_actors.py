"""Actors for the tests of calls and of concurrency; see ``actors`` for why they live in a module."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import numpy
import ray
import torch

import raytorchrpc as rtr
from tests import insides
from tests.ray.actors import AsyncPeer, Latch, Peer

#: Elements: in float32 above what travels in a message.
LARGE = 300_000


class Store(Peer):
    """Keeps a tensor and an array, and gives them away while it goes on changing them."""

    def __init__(self) -> None:
        super().__init__()
        self.state: dict[tuple[str, int], Any] = {}
        for size in (1000, LARGE):
            self.state["tensor", size] = torch.zeros(size)
            self.state["view", size] = torch.zeros(2, size)[1]
            self.state["array", size] = numpy.zeros(size)
            self.state["from numpy", size] = torch.from_numpy(numpy.zeros(size))

    @rtr.method
    def get(self, what: str, size: int) -> Any:
        state = self.state[what, size]
        if what == "from numpy":  # another tensor on the array's memory, which torch cannot see
            state = torch.from_numpy(state.numpy())
        return {"state": state}

    @rtr.method
    def add_one(self, what: str, size: int) -> None:
        self.state[what, size] += 1

    @rtr.method
    def total(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> float:
        return float(sum(tensor.sum() for tensor in (*args, *kwargs.values())))

    def take_kept(self) -> list[Any]:
        kept, self.kept = self.kept, []
        return kept


class AsyncCaller(AsyncPeer):
    """An async actor that does what it is told."""

    async def run(self, function: Any, *args: Any) -> Any:
        """As ``Peer.run``, for a coroutine function; not decorated."""
        return await function(*args)

    @rtr.method
    async def arun(self, function: Any, *args: Any) -> Any:
        return await function(*args)

    @rtr.method(concurrent=True)
    async def crun(self, function: Any, *args: Any) -> Any:
        return await function(*args)

    @rtr.method
    def plain(self) -> tuple[int, bool]:
        """A method that is no coroutine: the thread it runs on, and whether a loop runs there."""
        asyncio.get_running_loop()
        return threading.get_ident(), True

    @rtr.method
    async def descend(self, other: str, depth: int) -> int:
        """To the other and back, this many times; how deep it came."""
        me = rtr.current_member().name
        return 1 + await rtr.rpc_async(other).descend(me, depth - 1) if depth else 0

    @rtr.method
    async def where(self) -> tuple[int, int]:
        return threading.get_ident(), id(asyncio.get_running_loop())

    @rtr.method
    async def meet(self, parties: int) -> int:
        """Returns once this many are here at a time."""
        self.here = getattr(self, "here", 0) + 1
        if not hasattr(self, "everybody"):
            self.everybody = asyncio.Event()
        if self.here == parties:
            self.everybody.set()
        await self.everybody.wait()
        return self.here


class Busy(Peer):
    """Counts how many of its methods run at a time."""

    def __init__(self, parties: int = 0) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self.now = self.peak = 0
        self.log: list[str] = []
        self.barrier = threading.Barrier(parties) if parties else None

    def _enter(self) -> None:
        with self._lock:
            self.now += 1
            self.peak = max(self.peak, self.now)

    def _exit(self) -> None:
        with self._lock:
            self.now -= 1

    @rtr.method
    def work(self) -> int:
        self._enter()
        try:
            time.sleep(0.001)  # what others could run in
            return self.now
        finally:
            self._exit()

    @rtr.method
    def stay(self, latch: Latch) -> str:
        self._enter()
        try:
            latch.pass_through()
            return "left"
        finally:
            self._exit()

    @rtr.method
    def meet(self) -> int:
        """Returns only if as many as the barrier wants are here at a time."""
        assert self.barrier is not None
        self._enter()
        try:
            self.barrier.wait(20)
            return self.now
        finally:
            self._exit()

    @rtr.method(concurrent=True)
    def beside(self) -> int:
        """How many of the others run now."""
        return self.now

    @rtr.method(concurrent=True)
    def beside_then_work(self) -> int:
        return self.work()

    @rtr.method
    def fail(self) -> None:
        raise ValueError("on purpose")

    @rtr.method
    def bounce(self, other: str, depth: int) -> list[str]:
        """To the other and back, this many times."""
        me = rtr.current_member().name
        return [me, *(rtr.rpc_sync(other).bounce(me, depth - 1) if depth else [])]

    @rtr.method
    def descend(self, other: str, depth: int) -> int:
        """To the other and back, this many times; how deep it came."""
        me = rtr.current_member().name
        return 1 + rtr.rpc_sync(other).descend(me, depth - 1) if depth else 0

    @rtr.method(concurrent=True)
    def descend_beside(self, other: str, depth: int) -> int:
        me = rtr.current_member().name
        return 1 + rtr.rpc_sync(other).descend_beside(me, depth - 1) if depth else 0

    @rtr.method
    def bounce_through(self, other: str, method: str) -> Any:
        """Has the other call ``method`` of this one."""
        return rtr.rpc_sync(other, timeout=25).call_back(rtr.current_member().name, method)

    @rtr.method
    def call_back(self, caller: str, method: str) -> Any:
        return getattr(rtr.rpc_sync(caller, timeout=20), method)()

    @rtr.method
    def fan_out(self, others: list[str]) -> list[str]:
        """Asks all others at once; each comes back with ``step``."""
        me = rtr.current_member().name
        futures = [rtr.rpc_async(other).come_back(me, other) for other in others]
        for future in futures:
            future.wait()
        return self.log

    @rtr.method
    def come_back(self, caller: str, tag: str) -> None:
        futures = [rtr.rpc_async(caller).step(f"{tag}{number}") for number in range(10)]
        for future in futures:
            future.wait()

    @rtr.method
    def step(self, tag: str) -> None:
        self.log.append(f"+{tag}")
        time.sleep(0.0005)  # what others could run in
        self.log.append(f"-{tag}")

    def peak_so_far(self) -> int:
        return self.peak


@ray.remote(concurrency_groups={"io": 2, "disk": 2})
class GroupedBusy(Busy):
    """Two groups beside the default one, with the two decorators in either order. Only one's width is declared."""

    @ray.method(concurrency_group="io")
    @rtr.method
    def stay_in_io(self, latch: Latch) -> str:
        latch.pass_through()
        return "left io"

    @rtr.method
    @ray.method(concurrency_group="io")
    def meet_in_io(self) -> int:
        assert self.barrier is not None
        return self.barrier.wait(20)  # alone, it breaks

    @ray.method(concurrency_group="io")
    @rtr.method
    def work_in_io(self) -> int:
        return self.work()

    @ray.method(concurrency_group="disk")
    @rtr.method(max_concurrency=2)
    def meet_on_disk(self) -> int:
        return self.meet()

    @rtr.method
    @ray.method(concurrency_group="disk")
    def work_on_disk(self) -> int:
        return self.work()


def make_layer(seed: int) -> torch.nn.Linear:
    """The same one in every process."""
    torch.manual_seed(seed)
    return torch.nn.Linear(8, 8)


class Stage(Peer):
    """A layer of a model that is split over actors."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layer = make_layer(seed)

    @rtr.method
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))

    @rtr.method
    def forward_dict(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"y": [torch.tanh(self.layer(batch["x"]))], "text": batch["text"]}

    @rtr.method
    def forward_through(self, x: torch.Tensor, following: str) -> torch.Tensor:
        return rtr.rpc_sync(following).forward(torch.tanh(self.layer(x)))

    @rtr.method(concurrent=True)
    def gradients(self, context: int) -> dict[str, torch.Tensor]:
        found = torch.distributed.autograd.get_gradients(context)
        return {name: found[parameter] for name, parameter in self.layer.named_parameters() if parameter in found}

    @rtr.method
    def has_context(self) -> bool:
        return insides.has_autograd_context()


class AsyncStage(AsyncPeer):
    """Likewise, with coroutines that let others run in the middle."""

    def __init__(self, seed: int) -> None:
        self.layer = make_layer(seed)
        self.inside = 0
        self.both = asyncio.Event()

    @rtr.method
    async def forward_through(self, x: torch.Tensor, following: str) -> torch.Tensor:
        y = torch.tanh(self.layer(x))
        await asyncio.sleep(0)
        return await rtr.rpc_async(following).forward(y)

    @rtr.method
    async def forward_with_another(self, x: torch.Tensor) -> torch.Tensor:
        """Goes on only when two are in here, each in its caller's context."""
        self.inside += 1
        if self.inside % 2 == 0:
            self.both.set()
            self.both = asyncio.Event()
        else:
            await self.both.wait()
        return torch.tanh(self.layer(x))

    @rtr.method
    async def gradients(self, context: int) -> dict[str, torch.Tensor]:
        found = torch.distributed.autograd.get_gradients(context)
        return {name: found[parameter] for name, parameter in self.layer.named_parameters() if parameter in found}

    async def run(self, function: Any, *args: Any) -> Any:
        return await function(*args)
