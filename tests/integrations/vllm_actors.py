"""A trainer of a small Llama, and vLLM engines, as actors; for the tests with the real vLLM."""

from __future__ import annotations

import copy
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import raytorchrpc as rtr

#: For a CPU, one thread, and nothing from the network.
VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # the tests send functions to workers
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
#: Of an engine: no files but the configuration.
OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "weight_transfer_config": {"backend": "raytorchrpc"},
}
PROMPT = [1, 2, 3, 4, 5, 6, 7]


def save_config(folder: Path, hidden: int = 64, layers: int = 2, dtype: str = "float32", **options: Any) -> str:
    """Write the configuration of a Llama, without weights; returns its path."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 2,
        num_hidden_layers=layers,
        num_attention_heads=max(2, hidden // 32),
        num_key_value_heads=max(2, hidden // 64),
        architectures=["LlamaForCausalLM"],
        dtype=dtype,
        **{"vocab_size": 320, "tie_word_embeddings": False, "max_position_embeddings": 256, **options},
    )
    config.save_pretrained(folder)
    return str(folder)


class Trainer:
    """The model of the transformers library, whose random weights each step changes."""

    def __init__(self, path: str, seed: int = 1) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.model = LlamaForCausalLM(LlamaConfig.from_pretrained(path)).eval()
        self.store: Any = None
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(4)  # the most probable token is clear, so that greedy tokens tell models apart

    def open(self, store: str = "policy", **options: Any) -> None:
        self.store = rtr.WeightStore(store, **{"keep": 2, **options})

    def step(self) -> int:
        """Change all weights and publish them; returns the version."""
        self.change()
        return self.publish()

    def change(self) -> None:
        import torch

        with torch.no_grad():
            for parameter in self.model.parameters():
                noise = torch.randn_like(parameter) * parameter.std() * 0.5 if parameter.dim() > 1 else 0.01
                parameter.add_(noise)

    def publish(self, rename: str = "", without: str = "") -> int:
        state = {rename + name: its for name, its in self.model.state_dict().items() if name != without}
        return int(self.store.publish(state))

    def connect_over_http(self, url: str) -> None:
        """Have vLLM's trainer interface publish the model, to a server that its own client reaches."""
        from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.plugins import load_general_plugins

        from raytorchrpc.integrations.vllm.trainer import ModelSource, TrainerInit

        load_general_plugins()
        self.sync = WeightTransferTrainerFactory.trainer_init(
            TrainerInit(rank=0), client=HTTPVLLMWeightSyncClient(url, timeout=100), source=ModelSource(self.model)
        )

    def send(self) -> None:
        self.sync.send_weights()

    def nbytes(self) -> int:
        return sum(its.nbytes for its in self.model.state_dict().values())

    def total(self, name: str, dtype: str) -> float:
        """The sum of a tensor's elements, rounded to a dtype."""
        import torch

        return float(self.model.state_dict()[name].to(getattr(torch, dtype)).double().sum())

    def greedy(self, count: int = 12) -> list[int]:
        """The most probable tokens after the prompt."""
        import torch

        ids = torch.tensor([PROMPT])
        with torch.no_grad():
            for _ in range(count):
                ids = torch.cat([ids, self.model(ids).logits[0, -1].argmax().view(1, 1)], 1)
        return list(ids[0, len(PROMPT) :].tolist())


class AdapterTrainer(Trainer):
    """Publishes LoRA adapters of its model, which stays as it is."""

    def publish_adapter(self, seed: int) -> tuple[str, list[int]]:
        """Returns the name of the version, and the tokens of the model with the adapter."""
        import torch

        from raytorchrpc.integrations.adapters import CONFIG, name_of

        torch.manual_seed(seed)
        whole, tensors = Trainer.__new__(Trainer), dict[str, torch.Tensor]()
        whole.model = copy.deepcopy(self.model)
        with torch.no_grad():
            for layer in range(len(self.model.model.layers)):
                for module in (f"layers.{layer}.self_attn.q_proj", f"layers.{layer}.mlp.down_proj"):
                    weight = whole.model.get_parameter(f"model.{module}.weight")
                    a, b = torch.randn(4, weight.shape[1]), torch.randn(weight.shape[0], 4) * weight.std() / 2
                    weight.add_(2 * b @ a)
                    names = (f"base_model.model.model.{module}.lora_{which}.weight" for which in "AB")
                    tensors.update(zip(names, (a, b), strict=True))
        config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}
        tensors[CONFIG] = torch.frombuffer(bytearray(json.dumps(config).encode()), dtype=torch.uint8)
        store = rtr.WeightStore("adapter", keep=2)
        return name_of(store, store.publish(tensors)), whole.greedy()

    def forget_adapters(self) -> None:
        """As if this process was restarted."""
        rtr.WeightStore("adapter", keep=2).delete()


