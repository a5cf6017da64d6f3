"""Two torchrpc agents without Ray, in two processes of their own; ``python -m tests.unit.compat_agents``.

Prints, as JSON, what each step over ``_compat`` gave: its value, or the error. Apart from the tests, because a
process has one agent, and torch keeps the first one for life.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import operator
import pickle
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

NAMES = ("a", "b")


def start(me: int) -> tuple[Any, Any, str]:
    from raytorchrpc._compat import torch_internals

    return torch_internals.start_agent(
        NAMES[me],
        11 + me,
        threads=2,
        timeout_s=20,
        transports=["uv"],
        channels=["basic"],
        device_maps={},
        devices=[],
    )


def second(link: Any) -> None:
    """The other process: answers until it is told to end."""
    from raytorchrpc._compat import torch_internals

    agent, store, url = start(1)
    torch_internals.init_autograd(12)
    link.send(url)
    torch_internals.add_peer(agent, store, "a", 11, link.recv(), devices=[], inverse_map={})
    link.send("met")
    link.recv()
    torch_internals.stop_agent()


def ask(name: str, times: int) -> int:
    """How many of so many requests are answered as they should."""
    import torch.distributed.rpc as rpc

    return sum(rpc.rpc_sync(name, operator.add, args=(1, 2)) == 3 for _ in range(times))


def first(link: Any, other: Any) -> dict[str, Any]:
    import torch
    import torch.distributed.autograd as dist_autograd
    import torch.distributed.rpc as rpc

    from raytorchrpc._compat import torch_internals

    seen: dict[str, Any] = {}

    def step(name: str, function: Callable[[], Any]) -> None:
        try:
            seen[name] = function()
        except Exception:
            seen[name] = traceback.format_exc()

    seen["agent before"] = torch_internals.agent_is_set()
    agent, store, url = start(0)
    seen["url"] = url
    seen["agent after"] = torch_internals.agent_is_set()
    step("autograd id before", torch_internals.autograd_id)
    step(
        "autograd id",
        lambda: [torch_internals.init_autograd(11), torch_internals.init_autograd(999), torch_internals.autograd_id()],
    )

    step("autograd id as torch has it", lambda: dist_autograd._get_max_id() >> 48)

    peer_url = link.recv()
    torch_internals.add_peer(agent, store, "b", 12, peer_url, devices=[], inverse_map={})
    link.send(url)
    link.recv()
    b = agent.get_worker_info("b")
    step("call", lambda: torch_internals.invoke_async(b, operator.add, (1, 2), 20.0).wait())
    step("names", lambda: sorted(rpc.api._ALL_WORKER_NAMES))

    def node_ids() -> list[int]:
        with torch.autograd.profiler_legacy.profile() as profile:
            torch.ones(1)
        return sorted({event.node_id for event in profile.function_events})

    step("node ids", node_ids)
    step("call by name", lambda: rpc.rpc_sync("b", operator.add, args=(1, 2)))

    def adapted() -> list[Any]:
        pickled: list[Any] = []

        class Pickler(pickle.Pickler):
            def reducer_override(self, obj: Any) -> Any:
                pickled.append(obj)
                return NotImplemented

        torch_internals.adapt_rpc(Pickler, "no init_rpc here", lambda: None)
        torch_internals.find_workers_by({7: "b"}.get)
        by_rank = rpc.rpc_sync(7, operator.add, args=(1, 2)), rpc.remote(7, operator.add, args=(1, 2)).to_here()
        by_id = rpc.rpc_sync(12, operator.add, args=(1, 2))
        return [*by_rank, by_id, operator.add in pickled, _error(lambda: rpc.init_rpc("a", rank=0, world_size=1))]

    step("adapted", adapted)

    def answers_while_peers_come_and_go() -> int:
        """For each answer the agent copies its maps of all peers."""
        over = threading.Event()

        def come_and_go() -> None:
            while not over.is_set():
                torch_internals.add_peer(agent, store, "x", 13, peer_url, devices=[], inverse_map={})
                torch_internals.remove_peer("x")
                torch_internals.forget_name(agent, "x", devices=[], inverse_maps={})

        coming = threading.Thread(target=come_and_go)
        coming.start()
        try:
            # One: a request may meet torch's maps half changed. A busy machine takes seconds for it.
            return int(rpc.rpc_sync("b", ask, args=("a", 200), timeout=60))
        finally:
            over.set()
            coming.join()

    step("answers while peers come and go", answers_while_peers_come_and_go)
    step("timeout", lambda: _error(lambda: torch_internals.invoke_async(b, time.sleep, (0.3,), 0.05).wait()))
    step("rref", lambda: isinstance(rpc.remote("b", operator.add, args=(1, 2)), torch_internals.RREF_TYPE))
    step("rref value", lambda: rpc.remote("b", operator.add, args=(1, 2)).to_here())

    def contexts() -> list[Any]:
        outside = torch_internals.current_autograd_context()
        with dist_autograd.context() as context:
            inside = torch_internals.current_autograd_context()
            elsewhere: list[Any] = []

            def on_another_thread() -> None:
                elsewhere.append(torch_internals.current_autograd_context())
                with torch_internals.autograd_context(context):
                    elsewhere.append(torch_internals.current_autograd_context())
                    weight = torch.ones(2, requires_grad=True)
                    loss = rpc.rpc_sync("b", torch.mul, args=(weight, 3.0)).sum()
                    dist_autograd.backward(context, [loss])
                    elsewhere.append(dist_autograd.get_gradients(context)[weight].tolist())
                elsewhere.append(torch_internals.current_autograd_context())

            thread = threading.Thread(target=on_another_thread)
            thread.start()
            thread.join()
            with torch_internals.autograd_context(torch_internals.NO_CONTEXT):
                suspended = torch_internals.current_autograd_context()
            resumed = torch_internals.current_autograd_context()
        entered, *rest = elsewhere[1:]
        return [outside, inside == context, suspended, resumed == context, elsewhere[0], entered == context, *rest]

    step("contexts", contexts)

    kept = rpc.remote("b", operator.add, args=(1, 2))
    step("rref to keep", kept.to_here)
    link.send("end")
    other.join(20)
    # torch tells the owner of the copy, in vain, and again a second later.
    copied = rpc.rpc_async("a", operator.is_not, args=(kept, None))
    torch_internals.remove_peer("b")
    step("names without it", lambda: sorted(rpc.api._ALL_WORKER_NAMES))
    step("removed", lambda: _error(lambda: rpc.rpc_sync("b", operator.add, args=(1, 2))))
    time.sleep(2)
    step("copied", lambda: copied.done() or "waits for the owner")
    torch_internals.forget_name(agent, "b", devices=[], inverse_maps={})
    torch_internals.add_peer(agent, store, "b", 14, peer_url, devices=[], inverse_map={})
    step("id of the next", lambda: agent.get_worker_info("b").id)
    torch_internals.stop_agent()
    seen["agent stopped"] = torch_internals.agent_is_set()
    return seen


def _error(function: Callable[[], Any]) -> str:
    try:
        function()
    except RuntimeError as error:
        return str(error)
    return "no error"


if __name__ == "__main__":
    from raytorchrpc._compat import torch_internals  # noqa: F401  (once, before there are two processes)

    faulthandler.dump_traceback_later(100, exit=True)
    here, there = multiprocessing.Pipe()
    other = multiprocessing.get_context("fork").Process(target=second, args=(there,))
    other.start()
    result = first(here, other)
    other.join(10)
    result["exit code"] = other.exitcode
    print(json.dumps(result))
