"""Async actors: many calls in flight from one loop, a slow one that holds up nobody, deadlines, and cancelling.

A client asks a service. Both are async actors: their methods are coroutines on one event loop each, and a call is
awaited like anything else. The service waits for something else (here: a timer, as for a database), not for a CPU.

    python examples/async_actors.py              # 500 calls at once, about ten seconds
    python examples/async_actors.py --calls 50   # the short form

The last line says what was checked. If it does not hold, the exit status is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

import raytorchrpc as rtr

LATENCY_S = 0.1  # of what the service waits for in each call


@dataclass
class Result:
    together_s: float  # for all calls at once
    one_by_one_s: float  # what the same calls take one after another, at least
    while_slow: int  # calls that were answered while a slow one was under way
    deadline_s: float  # after which a call that is never answered came back
    cancelled: bool  # whether a job at the service was stopped by its client


@ray.remote
class Service:
    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.jobs: dict[str, asyncio.Task[Any]] = {}

    @rtr.method
    async def look_up(self, key: int) -> int:
        await asyncio.sleep(LATENCY_S)
        return key * key

    @rtr.method
    async def quick(self, key: int) -> int:
        return key + 1

    @rtr.method
    async def slow(self) -> str:
        """Answers when it is released."""
        await self.release.wait()
        return "released"

    @rtr.method
    async def let_go(self) -> None:
        self.release.set()

    @rtr.method
    async def work(self, job: str) -> None:
        """Without an end, unless somebody stops the job by its name."""
        self.jobs[job] = asyncio.create_task(asyncio.Event().wait())
        await asyncio.wait([self.jobs[job]])

    @rtr.method
    async def stop(self, job: str) -> bool:
        """Whether the job was under way, and is no longer."""
        task = self.jobs.pop(job)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()


@ray.remote
class Client:
    async def many(self, service: Any, count: int) -> float:
        """Seconds for so many calls at once."""
        start = time.perf_counter()
        squares = await asyncio.gather(*(rtr.rpc_async(service).look_up(key) for key in range(count)))
        assert squares == [key * key for key in range(count)]
        return time.perf_counter() - start

    async def beside_a_slow_one(self, service: Any, count: int) -> int:
        """How many calls are answered, one after another, while a slow one is under way."""
        slow = rtr.rpc_async(service).slow()
        answered = 0
        for key in range(count):
            answered += await rtr.rpc_async(service).quick(key) == key + 1 and not slow.done()
        await rtr.rpc_async(service).let_go()
        assert await slow == "released"
        return answered

    async def deadline(self, service: Any, timeout_s: float) -> float:
        """Seconds after which a call without an answer fails."""
        start = time.perf_counter()
        try:
            await rtr.rpc_async(service, timeout=timeout_s).work("too long")
        except rtr.RpcTimeout:
            return time.perf_counter() - start  # the service goes on all the same: see cancel()
        raise AssertionError("work() has no end")

    async def cancel(self, service: Any) -> bool:
        """Cancelling a task here ends its waiting. What runs over there goes on until it is told."""
        waiting = asyncio.ensure_future(rtr.rpc_async(service).work("cancelled"))
        await rtr.rpc_async(service).quick(0)  # the job was sent before, and is under way by now
        waiting.cancel()
        await asyncio.wait([waiting])
        stopped = [await rtr.rpc_async(service).stop(job) for job in ("too long", "cancelled")]
        return waiting.cancelled() and stopped == [True, True]


def main(arguments: list[str] | None = None) -> Result:
    parser = argparse.ArgumentParser(description="Calls between async actors.")
    parser.add_argument("--calls", type=int, default=500, help="at once")
    options = parser.parse_args(arguments)
    if options.calls < 20:
        parser.error("at least 20 calls")

    if not ray.is_initialized():  # else: whatever this process uses already
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    service, client = Service.remote(), Client.remote()
    with rtr.init_group({"service": service, "client": client}):
        together_s = ray.get(client.many.remote(service, options.calls))
        print(f"{options.calls} calls of {LATENCY_S} s each, all at once: {together_s:.2f} s")
        while_slow = ray.get(client.beside_a_slow_one.remote(service, options.calls))
        print(f"answered while a slow call was under way: {while_slow} of {options.calls}")
        deadline_s = ray.get(client.deadline.remote(service, 0.3))
        print(f"a call with a deadline of 0.3 s and no answer came back after {deadline_s:.2f} s")
        cancelled = ray.get(client.cancel.remote(service))
        print(f"a job that its client gave up was stopped at the service: {'yes' if cancelled else 'no'}")
    result = Result(together_s, options.calls * LATENCY_S, while_slow, deadline_s, cancelled)
    if not (together_s < result.one_by_one_s / 2 and while_slow == options.calls and deadline_s >= 0.3 and cancelled):
        sys.exit(f"async_actors: not as it should be: {result}")
    print(f"checked: all at once took {together_s:.2f} s, not {result.one_by_one_s:.0f} s, and nobody was held up")
    return result


if __name__ == "__main__":
    try:
        main()
    except (rtr.RayTorchRpcError, RayError, ConnectionError) as error:
        reason = error.cause if isinstance(error, RayTaskError) else error
        sys.exit(f"async_actors: {type(reason).__name__}: {str(reason).splitlines()[0]}")