#: Of compressed-tensors: int8 weights with a scale for each row, activations quantised as they come.
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
INT8: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "all": {
            "targets": ["Linear"],
            "weights": {**_INT8, "strategy": "channel", "dynamic": False},
            "input_activations": {**_INT8, "strategy": "token", "dynamic": True},
        }
    },
}


class Int8Trainer(Trainer):
    """Publishes its model as an int8 checkpoint has it (see ``INT8``)."""

    def checkpoint(self) -> dict[str, Any]:
        import torch

        found = {}
        for name, its in self.model.state_dict().items():
            found[name] = its
            if name.endswith("_proj.weight"):
                found[f"{name}_scale"] = scale = its.abs().amax(1, keepdim=True) / 127
                found[name] = (its / scale).round().to(torch.int8)
        return found

    def save(self, path: str) -> None:
        """Write the checkpoint beside its configuration."""
        from safetensors.torch import save_file

        save_file(self.checkpoint(), f"{path}/model.safetensors")

    def publish_int8(self) -> int:
        return int(self.store.publish(self.checkpoint()))


class ShardedTrainer:
    """One of two processes that train the same model with FSDP2, and drive vLLM as vLLM's documentation says."""

    def __init__(self, path: str, rank: int, rendezvous: str) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed.fsdp import fully_shard

        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
        self.rank, self.whole = rank, Trainer(path).model
        self.model = Trainer(path).model  # the same seed: the same weights
        for layer in self.model.model.layers:
            fully_shard(layer)
        fully_shard(self.model)

    def connect(self, engines: list[Any], shards: bool, **options: Any) -> None:
        """Publish this process's shards, or else rank 0's whole tensors."""
        from vllm.distributed.weight_transfer.clients import RayVLLMWeightSyncClient
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.plugins import load_general_plugins

        from raytorchrpc.integrations.vllm.trainer import ModelSource, TrainerInit

        load_general_plugins()
        self.sync = WeightTransferTrainerFactory.trainer_init(
            TrainerInit(rank=self.rank, **options),
            client=RayVLLMWeightSyncClient(engines),
            source=ModelSource(self.model if shards else self.whole.state_dict()),
        )

    def step(self) -> None:
        """Change the weights of both models, as training would, and bring them to the engines."""
        import torch

        with torch.no_grad():
            for whole, sharded in zip(self.whole.parameters(), self.model.parameters(), strict=True):
                whole.mul_(1.5)
                sharded.mul_(1.5)
        self.sync.send_weights()

    def greedy(self) -> list[int]:
        trainer = Trainer.__new__(Trainer)
        trainer.model = self.whole
        return trainer.greedy()


