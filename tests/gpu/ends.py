"""Actors on GPUs that run what they are given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray
import torch


class Runner:
    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


@contextmanager
def ends(
    first: str, second: str, *, host: str = "", other: str = "other", cls: type[Runner] = Runner
) -> Iterator[dict[str, Any]]:
    """A Ray with actors of these names: two on one GPU, ``host`` without one, ``other`` on another if there is one."""
    remote = ray.remote(cls)
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    try:
        made = {name: remote.options(num_gpus=0.5).remote() for name in (first, second)}
        ray.get([actor.run.remote(int, 0) for actor in made.values()], timeout=60)  # so that both get the same one
        if host:
            made[host] = remote.options(num_gpus=0).remote()
        if torch.cuda.device_count() > 1:
            made[other] = remote.options(num_gpus=1).remote()
        yield made
    finally:
        ray.shutdown()
