"""What verl needs to run on a host without a GPU: named in VERL_USE_EXTERNAL_MODULES, with VERL_PLATFORM=toy.

verl has no platform for a CPU and no inference engine for one, but registries for both. The engine here samples with
the model of transformers, one prompt after the other, from the weights that the trainer has sent.
"""

from __future__ import annotations

import contextlib
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


@PlatformRegistry.register(platform="toy")
class Platform(PlatformBase):
    """The CPU. Ray is told that it is a GPU, as verl places its workers by those."""

    device_name, vendor_name = "cpu", "toy"
    device_module = SimpleNamespace(
        **{
            name: getattr(torch.cpu, name) for name in ("current_device", "device_count", "synchronize", "is_available")
        },
        **dict.fromkeys(
            ("empty_cache", "manual_seed", "manual_seed_all", "set_device", "reset_peak_memory_stats"), _nothing
        ),
        **dict.fromkeys(
            ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"), lambda *_: 0
        ),
        mem_get_info=lambda *_: (1, 1),
        get_device_name=lambda *_: "CPU",
        ipc_collect=_nothing,
        get_rng_state=torch.get_rng_state,
        set_rng_state=torch.set_rng_state,
    )
    set_device = synchronize = manual_seed = manual_seed_all = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = cudart = get_collective_module = _nothing

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_gpus": num_gpus}

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def nvtx_range(self, msg: str) -> Any:
        return contextlib.nullcontext()


import ray  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402
from verl.utils import distributed  # noqa: E402
from verl.workers.rollout import base  # noqa: E402
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput  # noqa: E402

# By itself verl asks for a backend of the CPU and, again, of the device.
distributed.initialize_global_process_group_ray = partial(
    distributed.initialize_global_process_group_ray, backend="gloo"
)
base._ROLLOUT_REGISTRY["toy", "async"] = f"{__name__}.Rollout"
RolloutReplicaRegistry.register("toy", lambda: Replica)


class Server:
    """An actor that generates."""

    def __init__(self, path: str, length: int) -> None:
        torch.set_num_threads(1)
        self._model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)).float().eval()
        self._length, self._steps = length, 0

    async def load(self, weights: dict[str, torch.Tensor], global_steps: int) -> None:
        self._model.load_state_dict(weights, strict=False)
        self._steps = global_steps

    async def generate(self, request_id: str, prompt_ids: list[int], sampling_params: Any, **_: Any) -> TokenOutput:
        prompt = torch.tensor([prompt_ids])
        with torch.no_grad():
            ids = self._model.generate(prompt, do_sample=True, max_new_tokens=self._length, pad_token_id=0)[0]
            logits = self._model(ids[None]).logits[0, len(prompt_ids) - 1 : -1].log_softmax(-1)
        answer = ids[len(prompt_ids) :]
        log_probs = logits.gather(1, answer[:, None])[:, 0].tolist()
        steps = {"global_steps": self._steps}
        return TokenOutput(
            token_ids=answer.tolist(), log_probs=log_probs, stop_reason="completed", num_preempted=0, extra_fields=steps
        )

    async def nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    wake_up = sleep = abort_all_requests = resume_generation = clear_kv_cache = nothing
    release_kv_cache = resume_kv_cache = start_profile = stop_profile = nothing


class Replica(RolloutReplica):
    async def launch_servers(self) -> None:
        name = f"toy_{self.replica_rank}"
        remote: Any = ray.remote(num_cpus=0)(Server)
        server = remote.options(name=name).remote(self.model_config.path, self.config.response_length)
        await server.__ray_ready__.remote()
        self.servers, self._server_handle, self._server_address = [server], server, name


class Rollout(base.BaseRollout):
    """In a trainer: hands its weights to the server."""

    async def resume(self, tags: list[str]) -> None:
        pass

    async def release(self) -> None:
        pass

    async def update_weights(self, weights: Any, wire_format: str = "", global_steps: int = 0, **_: Any) -> None:
        tensors = {name: tensor.detach().clone() for name, tensor in weights}
        server = ray.get_actor(f"toy_{torch.distributed.get_rank()}")
        await server.load.remote(tensors, global_steps)
