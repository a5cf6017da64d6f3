"""How frames get to the learner, and weights to the collectors: by a group of raytorchrpc, or by plain Ray.

Everything else of the training is the same for all of them.
"""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import Mapping
from queue import Empty
from typing import Any, Protocol

import ray
import torch
from ray.util.queue import Queue as RayQueue
from torch import Tensor, nn

import raytorchrpc as rtr

#: What ``--transport`` takes, and the lanes that a group is held to (None: what raytorchrpc chooses).
LANES: dict[str, tuple[str, ...] | None] = {"auto": None, "torchrpc": ("torchrpc",), "nng": ("nng",)}
TRANSPORTS = (*LANES, "ray")

#: Seconds that a collector waits for room, or for weights, before it gives up.
PATIENCE_S = 300.0

About = dict[str, Any]


class Transport(Protocol):
    """A handle that is sent to the learner and the collectors. Every wait has a deadline."""

    def put(self, about: About, tensors: Mapping[str, Tensor]) -> None:
        """Send; blocks while the queue is full. The tensors may be changed afterwards."""

    def get(self, timeout: float) -> tuple[About, dict[str, Tensor]]:
        """The next item; queue.Empty if none came in time. The tensors are to be read only."""

    def publish(self, weights: Mapping[str, Tensor]) -> None:
        """Make these the newest weights. At the learner."""

    def pull(self, model: nn.Module, since: int) -> int:
        """Bring the newest weights into a model that has version ``since``; returns the version that it has then."""


class GroupTransport:
    """A queue and a weight store of the group, both in the learner."""

    def __init__(self, depth: int) -> None:
        self._frames = rtr.Queue("frames", home="learner", maxsize=depth)
        self._weights = rtr.WeightStore("policy", home="learner")

    def put(self, about: About, tensors: Mapping[str, Tensor]) -> None:
        self._frames.put((about, dict(tensors)), PATIENCE_S)

    def get(self, timeout: float) -> tuple[About, dict[str, Tensor]]:
        about, tensors = self._frames.get(timeout)
        return about, tensors

    def publish(self, weights: Mapping[str, Tensor]) -> None:
        self._weights.publish(weights)

    def pull(self, model: nn.Module, since: int) -> int:
        return self._weights.pull(model, since=since, timeout=PATIENCE_S)


@ray.remote(num_cpus=0)
class Board:
    """Where the newest weights are, for plain Ray."""

    def __init__(self) -> None:
        self._version, self._where, self._first = 0, None, asyncio.Event()

    async def put(self, where: list[Any]) -> None:
        self._version, self._where = self._version + 1, where
        self._first.set()

    async def newer(self, since: int) -> tuple[int, list[Any] | None]:
        await self._first.wait()
        return self._version, self._where if self._version > since else None


class RayTransport:
    """Ray's queue, and Ray's objects.

    What is large goes into the object store, and only its reference through the queue's actor, which would copy it
    twice. Numpy arrays are read out of the store without a copy; tensors would be pickled.
    """

    def __init__(self, depth: int) -> None:
        self._queue = RayQueue(depth, actor_options={"num_cpus": 0})
        self._board = Board.remote()

    def put(self, about: About, tensors: Mapping[str, Tensor]) -> None:
        self._queue.put((about, [ray.put(_arrays(tensors))]), timeout=PATIENCE_S)

    def get(self, timeout: float) -> tuple[About, dict[str, Tensor]]:
        until = time.monotonic() + timeout
        while True:
            about, (where,) = self._queue.get(timeout=max(0.001, until - time.monotonic()))
            try:
                arrays = ray.get(where, timeout=max(0.001, until - time.monotonic()))
            except ray.exceptions.GetTimeoutError as error:
                raise Empty from error
            except ray.exceptions.ObjectLostError:
                continue  # an object ends with the collector that made it
            return about, _tensors(arrays)

    def publish(self, weights: Mapping[str, Tensor]) -> None:
        ray.get(self._board.put.remote([ray.put(_arrays(weights))]), timeout=PATIENCE_S)

    def pull(self, model: nn.Module, since: int) -> int:
        version, where = ray.get(self._board.newer.remote(since), timeout=PATIENCE_S)
        if where is not None:
            model.load_state_dict(_tensors(ray.get(where[0], timeout=PATIENCE_S)))
        return version

    def close(self) -> None:
        """End the two actors."""
        ray.kill(self._queue.actor)
        ray.kill(self._board)


def _arrays(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def _tensors(arrays: Mapping[str, Any]) -> dict[str, Tensor]:
    with warnings.catch_warnings():  # they lie in the store and cannot be written; nobody does
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
