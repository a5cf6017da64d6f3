"""Async actors: many calls in flight from one event loop, a slow call beside quick
ones, deadlines, and cancellation.

A client calls a service. Both are async actors: each runs its methods as coroutines
on one event loop, and awaits the calls that it makes. The service waits for a timer,
which stands for a database, and uses no CPU meanwhile.

    python examples/async_actors.py  # 500 calls at once, about ten seconds
    python examples/async_actors.py --calls 50  # the short form

The last line reports what was checked. If a check fails, the exit status is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from typing import Any

import ray

import raytorchrpc as rtr

LATENCY_S = 0.1  # the service's wait in each call


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
        """Returns when ``release_slow`` is called."""
        await self.release.wait()
        return "released"

    @rtr.method
    async def release_slow(self) -> None:
        self.release.set()

    @rtr.method
    async def work(self, job: str) -> None:
        """Runs until ``end`` stops the job, or until its caller cancels the call."""
        self.jobs[job] = asyncio.create_task(asyncio.Event().wait())
        await self.jobs[job]

    @rtr.method
    async def end(self, job: str, stop: bool) -> bool:
        """Waits for the end of a job, which it may stop first.

        Returns whether it was cancelled.
        """
        if stop:
            self.jobs[job].cancel()
        done, _ = await asyncio.wait([self.jobs.pop(job)])
        return done.pop().cancelled()


@ray.remote
class Client:
    async def many(self, service: Any, count: int) -> float:
        """Returns the seconds that ``count`` calls take at once."""
        start = time.perf_counter()
        calls = (rtr.rpc_async(service).look_up(key) for key in range(count))
        squares = await asyncio.gather(*calls)
        assert squares == [key * key for key in range(count)]
        return time.perf_counter() - start

    async def call_while_slow(self, service: Any, count: int) -> int:
        """Counts calls, one by one, that return while a slow one is in flight."""
        slow = rtr.rpc_async(service).slow()
        answered = 0
        for key in range(count):
            right = await rtr.rpc_async(service).quick(key) == key + 1
            answered += right and not slow.done()
        await rtr.rpc_async(service).release_slow()
        assert await slow == "released"
        return answered

    async def deadline(self, service: Any, timeout_s: float) -> float:
        """Returns the seconds after which a call without an answer fails."""
        start = time.perf_counter()
        try:
            await rtr.rpc_async(service, timeout=timeout_s).work("too long")
        except rtr.RpcTimeout:
            return time.perf_counter() - start  # the method continues: see cancel()
        raise AssertionError("work() has no end")

    async def cancel(self, service: Any) -> bool:
        """Cancels a task here, which cancels the method at the service.

        Stops the job whose deadline passed.
        """
        waiting = asyncio.ensure_future(rtr.rpc_async(service).work("cancelled"))
        await asyncio.sleep(0)  # begins the task, so that it can cancel its call
        await rtr.rpc_async(service).quick(0)  # sent after the job, which now runs
        waiting.cancel()
        await asyncio.wait([waiting])
        ended = [
            rtr.rpc_async(service).end("cancelled", False),
            rtr.rpc_async(service).end("too long", True),
        ]
        return waiting.cancelled() and await asyncio.gather(*ended) == [True, True]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Calls between async actors.")
    parser.add_argument("--calls", type=int, default=500, help="calls in flight")
    calls = parser.parse_args(arguments).calls
    if calls < 20:
        parser.error("--calls must be at least 20")

    ray.init(ignore_reinit_error=True, include_dashboard=False, logging_level="error")
    service, client = Service.remote(), Client.remote()
    with rtr.init_group({"service": service, "client": client}):
        took_s = ray.get(client.many.remote(service, calls))
        print(f"{calls} calls of {LATENCY_S} s each, all at once: {took_s:.2f} s")
        while_slow = ray.get(client.call_while_slow.remote(service, calls))
        print(f"returned while a slow call was in flight: {while_slow} of {calls}")
        deadline_s = ray.get(client.deadline.remote(service, 1))
        print(f"a call with a deadline of 1 s failed after {deadline_s:.2f} s")
        cancelled = ray.get(client.cancel.remote(service))
        print(f"the service stopped a job that the client cancelled: {cancelled}")
    one_by_one_s = calls * LATENCY_S
    fast = took_s < one_by_one_s / 2
    if not (fast and while_slow == calls and deadline_s >= 1 and cancelled):
        sys.exit("async_actors: what is printed above is not as it should be")
    print(f"checked: all calls took {took_s:.2f} s, not {one_by_one_s:.0f} s")


if __name__ == "__main__":
    main()
