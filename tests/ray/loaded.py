"""Actors that send more than the other takes; for the tests of back-pressure."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

import raytorchrpc as rtr
from tests import insides
from tests.ray.actors import Latch


def peak_rss() -> int:
    """The most memory this process ever had, in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class Loaded:
    """Both ends."""

    def __init__(self) -> None:
        self.inside = self.most = self.runs = 0
        self.lock = threading.Lock()
        self.barrier: threading.Barrier | None = None

    # The receiver.

    @rtr.method(concurrent=True)
    def meet(self, parties: int) -> None:
        """Returns once so many are here at a time."""
        with self.lock:
            self.runs += 1
            self.inside += 1
            self.most = max(self.most, self.inside)
            if self.barrier is None:
                self.barrier = threading.Barrier(parties, timeout=20)
        self.barrier.wait()
        with self.lock:
            self.inside -= 1

    @rtr.method(concurrent=True)
    def hold(self, latch: Latch, *_: Any) -> str:
        latch.pass_through()
        return "released"

    @rtr.method
    def take(self, latch: Latch | None, tensor: torch.Tensor) -> int:
        if latch is not None:
            latch.pass_through()
        return tensor.numel()

    @rtr.method
    def echo(self, value: Any) -> Any:
        return value

    @rtr.method
    def fail(self) -> None:
        raise ValueError("on purpose")

    @rtr.method(concurrent=True)
    def die(self) -> None:
        os.kill(os.getpid(), 9)

    @rtr.method
    def bounce(self, targets: list[str], times: int) -> int:
        return times if not times else rtr.rpc_sync(targets[times % 2]).bounce(targets, times - 1)

    @rtr.method(concurrent=True)
    def concurrent_bounce(self, targets: list[str], times: int) -> int:
        return times if not times else rtr.rpc_sync(targets[times % 2]).concurrent_bounce(targets, times - 1)

    @rtr.method
    def double(self, number: int) -> int:
        return 2 * number

    def seen(self) -> tuple[int, int]:
        """How many ``meet`` were here at a time, and how many ran."""
        return self.most, self.runs

    def peak_rss(self) -> int:
        return peak_rss()

    # The sender.

    def under_way(self, rank: int = 1) -> tuple[int, int]:
        return insides.in_flight_to(rank)

    def call(self, target: str, method: str, *args: Any, **options: Any) -> Any:
        return getattr(rtr.rpc_sync(target, **options), method)(*args)

    def flood(self, target: str, method: str, times: int, *args: Any) -> list[Any]:
        futures = [getattr(rtr.rpc_async(target), method)(*args) for _ in range(times)]
        return [future.result(30) for future in futures]

    def fill(self, latch: Latch, size: int, timeout: float) -> tuple[int, float, str, int]:
        """Send tensors until that is refused; returns how many went, how long the last one took, why, and how much
        memory this process took for them. The latch holds the receiver with the first.
        """
        before = peak_rss()
        futures: list[Any] = []
        while True:
            began = time.monotonic()
            try:
                first = None if futures else latch
                patience = 60 if len(futures) < 4 else timeout  # those that wait there must not end before
                futures.append(rtr.rpc_async("b", timeout=patience).take(first, torch.ones(size // 4)))
            except rtr.RayTorchRpcError as error:
                return len(futures), time.monotonic() - began, f"{type(error).__name__}: {error}", peak_rss() - before

    def outcomes(self, latch: Latch) -> list[str]:
        """Calls with every end, with room for one at a time: each has to make room for the next."""
        one = rtr.rpc_async("b", timeout=20)
        ends: list[str] = []

        def end(attempt: Callable[[], Any]) -> None:
            try:
                attempt()
                ends.append("returned")
            except Exception as error:
                ends.append(type(error).__name__)

        end(lambda: one.echo(1).wait())
        end(lambda: one.fail().wait())
        end(lambda: one.no_such_method().wait())
        end(lambda: one.echo(threading.Lock()))
        end(lambda: one.echo(torch.ones(1_000_000)).wait())
        one.echo(2)  # nobody waits for it
        rtr.rpc_async("b").echo(torch.ones(1_000_000))
        end(lambda: rtr.rpc_sync("b", timeout=0.2).hold(latch))
        latch.open_for_all()  # its answer comes too late
        end(lambda: one.echo(3).wait())
        with suppress(rtr.RpcTimeout):
            rtr.rpc_async("b", timeout=1e-9).echo(4)
        end(lambda: rtr.rpc_sync("a").double(1))  # served inside
        end(lambda: one.echo(5).wait())
        return ends

    def lose(self) -> str:
        try:
            rtr.rpc_sync("b").die()
        except rtr.PeerLost as lost:
            return str(lost)
        return "nothing"
