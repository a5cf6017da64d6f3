"""Weights of 64 MB that members of the first host publish, and that members of other hosts pull.

``python -m tests.multihost.weights 2``, with two members on each other host: each line of stdin is a task, each line of
stdout what came of it.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from functools import partial
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import raytorchrpc as rtr
from tests.multihost import drivers
from tests.multihost.drivers import TIMEOUT_S, Peer

PUBLISHERS = ("t0", "t1")
SHAPE = (4096, 4096)


def publish(publishers: tuple[str, ...], version: int) -> int:
    """This member's rows of a version, of which every element is its number."""
    number, rows = publishers.index(rtr.current_member().name), SHAPE[0] // len(publishers)
    shard = rtr.Shard(torch.full((rows, SHAPE[1]), float(version)), SHAPE, (number * rows, 0))
    return rtr.WeightStore(f"of {len(publishers)}", publishers=publishers).publish({"matrix": shard}, version)


def pull(publishers: tuple[str, ...], half: int | None) -> list[float]:
    """What the version is, and what came: all, or half of the columns; and how long it took."""
    columns = SHAPE[1] if half is None else SHAPE[1] // 2
    tensor = torch.zeros(SHAPE[0], columns)
    shard = rtr.Shard(tensor, SHAPE, (0, columns * (half or 0)))
    began = time.monotonic()
    version = rtr.WeightStore(f"of {len(publishers)}", publishers=publishers).pull({"matrix": shard})
    return [version, *tensor.unique().tolist(), time.monotonic() - began]


def serve(of_each: int) -> None:
    here = ray.get_runtime_context().get_node_id()
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]
    places = dict.fromkeys(PUBLISHERS, here) | {
        f"g{number}": nodes[number // of_each] for number in range(of_each * len(nodes))
    }
    actors: dict[str, Any] = {
        name: Peer.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()
        for name, node in places.items()
    }
    readers = [actor for name, actor in actors.items() if name not in PUBLISHERS]
    with rtr.init_group(actors, config=rtr.GroupConfig(rpc_timeout_s=TIMEOUT_S)) as formed:
        drivers._say(len(formed))
        for line in sys.stdin:
            task, count, *args = json.loads(line)
            publishers = PUBLISHERS[:count]
            if task == "publish":
                runs = [actors[name].run.remote(publish, publishers, *args) for name in publishers]
            else:
                by_halves, many = args
                halves = [number % 2 if by_halves else None for number in range(many or len(readers))]
                runs = [
                    reader.run.remote(pull, publishers, half)
                    for reader, half in zip(readers[: len(halves)], halves, strict=True)
                ]
            drivers._say(ray.get(runs, timeout=TIMEOUT_S))


if __name__ == "__main__":
    here = importlib.import_module("tests.multihost.weights")
    drivers.serve_weights = partial(here.serve, int(sys.argv[1]))  # type: ignore[attr-defined]
    drivers.main("serve_weights")