class Engine:
    """vLLM's LLM. ``in_process``: its worker runs in this actor, else in a child process."""

    def __init__(
        self,
        path: str,
        in_process: bool = True,
        keep_layout: bool = False,
        variables: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        os.environ.update({**VARIABLES, "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(not in_process))})
        os.environ.update(variables or {})
        if keep_layout:
            leave_layout_alone()
        if options.get("distributed_executor_backend") == "ray":
            count_cpus_as_gpus()
        from vllm import LLM

        began = time.monotonic()
        self.llm = LLM(
            path,
            **{**OPTIONS, **options},
        )
        self.started_s = time.monotonic() - began

    def start_s(self) -> float:
        return self.started_s

    def connect(self, store: str = "policy", **info: Any) -> None:
        self.llm.init_weight_transfer_engine({"init_info": {"store": store, **info}})

    def update(self, version: int | None = None) -> float:
        """Bring a version; returns the seconds that it took."""
        began = time.perf_counter()
        self.llm.start_weight_update()
        self.llm.update_weights({"update_info": {"version": version}})
        self.llm.finish_weight_update(weight_version=str(version))
        self.llm.reset_prefix_cache()
        return time.perf_counter() - began

    def how(self) -> str:
        """How the first worker's model is updated, as its log says."""
        return str(self.llm.collective_rpc(lambda worker: worker.weight_transfer_engine.how)[0])

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run ``function(self, *args)``."""
        return function(self, *args)

    # What vLLM's RayVLLMWeightSyncClient calls.

    def init_weight_transfer_engine(self, request: Any) -> None:
        self.llm.init_weight_transfer_engine(request)

    def start_weight_update(self) -> None:
        self.llm.start_weight_update()

    def update_weights(self, request: Any) -> None:
        self.llm.update_weights(request)

    def finish_weight_update(self) -> None:
        self.llm.finish_weight_update()

    def update_weight_version(self, version: str) -> None:
        self.llm.update_weight_version(version)

    def weight_version(self) -> str:
        return str(self.llm.get_weight_version())

    def greedy(self, count: int = 12, adapter: Any = None) -> list[int]:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=count, detokenize=False, ignore_eos=True)
        prompts = [{"prompt_token_ids": PROMPT}]
        (answer,) = self.llm.generate(prompts, sampling, use_tqdm=False, lora_request=adapter)
        return list(answer.outputs[0].token_ids)

    def stage(self, version: int | None = None, **options: Any) -> Any:
        """Have each rank load an adapter; returns what requests name it by."""
        from raytorchrpc.integrations.vllm.adapters import request

        named = request("adapter", version, **options)
        self.llm.llm_engine.add_lora(named)
        return named


def count_cpus_as_gpus() -> None:
    """Have vLLM's Ray executor place its workers by Ray's GPUs. On CPUs it has no resource for them, and refuses."""
    import ray
    from vllm.platforms import current_platform
    from vllm.v1.executor import ray_executor_v2 as executor

    class Worker(executor.RayWorkerProc):
        def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
            return ray.get_runtime_context().get_node_id(), [self._init_kwargs["rank"]]

    type(current_platform).ray_device_key = "GPU"
    executor.ray = SimpleNamespace(**{**vars(ray), "remote": lambda _: ray.remote(Worker)})


def leave_layout_alone() -> None:
    """Have vLLM compute linear layers from their weights, as it does on GPUs; on CPUs it packs them."""
    import torch
    import vllm.model_executor.layers.utils as utils

    def dispatch(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = dispatch


def fail_midway(engine: Engine, by_a_bug: bool = False) -> None:
    """Have the next update fail after its first layers, as if the trainer was lost then."""
    update = engine.llm.llm_engine.collective_rpc(lambda worker: worker.weight_transfer_engine._bring.__self__)[0]
    group = update._groups[1]
    pull = group.pull

    def fail(*args: Any) -> None:
        group.pull = pull
        raise ZeroDivisionError if by_a_bug else rtr.PeerLost("trainer", "the test says so", True)

    group.pull = fail


def die_in_next_update(engine: Engine) -> None:
    """Have the worker be killed when it pulls next."""

    def spoil(worker: Any) -> None:
        worker.weight_transfer_engine._bring.__self__._groups[0].pull = lambda *_: os.kill(os.getpid(), signal.SIGKILL)

    engine.llm.collective_rpc(spoil)


def fail_to_wait(engine: Engine, rank: int | None) -> None:
    """Have this rank alone not find a version in time; None: none of them."""

    def spoil(worker: Any) -> None:
        engine = worker.weight_transfer_engine

        class Silent(rtr.WeightStore):
            def wait(self, version: int = 1, timeout: float | None = None) -> int:
                raise rtr.Empty("the test says so")

        engine._follower._store.__class__ = Silent if worker.rank == rank else rtr.WeightStore

    engine.llm.collective_rpc(spoil)


def dtype_and_sum(engine: Engine, name: str) -> tuple[str, float]:
    """Of a parameter of vLLM's model, that it does not pack."""
    (found,) = engine.llm.collective_rpc(lambda worker: worker.model_runner.model.get_parameter(name))
    return str(found.dtype), float(found.double().sum())


def pid_of(engine: Engine) -> int:
    return os.getpid()


class AsyncEngine:
    """vLLM's AsyncLLM, which generates while its weights are updated. Its worker is in a child process."""

    def __init__(self, path: str, **options: Any) -> None:
        os.environ.update(VARIABLES)
        self.path, self.options = path, options

    async def start(self) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(self.path, **{**OPTIONS, **self.options}))

    async def connect(self, store: str) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self.llm.init_weight_transfer_engine(WeightTransferInitRequest({"store": store}))

    async def update(self, version: int) -> None:
        """Freeze the requests, bring a version, and let them go on with it."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self.llm.pause_generation(mode="keep")
        await self.llm.start_weight_update()
        await self.llm.update_weights(WeightTransferUpdateRequest({"version": version}))
        await self.llm.finish_weight_update(weight_version=str(version))
        await self.llm.reset_prefix_cache()
        await self.llm.resume_generation()

    async def update_while_generating(self, version: int) -> tuple[int, int]:
        """Update after the first tokens of a request; returns how many tokens there were then, and at the end."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=60, detokenize=False, ignore_eos=True)
        then = count = 0
        async for answer in self.llm.generate({"prompt_token_ids": PROMPT}, sampling, request_id=f"v{version}"):
            count = len(answer.outputs[0].token_ids)
            if not then:
                then = count
                await self.update(version)
        return then, count

    async def greedy(self, count: int = 12, **options: Any) -> list[int]:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=count, detokenize=False, ignore_eos=True)
        prompt, tokens = {"prompt_token_ids": PROMPT}, list[int]()
        async for answer in self.llm.generate(prompt, sampling, request_id=os.urandom(8).hex(), **options):
            tokens = list(answer.outputs[0].token_ids)
        return tokens


class Server:
    """vLLM's HTTP server as a child of this process: on a Unix socket, or on a port of this host that it chooses."""

    def __init__(
        self, path: str, socket_path: str | None = None, options: Sequence[str] = ("--skip-tokenizer-init",)
    ) -> None:
        self._socket = socket_path
        where = ["--host", "127.0.0.1", "--port", "0"] if socket_path is None else ["--uds", socket_path]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", path, *where]
        command += ["--load-format", "dummy", "--enforce-eager", "--max-model-len", "128", *options]
        command += ["--dtype", "float32", "--weight-transfer-config", json.dumps({"backend": "raytorchrpc"})]
        variables = {**os.environ, **VARIABLES, "VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_LEVEL": "INFO"}
        variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        self.process = self.start(command, variables)
        self.pid = getattr(self, "pid", self.process.pid)
        assert self.process.stdout is not None
        said = []
        for line in self.process.stdout:
            said.append(line)
            if "Application startup complete" in line:
                break
        else:
            raise RuntimeError("".join(said[-30:]))
        self._reader = threading.Thread(target=self.process.stdout.read, daemon=True)  # so that it never waits
        self._reader.start()
        until = time.monotonic() + 60
        while True:  # uvicorn says that it has started before it listens
            try:
                self.ask("GET", "/health")
                break
            except (OSError, ValueError):
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)

    def start(self, command: list[str], variables: dict[str, str]) -> subprocess.Popen[str]:
        return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """One request; returns the JSON of its answer."""
        connection = http.client.HTTPConnection("localhost", timeout=60)
        if self._socket is not None:
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.connect(self._socket)
        else:
            connection = http.client.HTTPConnection(*self.address(), timeout=60)
        text = None if body is None else json.dumps(body)
        with closing(connection):
            connection.request(method, path, text, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            content = answer.read().decode()
        assert answer.status == 200, content
        return json.loads(content) if content else None

    def address(self) -> tuple[str, int]:
        """Host and port that it listens on."""
        import psutil

        sockets = psutil.Process(self.pid).net_connections("tcp4")
        (listening,) = (each.laddr for each in sockets if each.status == psutil.CONN_LISTEN)
        return listening.ip, listening.port

    def greedy(self, count: int = 12, **body: Any) -> list[int]:
        body |= {"prompt": PROMPT, "temperature": 0, "max_tokens": count, "ignore_eos": True, "return_token_ids": True}
        return list(self.ask("POST", "/v1/completions", body)["choices"][0]["token_ids"])

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)
