"""Engines and trainers as the adapters meet them, without the packages that they adapt to: those are stubs here.

All tensors of a model have one value, and each version another, so a model with parts of two versions shows.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import ray
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import raytorchrpc as rtr
from tests.integrations import sglang_engine

A, B = TypeVar("A"), TypeVar("B")
NAMES = [f"layers.{number}.weight" for number in range(8)]
SIZE = 1 << 14
#: For an update, and for whatever waits for one (seconds).
TIMEOUT_S = 30.0


def filled(value: float, case: str = "") -> dict[str, torch.Tensor]:
    return altered({name: torch.full((SIZE,), value, dtype=torch.float64) for name in NAMES}, case)


def altered(tensors: dict[str, torch.Tensor], case: str) -> dict[str, torch.Tensor]:
    """What a trainer publishes by mistake. The last tensor is another one, so that others may be loaded before."""
    name, tensor = tensors.popitem()
    if case != "missing tensor":
        changes = {"other shape": torch.cat([tensor, tensor]), "other dtype": tensor.to(torch.int8)}
        tensors[name] = changes.get(case, tensor)
    return tensors


def values_of(tensors: Iterable[torch.Tensor]) -> list[float]:
    """The values that occur in a model: one, unless it has parts of several versions."""
    return sorted({value for tensor in tensors for value in tensor.unique().tolist()})


class Model(torch.nn.Module):
    """Takes its time to load a tensor. With several ranks, each one's has a part of each tensor."""

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        self.rank, self.part = rank, SIZE // ranks
        self.layers = torch.nn.ModuleList(torch.nn.Module() for _ in NAMES)
        for layer in self.layers:
            layer.weight = torch.nn.Parameter(torch.zeros(self.part, dtype=torch.float64), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if not tensor.is_meta:
                time.sleep(0.002)
            if len(tensor) != SIZE:
                raise ValueError(f"{name} has {len(tensor)} elements")
            self.get_parameter(name).copy_(tensor.narrow(0, self.rank * self.part, self.part))


def stub(name: str, **attributes: Any) -> None:
    """Have ``import name`` give a module with these attributes; the packages above it are there, too."""
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        path = ".".join(parts[:length])
        if path not in sys.modules:
            sys.modules[path] = module = ModuleType(path)
            module.__path__ = []  # a package
            if length > 1:
                setattr(sys.modules[".".join(parts[: length - 1])], parts[length - 1], module)
    vars(sys.modules[name]).update(attributes)


# --- vLLM -------------------------------------------------------------------------------------------------------------


class _WeightTransferEngine(Generic[A, B]):
    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        self.vllm_config, self.parallel_config, self.model_config = vllm_config, vllm_config.parallel_config, None
        self.device, self.model = device, model

    def parse_init_info(self, given: dict[str, Any]) -> Any:
        return self.init_info_cls(**given)  # type: ignore[attr-defined]

    def parse_update_info(self, given: dict[str, Any]) -> Any:
        return self.update_info_cls(**given)  # type: ignore[attr-defined]


class _TrainerWeightTransferEngine(Generic[A]):
    def __init__(self, client: Any, source: Any, is_sender: bool) -> None:
        self.client, self.source, self.is_sender = client, source, is_sender


class _Wrapper:
    """Has the worker, for all that vLLM asks of it."""

    worker: Any

    def execute_model(self, *args: Any) -> Any:
        return self.worker.execute_model(*args)


class _TrainerInit:
    def __init_subclass__(cls) -> None:
        cls.__annotations__ = {"rank": "int", **cls.__annotations__}

    @property
    def is_sender(self) -> bool:
        return self.rank == 0  # type: ignore[attr-defined, no-any-return]


class _Source:
    def held_names(self) -> None:
        return None


def stub_vllm(ranks: int = 1) -> None:
    """Without the names of vLLM that are not promised, so that models are updated by ``load_weights``."""
    package = "vllm.distributed.weight_transfer.base"
    groups = dict.fromkeys(("get_pcp_group", "get_pp_group"), lambda: SimpleNamespace(world_size=1))
    groups["get_tp_group"] = lambda: SimpleNamespace(world_size=ranks, cpu_group=None)
    stub("vllm", __version__="0.32.0")
    stub("vllm.logger", init_logger=logging.getLogger)
    stub("vllm.lora.request", LoRARequest=object)
    stub("vllm.lora.worker_manager", LRUCacheWorkerLoRAManager=SimpleNamespace(add_adapter=None))
    stub("vllm.distributed.parallel_state", **groups)
    stub("vllm.v1.worker.worker_base", WorkerWrapperBase=_Wrapper)
    stub(
        package,
        WeightTransferEngine=_WeightTransferEngine,
        TrainerWeightTransferEngine=_TrainerWeightTransferEngine,
        WeightTransferInitInfo=object,
        WeightTransferUpdateInfo=object,
        TrainerInitInfo=_TrainerInit,
        ParamMeta=tuple,
        VLLMWeightSyncClient=object,
        WeightSource=_Source,
        layerwise_groups=lambda names: [[name] for name in names],
        materialize_full_tensor=lambda tensor: tensor,
    )
    stub(
        "vllm.model_executor.model_loader.reload",
        initialize_layerwise_reload=lambda model: None,
        finalize_layerwise_reload=lambda model, config: None,
    )


class Worker:
    """Of vLLM: it has the steps of a weight update, as vLLM's own."""

    def __init__(self, init_info: dict[str, Any], rank: int, ranks: int) -> None:
        from raytorchrpc.integrations.vllm.engine import WeightEngine

        self.model, self.is_updating = Model(rank, ranks), False
        parallel = SimpleNamespace(world_size=ranks)
        config = SimpleNamespace(parallel_config=parallel, model_config=None, additional_config=init_info)
        self.weight_transfer_engine = WeightEngine(None, config, torch.device("cpu"), self.model)

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        self.weight_transfer_engine.init_transfer_engine(self.weight_transfer_engine.parse_init_info(info))

    def start_weight_update(self) -> None:
        if self.is_updating:
            raise RuntimeError("an update is already active")
        self.is_updating = True

    def update_weights(self, info: dict[str, Any]) -> None:
        if not self.is_updating:
            raise RuntimeError("start_weight_update must be called before")
        try:
            self.weight_transfer_engine.update_weights(info)
        except BaseException:
            self.is_updating = False
            raise

    def finish_weight_update(self) -> None:
        if not self.is_updating:
            raise RuntimeError("there is no update")
        self.is_updating = False

    def execute_model(self) -> list[float]:
        return values_of(self.model.parameters())


def _run_worker(pipe: Any, options: dict[str, Any], rank: int, ranks: int, meeting: str) -> None:
    """The process of a worker."""
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    wrapper = _worker_of(options, rank, ranks)
    while True:
        method, args = pipe.recv()
        try:
            there = wrapper if method == "execute_model" else wrapper.worker
            pipe.send((getattr(there, method)(*args), None))
        except Exception as error:
            pipe.send((None, error if isinstance(error, rtr.RayTorchRpcError) else RuntimeError(repr(error))))


def _worker_of(options: dict[str, Any], rank: int = 0, ranks: int = 1) -> _Wrapper:
    stub_vllm(ranks)
    wrapper = _Wrapper()
    wrapper.worker = Worker({"raytorchrpc": {"store": "policy", "timeout": TIMEOUT_S, **options}}, rank, ranks)
    return wrapper


class Engine:
    """An actor with a worker in itself, or in children: it ends with one. It answers while they are busy."""

    def __init__(self, in_child: bool = False, **options: Any) -> None:
        self._options, self._lock = options, threading.Lock()
        self.children: list[Any] = []
        if in_child:
            self.start(1)
        else:
            self.wrapper = _worker_of(options)

    def start(self, ranks: int) -> None:
        """Start its workers, as an engine with another tensor parallelism."""
        with self._lock:
            for child in self.children:
                child.kill()
                child.join()
            os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
            context, meeting = multiprocessing.get_context("spawn"), tempfile.mktemp(prefix="ranks-")
            self.children, self.pipes = [], []
            for rank in range(ranks):
                pipe, other = context.Pipe()
                args = (other, self._options, rank, ranks, meeting)
                self.children.append(context.Process(target=_run_worker, args=args, daemon=True))
                self.children[-1].start()
                self.pipes.append(pipe)
                other.close()

    def pids(self) -> dict[str, int]:
        return {"engine": os.getpid(), **({"worker": self.children[0].pid} if self.children else {})}

    def call(self, method: str, *args: Any) -> list[Any]:
        with self._lock:
            return self._call(method, *args)

    def _call(self, method: str, *args: Any) -> list[Any]:
        if not self.children:
            there = self.wrapper if method == "execute_model" else self.wrapper.worker
            return [getattr(there, method)(*args)]
        try:
            for pipe in self.pipes:
                pipe.send((method, args))
            answers = [pipe.recv() for pipe in self.pipes]
        except (EOFError, OSError):
            os._exit(1)  # as vLLM's engine does
        for _, error in answers:
            if error is not None:
                raise error
        return [result for result, _ in answers]

    def generate(self) -> list[float]:
        return sorted({value for values in self.call("execute_model") for value in values})


class Client:
    """Of a trainer, to an engine: what vLLM's and TRL's have. An engine that is not there is no connection."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.server_timeout = engine, TIMEOUT_S

    def _ask(self, method: str, *args: Any, timeout: float = 2 * TIMEOUT_S) -> Any:
        """TRL's client has a timeout, and vLLM's has none."""
        try:
            return ray.get(self.engine.call.remote(method, *args), timeout=timeout)
        except ray.exceptions.RayActorError as error:
            raise ConnectionError(str(error)) from error
        except ray.exceptions.GetTimeoutError as error:
            raise TimeoutError(str(error)) from error

    def wait_for_server_ready(self) -> None:
        until = time.monotonic() + self.server_timeout
        while True:
            with suppress(ray.exceptions.RayActorError):
                ray.get(self.engine.pids.remote())
                return
            if time.monotonic() > until:
                raise TimeoutError
            time.sleep(0.05)

    def init_weight_transfer_engine(self, info: dict[str, Any], **_: Any) -> None:
        self._ask("init_weight_transfer_engine", info)

    def start_weight_update(self, **options: Any) -> None:
        self._ask("start_weight_update", **options)

    def update_weights(self, info: dict[str, Any], **options: Any) -> None:
        self._ask("update_weights", info, **options)

    def finish_weight_update(self, *, weight_version: str = "", **options: Any) -> None:
        self._ask("finish_weight_update", **options)

    def pause(self, **_: Any) -> None:
        pass

    resume = pause


class Trainer:
    """An actor that begins as a program does: each of its lives numbers its versions from 1 on."""

    def __init__(self, timeout: float = TIMEOUT_S) -> None:
        self.value, self.transfer, self.timeout = 0.0, None, timeout

    def pids(self) -> dict[str, int]:
        return {"trainer": os.getpid()}

    def next_value(self) -> float:
        self.value = float(time.monotonic_ns() // 1000)
        return self.value

    def newest(self) -> float:
        return self.value


class VllmTrainer(Trainer):
    """With vLLM's trainer interface."""

    lends = False
    mesh: Any = None

    def train(self, engine: Any, case: str = "", value: float = 0.0) -> float:
        """Bring a new value to the engine. Of several trainers, it is the first one's."""
        stub_vllm()
        from raytorchrpc.integrations.vllm.trainer import ModelSource, TrainerEngine, TrainerInit

        if self.transfer is None:
            self.weights = self._shards(filled(self.next_value()))
            rank = self.mesh.get_rank() if self.mesh else 0
            init = TrainerInit(rank=rank, timeout=self.timeout, lend=self.lends)
            self.transfer = TrainerEngine.trainer_init(init, client=Client(engine), source=ModelSource(self.weights))
        self.weights.clear()
        self.weights.update(self._shards(filled(self.next_value(), case)))
        self.transfer.send_weights()
        return self.value

    def form(self, rank: int, ranks: int, meeting: str) -> None:
        """Be one of several trainers with shards, or one alone; the next ``train`` begins again."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self.mesh = self.transfer = None
        if ranks > 1:
            options = {"rank": rank, "world_size": ranks, "timeout": timedelta(seconds=10)}
            dist.init_process_group("gloo", init_method=f"file://{meeting}", **options)
            self.mesh = init_device_mesh("cpu", (ranks,))

    def _shards(self, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Of the first trainer's tensors."""
        if self.mesh is None:
            return dict(tensors)
        return {name: distribute_tensor(tensor, self.mesh, [Shard(0)]) for name, tensor in tensors.items()}


class LendingTrainer(VllmTrainer):
    """Whose engines read its own tensors."""

    lends = True


class ServedTrainer(VllmTrainer):
    """Of engines that are servers, which join the group that it forms itself."""

    def train(self, engine: Any, case: str = "") -> float:
        if self.transfer is None:
            try:
                rtr.current_member()
            except rtr.NotAMember:
                config = rtr.GroupConfig.from_env(joinable_by="cluster")
                rtr.init_group([], name="served", config=config, include_driver=True)
        return super().train(engine, case)


class TrlTrainer(Trainer):
    """With TRL's. It forms its group itself."""

    lends = False

    def train(self, engine: Any, case: str = "") -> float:
        """Bring a new value to the engine."""
        stub("trl.experimental.async_grpo.vllm_client", VLLMClient=lambda *_: Client(engine))
        from raytorchrpc.integrations import versions

        versions.metadata = SimpleNamespace(version=lambda _: "1.16.0", PackageNotFoundError=ImportError)
        from raytorchrpc.integrations.trl import RayTorchRpcWeightTransfer

        if self.transfer is None:
            transfer = RayTorchRpcWeightTransfer(timeout=self.timeout, lend=self.lends)
            transfer.init_weight_transfer()
            self.transfer = transfer
        tensors = filled(self.next_value(), case)
        self.transfer.send_weights(_merged(tensors), len(tensors))
        return self.value


class LendingTrlTrainer(TrlTrainer):
    """Whose server reads its own tensors."""

    lends = True


def _merged(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """As TRL yields a model's tensors: at the end it takes an adapter out of them again."""
    yield from tensors.items()
    for tensor in tensors.values():
        tensor.zero_()


# --- SGLang -----------------------------------------------------------------------------------------------------------


class SglangEngine(sglang_engine.Engine):
    def generate(self) -> list[float]:
        """What its ranks compute with."""
        states = self.tell("state")
        return values_of(its for state in states for name, its in state.items() if name != "derived")


class SglangHolder:
    """An actor with an engine, which is there from its beginning."""

    def __init__(self, timeout: float = TIMEOUT_S) -> None:
        self._lock, self._timeout = threading.Lock(), timeout
        self.start(2)

    def start(self, ranks: int) -> None:
        """Start an engine with another tensor parallelism."""
        from raytorchrpc.integrations.sglang import LOADER, Updates

        with self._lock:
            if hasattr(self, "engine"):
                self.engine.kill()
            self.engine = SglangEngine(tp_size=ranks, custom_weight_loader=[LOADER], hidden=256)
            self.updates = Updates(self.engine, "policy", timeout=self._timeout)

    def pids(self) -> dict[str, int]:
        return {"engine": os.getpid(), "worker": self.engine._ranks[-1].pid or 0}

    def bring(self, version: int) -> None:
        with self._lock:
            self.updates.bring(version)

    def generate(self) -> list[float]:
        with self._lock:
            return self.engine.generate()


class SglangTrainer(Trainer):
    rank, names = 0, None

    def form(self, rank: int, ranks: int, *_: Any) -> None:
        """Be one of several trainers with shards, or one alone."""
        self.rank = rank
        self.names = ["trainer", *(f"trainer_{number}" for number in range(1, ranks))] if ranks > 1 else None

    def train(self, engine: Any, case: str = "", value: float = 0.0) -> float:
        """Bring a value to the engine, or a new one. All trainers are given the same."""
        store = rtr.WeightStore("policy", publishers=self.names, keep=2)
        self.value = value or self.next_value() % 2**20  # exact as float32
        names = sglang_engine.checkpoint(256, 2, 0).items()
        tensors = altered({name: torch.full_like(tensor, self.value) for name, tensor in names}, case)
        version = store.publish({name: self._shard(tensor) for name, tensor in tensors.items()})
        if not self.rank:
            ray.get(engine.bring.remote(store.wait(version)), timeout=2 * TIMEOUT_S)
        return self.value

    def _shard(self, tensor: torch.Tensor) -> Any:
        if self.names is None:
            return tensor
        part = len(tensor) // len(self.names)
        begin = self.rank * part
        return rtr.Shard(tensor.narrow(0, begin, part), tuple(tensor.shape), (begin, *[0] * (tensor.dim() - 1)))


# --- verl -------------------------------------------------------------------------------------------------------------


def verl_engine(**options: Any) -> Any:
    """Its checkpoint engine."""
    registry = SimpleNamespace(register=lambda _: lambda cls: cls)
    stub("verl.checkpoint_engine", CheckpointEngine=object, CheckpointEngineRegistry=registry)
    from raytorchrpc.integrations import versions

    versions.metadata = SimpleNamespace(version=lambda _: "0.9.0", PackageNotFoundError=ImportError)
    from raytorchrpc.integrations.verl import RayTorchRpcCheckpointEngine

    return RayTorchRpcCheckpointEngine(SIZE * 16, **{"timeout": TIMEOUT_S, **options})


class VerlWorker:
    """An async actor with a checkpoint engine: a trainer, or a rollout worker, which generates once it may."""

    def __init__(self, name: str, **options: Any) -> None:
        self.name, self.engine = name, verl_engine(**options)
        self.model, self.may_generate = filled(0), False

    async def pids(self) -> dict[str, int]:
        return {self.name: os.getpid()}

    async def call(self, method: str, *args: Any, **options: Any) -> Any:
        return getattr(self.engine, method)(*args, **options)

    async def send(self, value: float, case: str) -> None:
        await self.engine.send_weights(iter(filled(value, case).items()))

    async def receive(self) -> None:
        async for name, tensor in self.engine.receive_weights():
            self.model[name].copy_(tensor)

    async def resume(self, may_generate: bool) -> None:
        self.may_generate = may_generate

    async def generate(self) -> list[float]:
        if not self.may_generate:
            raise rtr.RayTorchRpcError("verl's manager has not resumed generation")
        return values_of(self.model.values())


class VerlManager:
    """An actor that does in an update what verl's manager does."""

    def __init__(self, trainers: list[Any], rollout: Any) -> None:
        self.trainers, self.rollout, self.value = trainers, rollout, 0.0
        self.topology, self._lock = type(verl_engine()).build_topology, threading.Lock()

    def newest(self) -> float:
        return self.value

    def form(self, group: str, other: Any) -> None:
        rtr.init_group({"other": other}, name=group)

    def members(self, group: str) -> list[str]:
        return [member.name for member in rtr.get_group(group).members]

    def _ask_all(self, trainers: list[Any], method: str, arguments: list[dict[str, Any]]) -> list[Any]:
        calls = zip([*trainers, self.rollout], arguments, strict=True)
        return ray.get([actor.call.remote(method, **given) for actor, given in calls], timeout=2 * TIMEOUT_S)

    def update(self, case: str = "") -> float:
        with self._lock:
            return self._update(self.trainers[: 1 if case == "changed mesh" else None], case)

    def _update(self, trainers: list[Any], case: str) -> float:
        ray.get(self.rollout.resume.remote(False))
        value = float(time.monotonic_ns() // 1000)
        count = len(trainers)
        metadata = self._ask_all(trainers, "prepare", [{}] * (count + 1))
        rows = [
            {name: column[rank] for name, column in columns.items()}
            for columns, size in zip(self.topology(count, 1, metadata), (count, 1), strict=True)
            for rank in range(size)
        ]
        self._ask_all(trainers, "init_process_group", rows)
        sent = [trainer.send.remote(value, case) for trainer in trainers]
        ray.get([*sent, self.rollout.receive.remote()], timeout=2 * TIMEOUT_S)
        self.value = value
        ray.get(self.rollout.resume.remote(True))
        return value


# --- torchrl ----------------------------------------------------------------------------------------------------------


class _Scheme:
    """What the adapter takes from torchrl's scheme."""

    def __init__(self, strategy: str) -> None:
        self._strategy = SimpleNamespace(apply_weights=None)
        self._model_id = self.context = None
        self.synchronized_on_sender = True

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "context": None, "_model_ref": None, "_strategy": None}

    @property
    def model_id(self) -> Any:
        return self._model_id

    @model_id.setter
    def model_id(self, model_id: str) -> None:
        self._model_id = model_id

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return self.context.policy.state_dict()  # type: ignore[attr-defined, no-any-return]

    def prepare_weights(self, weights: Any, *_: Any) -> Any:
        return weights

    def shutdown(self) -> None:
        pass

    def _register_transport_receiver(self) -> None:
        self._strategy = SimpleNamespace(apply_weights=lambda model, weights: None)

    def receive(self) -> None:
        self.receive_weights(weights=self.weights, strategy=self._strategy)  # type: ignore[attr-defined]


def torchrl_scheme(timeout: float = TIMEOUT_S) -> Any:
    stub("tensordict", TensorDict=SimpleNamespace(from_module=lambda _: None), TensorDictBase=_Scheme)
    stub("torchrl.weight_update", WeightSyncScheme=_Scheme)
    stub("torchrl.weight_update.utils", _resolve_model=lambda context, _: context.policy)
    stub("torchrl.weight_update.weight_sync_schemes", register_weight_sync_backend=lambda _: lambda cls: cls)
    from raytorchrpc.integrations import versions

    versions.metadata = SimpleNamespace(version=lambda _: "0.14.0", PackageNotFoundError=ImportError)
    from raytorchrpc.integrations.torchrl import RayTorchRpcWeightSyncScheme

    return RayTorchRpcWeightSyncScheme(timeout=timeout)


class Collector:
    """An actor that collects with its policy."""

    def __init__(self, number: int) -> None:
        torchrl_scheme()  # its modules have to be there before a scheme arrives
        self.policy, self.number = Model(), number
        self._receiver_schemes: dict[str, Any] = {}

    def register_scheme_receiver(self, schemes: dict[str, Any]) -> None:
        for name, scheme in schemes.items():
            scheme._init_on_receiver_impl(model_id=name, context=self, worker_idx=self.number)
            self._receiver_schemes[name] = scheme

    def pids(self) -> dict[str, int]:
        return {f"collector_{self.number}": os.getpid()}

    def generate(self) -> list[float]:
        return values_of(self.policy.parameters())


class Sender:
    """An actor that does what torchrl's RayCollector does."""

    def __init__(self, collectors: list[Any], timeout: float = TIMEOUT_S) -> None:
        self.scheme, self.value, self._timeout, self._lock = None, 0.0, timeout, threading.Lock()
        self.start(collectors)

    policy = None

    def start(self, collectors: list[Any]) -> None:
        """Begin as with a new RayCollector, whose collectors these are."""
        with self._lock:
            if self.scheme is not None:
                self.scheme.shutdown()
            self.collectors, self.scheme = collectors, torchrl_scheme(self._timeout)
            self.scheme._init_on_sender_impl(model_id="policy", context=self, remote_collectors=collectors)

    def newest(self) -> float:
        return self.value

    def update(self, case: str = "") -> float:
        with self._lock:
            value = float(time.monotonic_ns() // 1000)
            self.scheme.send(filled(value, case))
            self.value = value
            return value

    def generate(self) -> list[float]:
        values = ray.get([collector.generate.remote() for collector in self.collectors], timeout=2 * TIMEOUT_S)
        return max(values, key=lambda its: (len(its), its != [self.value]))
