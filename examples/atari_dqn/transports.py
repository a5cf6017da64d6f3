"""Carries frames to the learner and weights to the collectors, over a group of raytorchrpc or over plain Ray.

The rest of the training is the same for all transports.
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

#: Values of ``--transport`` that form a group, and the lanes that it may use (None: raytorchrpc chooses).
LANES: dict[str, tuple[str, ...] | None] = {"auto": None, "torchrpc": ("torchrpc",), "nng": ("nng",)}
TRANSPORTS = (*LANES, "ray")

#: Seconds that a collector waits for room, or for weights, before it gives up.
TIMEOUT_S = 300.0

About = dict[str, Any]


class Transport(Protocol):
    """A handle that the learner and the collectors receive. Every wait has a deadline."""

    def put(self, about: About, tensors: Mapping[str, Tensor]) -> None:
        """Sends an item. Blocks while the queue is full. The caller may change the tensors afterwards."""

    def get(self, timeout: float) -> tuple[About, dict[str, Tensor]]:
        """Returns the next item, with read-only tensors. Raises queue.Empty at the timeout."""

    def publish(self, weights: Mapping[str, Tensor]) -> None:
        """Makes these the newest weights. Only the learner calls it."""

    def pull(self, model: nn.Module, since: int) -> int:
        """Updates a model from version ``since`` to the newest weights. Returns their version."""


class GroupTransport:
    """Uses a queue and a weight store of the group, both in the learner."""

    def __init__(self, depth: int) -> None:
        self._frames = rtr.Queue("frames", home="learner", maxsize=depth)
        self._weights = rtr.WeightStore("policy", home="learner")

    def put(self, about: About, tensors: Mapping[str, Tensor]) -> None:
        self._frames.put((about, dict(tensors)), TIMEOUT_S)

    def get(self, timeout: float) -> tuple[About, dict[str, Tensor]]:
        about, tensors = self._frames.get(timeout)
        return about, tensors

    def publish(self, weights: Mapping[str, Tensor]) -> None:
        self._weights.publish(weights)

    def pull(self, model: nn.Module, since: int) -> int:
        return self._weights.pull(model, since=since, timeout=TIMEOUT_S)


@ray.remote(num_cpus=0)
class Board:
    """Holds the reference to the newest weights, for plain Ray."""

    def __init__(self) -> None:
        self._version, self._where, self._first = 0, None, asyncio.Event()

    async def put(self, where: list[Any]) -> None:
        self._version, self._where = self._version + 1, where
        self._first.set()

    async def newer(self, since: int) -> tuple[int, list[Any] | None]:
        await self._first.wait()
        return self._version, self._where if self._version > since else None


class RayTransport:
    """Uses Ray's queue and Ray's objects.

    Items go into the object store, and only references go through the queue's actor, which would copy the items twice.
    Arrays are numpy's, because Ray reads those from the store without a copy, and would pickle tensors.
    """

    def __init__(self, depth: int) -> None:
        self._queue = RayQueue(depth, actor_options={"num_cpus": 0})
        self._board = Board.remote()

    def put(self, about: About, tensors: Mapping[str, Tensor]) -> None:
        self._queue.put((about, [ray.put(_arrays(tensors))]), timeout=TIMEOUT_S)

    def get(self, timeout: float) -> tuple[About, dict[str, Tensor]]:
        deadline = time.monotonic() + timeout
        while True:
            about, (where,) = self._queue.get(timeout=max(0.001, deadline - time.monotonic()))
            try:
                arrays = ray.get(where, timeout=max(0.001, deadline - time.monotonic()))
            except ray.exceptions.GetTimeoutError as error:
                raise Empty from error
            except ray.exceptions.ObjectLostError:
                continue  # the collector that created the object has died
            return about, _tensors(arrays)

    def publish(self, weights: Mapping[str, Tensor]) -> None:
        ray.get(self._board.put.remote([ray.put(_arrays(weights))]), timeout=TIMEOUT_S)

    def pull(self, model: nn.Module, since: int) -> int:
        version, where = ray.get(self._board.newer.remote(since), timeout=TIMEOUT_S)
        if where is not None:
            model.load_state_dict(_tensors(ray.get(where[0], timeout=TIMEOUT_S)))
        return version

    def close(self) -> None:
        """Ends the queue's actor and the board."""
        ray.kill(self._queue.actor)
        ray.kill(self._board)


def _arrays(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def _tensors(arrays: Mapping[str, Any]) -> dict[str, Tensor]:
    with warnings.catch_warnings():  # arrays in the store are read-only, and nothing writes to them
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
