"""Trainers and rollout workers around verl's own manager, workers and checkpoint engines; also for a benchmark.

What needs a GPU is replaced: the inference engine by a server that copies into tensors of its own, and verl's training
engine by a model under FSDP2, whose parameters are gathered as verl gathers them.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import ray
import torch

with warnings.catch_warnings():  # of verl and what it imports there are many
    warnings.simplefilter("ignore")
    from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry
    from verl.checkpoint_engine.base import CheckpointEngineWorker
    from verl.utils.import_utils import import_external_libs
    from verl.workers.config import CheckpointEngineConfig

ENGINE = "raytorchrpc"
MODULE = "raytorchrpc.integrations.verl"
#: Workers of Ray run with a low priority, and verl takes ten seconds of a processor to import.
START_S = 240


def config_of(backend: str = ENGINE, module: str | None = MODULE, megabytes: int = 1, **options: Any) -> Any:
    return CheckpointEngineConfig(
        backend=backend,
        custom_backend_module=module,
        update_weights_bucket_megabytes=megabytes,
        engine_kwargs={backend: options},
    )


def _environment(rank: int, world: int, meeting: str) -> dict[str, Any]:
    """For a worker of verl; the file replaces a port."""
    ranks = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    variables = {name: str(value) for name, value in ranks.items()}
    return {
        "env_vars": {**variables, "MASTER_ADDR": "none", "MASTER_PORT": "0", "DIST_INIT_METHOD": f"file://{meeting}"}
    }


class Trainer:
    """As verl's ActorRolloutRefWorker, with its engine's ``get_per_tensor_param``."""

    def __init__(self, config: Any, layers: int, width: int) -> None:
        from torch.distributed.fsdp import fully_shard

        torch.set_num_threads(1)
        torch.distributed.init_process_group(
            "gloo",
            init_method=os.environ["DIST_INIT_METHOD"],
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
        )
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(layers)])
        for layer in self.model:
            fully_shard(layer)
        fully_shard(self.model)
        import_external_libs(config.custom_backend_module)
        is_master = torch.distributed.get_rank() == 0
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            config.backend,
            is_master=is_master,
            bucket_size=config.update_weights_bucket_megabytes << 20,
            **config.engine_kwargs[config.backend],
        )
        self.fails_after: int | None = None
        self.left_out: str | None = None
        self._gathering = threading.Lock()
        """A step may be asked for while this trainer still takes part in an update that has failed elsewhere."""

    def step(self) -> dict[str, torch.Tensor]:
        """Change the model; returns all of it."""
        with self._gathering, torch.no_grad():
            for parameter in self.model.parameters():
                parameter.to_local().add_(0.5)
            return {name: parameter.full_tensor().detach() for name, parameter in self.model.named_parameters()}

    def misbehave(self, fails_after: int | None = None, left_out: str | None = None) -> None:
        self.fails_after, self.left_out = fails_after, left_out

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        with self._gathering:
            for count, (name, parameter) in enumerate(self.model.named_parameters()):
                if count == self.fails_after:
                    raise RuntimeError("out of memory, for instance")
                whole = parameter.full_tensor()
                if name != self.left_out:
                    yield name, whole

    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)

    async def update_weights(self, global_steps: int | None, mode: str) -> Any:
        return await self.checkpoint_engine.send_weights(self._parameters(), global_steps=global_steps)

    def gather(self) -> float:
        """Returns the seconds that it takes to make all tensors, which every engine waits for."""
        began = time.perf_counter()
        for _ in self._parameters():
            pass
        return time.perf_counter() - began


class Trainers:
    """As verl's RayWorkerGroup of trainers."""

    def __init__(self, actors: list[Any]) -> None:
        self.actors, self.world_size = actors, len(actors)

    def execute_checkpoint_engine(self, method: list[str], **kwargs: list[Any]) -> list[Any]:
        return [
            actor.execute_checkpoint_engine.remote(method[rank], **{name: its[rank] for name, its in kwargs.items()})
            for rank, actor in enumerate(self.actors)
        ]

    def update_weights(self, global_steps: int | None, mode: str) -> list[Any]:
        return [actor.update_weights.remote(global_steps, mode) for actor in self.actors]


class Server:
    """As verl's adapter of an inference engine: it copies what it gets into its own model."""

    replica_rank, is_leader_rank = 0, True

    def __init__(self) -> None:
        self.own: dict[str, torch.Tensor] = {}
        self.dies = False

    async def update_weights(self, weights: Any, global_steps: int | None = None, wire_format: str = "") -> None:
        async for name, tensor in weights:
            if self.dies:
                os.kill(os.getpid(), signal.SIGKILL)
            if name not in self.own:
                self.own[name] = torch.empty_like(tensor)
            self.own[name].copy_(tensor)


class Rollout(CheckpointEngineWorker):
    def __init__(self, config: Any) -> None:
        torch.set_num_threads(1)
        super().__init__(SimpleNamespace(checkpoint_engine=config, name="vllm", mode="async"), None, Server())

    def own(self) -> dict[str, torch.Tensor]:
        return self.server_adapter.own

    def die_in_next_update(self) -> None:
        self.server_adapter.dies = True


class Replica:
    """As verl's RolloutReplica, whose server has no requests."""

    def __init__(self, workers: list[Any]) -> None:
        self.workers = workers

    async def _nothing(self, **_: Any) -> None:
        pass

    abort_all_requests = release_kv_cache = resume_kv_cache = resume_generation = _nothing


def start_trainers(config: Any, meeting: str, count: int = 2, layers: int = 3, width: int = 256) -> Trainers:
    remote = ray.remote(num_cpus=0)(Trainer)
    actors = [
        remote.options(runtime_env=_environment(rank, count, meeting)).remote(config, layers, width)
        for rank in range(count)
    ]
    ray.get([actor.__ray_ready__.remote() for actor in actors], timeout=START_S)
    return Trainers(actors)


def start_replicas(config: Any, meeting: str, count: int = 2) -> list[Replica]:
    """Replicas of one worker each."""
    remote = ray.remote(num_cpus=0)(Rollout)
    actors = [
        remote.options(runtime_env=_environment(0, 1, f"{meeting}-{rank}")).remote(config) for rank in range(count)
    ]
    ray.get([actor.__ray_ready__.remote() for actor in actors], timeout=START_S)
    return [Replica([actor]) for actor in actors]


def manager_of(config: Any, trainers: Trainers, replicas: list[Replica]) -> Any:
    return CheckpointEngineManager(config, trainers, list(replicas))
