"""TransferQueue's put and get by its storages: SimpleStorage, raytorchrpc and Ray's object store, in turn in one run.

Needs ``pip install TransferQueue``. The metadata of TransferQueue's own controller is part of a put, not of a get.
"""

from __future__ import annotations

import itertools
import time
from importlib import resources
from typing import Any, NamedTuple

import ray
import torch

from benchmarks._harness import Pick, Unavailable, compare
from raytorchrpc.bench.cases import Figure

OURS = "RayTorchRpc"
BACKENDS = ("SimpleStorage", OURS, "RayStore")


class Rows(NamedTuple):
    """What is put and got in a turn."""

    count: int
    size: int
    """Bytes of a row."""


KINDS = {"64 x 8 KB": Rows(64, 8 << 10), "64 x 1 MB": Rows(64, 1 << 20), "512 x 8 KB": Rows(512, 8 << 10)}


def plain_puts() -> None:
    """Have TransferQueue's storage in Ray's object store put tensors there, too; by itself it leaves those to NIXL."""
    from transfer_queue.storage.clients.ray_storage_client import RayStorageClient

    def put(self: Any, keys: list[str], values: list[Any]) -> None:
        ray.get(self.storage_actor.put_obj_ref.remote(keys, [ray.put(value) for value in values]))

    RayStorageClient.put = put


class Client:
    """A process with a client of each storage."""

    def __init__(self, configs: dict[str, Any]) -> None:
        from transfer_queue.client import TransferQueueClient

        torch.set_num_threads(1)
        plain_puts()
        self.clients = {}
        for name, conf in configs.items():
            self.clients[name] = TransferQueueClient(f"{name}_{id(self)}", conf.controller.zmq_info)
            self.clients[name].initialize_storage_manager(name, conf.backend[name])

    def put(self, name: str, number: int, rows: Rows) -> float:
        """Milliseconds."""
        from tensordict import TensorDict

        data = TensorDict({"x": torch.full((rows.count, rows.size // 4), float(number))}, batch_size=rows.count)
        began = time.perf_counter()
        self.clients[name].put(data, partition_id=str(number))
        return (time.perf_counter() - began) * 1e3

    def get(self, name: str, number: int, rows: Rows) -> float:
        """Milliseconds."""
        client = self.clients[name]
        meta = client.get_meta(["x"], rows.count, str(number), task_name="train")
        began = time.perf_counter()
        data = client.get_data(meta)
        took = (time.perf_counter() - began) * 1e3
        assert all(float(row[0]) == float(row[-1]) == number for row in data["x"])
        client.clear_samples(meta)
        return took


def transferqueue(pick: Pick[Any]) -> list[Figure]:
    """A producer and a consumer on this host."""
    try:
        from omegaconf import OmegaConf
        from transfer_queue.controller import TransferQueueController
        from transfer_queue.sampler import SequentialSampler
        from transfer_queue.storage.bootstrap.provider import StorageBootstrapProvider
        from transfer_queue.utils.zmq_utils import process_zmq_server_info

        import raytorchrpc.integrations.transferqueue  # noqa: F401
    except ImportError as error:
        raise Unavailable(f"pip install TransferQueue: {error}") from error
    configs, kept = dict[str, Any](), list[Any]()
    for name in BACKENDS:
        empty = OmegaConf.create({}, flags={"allow_objects": True})
        conf = configs[name] = OmegaConf.merge(empty, OmegaConf.load(resources.files("transfer_queue") / "config.yaml"))
        conf.backend.storage_backend = name
        controller = TransferQueueController.options(num_cpus=0).remote(sampler=SequentialSampler())
        conf.controller.zmq_info = process_zmq_server_info(controller)
        provider = StorageBootstrapProvider.get_provider(name)
        kept += [controller, provider and provider(conf)]
        conf.backend[name] = conf.backend[name] or {}
    ends = list[Any]()
    for _ in range(2):  # the first makes the actor that RayStore has
        ends.append(ray.remote(num_cpus=0)(Client).remote(configs))
        ray.get(ends[-1].__ray_ready__.remote())
    producer, consumer = ends
    numbers, gets = itertools.count(1), dict[tuple[str, str], list[float]]()

    def put(name: str, kind: str) -> float:
        number = next(numbers)
        took: float = ray.get(producer.put.remote(name, number, KINDS[kind]))
        gets.setdefault((name, kind), []).append(ray.get(consumer.get.remote(name, number, KINDS[kind])))
        return took

    def get(name: str, kind: str) -> float:  # of the puts, in their order
        return gets[name, kind].pop(0)

    rounds, kinds = pick(15, 5, 1), pick([*KINDS], [*KINDS], [*KINDS][:1])
    return compare("put", put, BACKENDS, kinds, rounds) + compare("get", get, BACKENDS, kinds, rounds)
