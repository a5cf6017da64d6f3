"""Brings the weights of TRL's trainers to a vLLM server.

``AsyncGRPOTrainer`` and ``AsyncDistillationTrainer`` take ``weight_transfer=RayTorchRpcWeightTransfer()``. Before a
``GRPOTrainer``, or another one with ``vllm_mode="server"``, is made: ``use_in_server_mode()``.
``publish_adapters()`` is for asynchronous trainers of PEFT models.

The first training process publishes each version once, and the server's workers pull it. They generate meanwhile, and
pause only while they pull. The server runs with ``--weight-transfer-config '{"backend": "raytorchrpc"}'``.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial, wraps
from itertools import islice
from types import SimpleNamespace
from typing import Any

import ray
import torch

import raytorchrpc as rtr
from raytorchrpc.integrations.adapters import adapter_of, name_of
from raytorchrpc.integrations.engines import Progress
from raytorchrpc.integrations.versions import adapted_to

with adapted_to("trl"):
    from trl.experimental.async_grpo.vllm_client import VLLMClient


class RayTorchRpcWeightTransfer:
    """What ``weight_transfer=`` of TRL's asynchronous trainers takes. Every training process makes one; the first one
    uses it.

    If that process is in no group, it forms one, which any process of its Ray cluster may join, and connects to Ray if
    it has not. A server that it has started needs no Ray. In an update that fails, the server stays paused, and the
    next update works.
    """

    def __init__(
        self,
        server_url: str = "http://localhost:8000",
        *,
        store: str = "policy",
        group: str = "trl",
        config: rtr.GroupConfig | None = None,
        into: str = "auto",
        lend: bool = False,
        timeout: float = 600,
    ) -> None:
        """Describe the transfer; does nothing yet.

        Args:
            server_url: of the server: ``AsyncGRPOConfig.vllm_server_base_url``.
            store: the name of the ``WeightStore`` in the training process.
            group: the name of the group that this process is in, or else forms.
            config: settings of the group that is formed. None: from the environment, and ``joinable_by="cluster"``.
            into: how the weights get into vLLM's model; see ``raytorchrpc.integrations.vllm.engine.InitInfo``.
            lend: the server's workers read the model itself, and the store takes no memory; see ``WeightStore.lend``.
                What TRL gathers of shards is held during an update; FSDP1 frees it before: ConfigurationError.
            timeout: seconds for the server to start, and for each update.
        """
        self._server_url, self._store_name, self._into, self._lend = server_url, store, into, lend
        self.timeout = timeout
        """Seconds for the next update; may be changed between two."""
        self._group, self._config = group, config
        self._formed: rtr.Group | None = None
        self._store: rtr.WeightStore | None = None
        self._adapters: rtr.WeightStore | None = None
        self._adapter: str | None = None
        """The name of the adapter that the server has."""
        self._vllm = VLLMClient(server_url, timeout)

    def init_weight_transfer(self) -> None:
        """Become a member, and make the store. Blocks until the server is there.

        The server's workers find the store with the first update, which may be one that they began before this process
        was restarted.
        """
        self._vllm.wait_for_server_ready()
        self._become_member()
        self._store = rtr.WeightStore(self._store_name)

    def pause(self) -> None:
        """Do nothing yet: the server generates until the weights are published."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]], count: int | None = None) -> None:
        """Publish the weights, pause the server, and have its workers pull them. Blocks until they have them.

        A server that is started again meanwhile is updated, too. Raises RayTorchRpcError if the server fails, or does
        not answer in time; its text says whether the server's model has tensors of two versions.

        ``count``: how many the iterator yields, if its end changes those that it has yielded, as TRL's does that
        merges an adapter for so long.
        """
        if self._store is None:  # a second train() of this trainer, for which TRL initialises nothing
            self.init_weight_transfer()
        assert self._store is not None
        with self._offered(self._store, iterator, count) as version:
            self._deliver(f"version {version} of {self._store_name!r}, and stays paused", partial(self._bring, version))

    @contextmanager
    def _offered(
        self, store: rtr.WeightStore, iterator: Iterator[tuple[str, torch.Tensor]], count: int | None
    ) -> Iterator[int]:
        """Make the weights a version, and yield its number; what is lent is taken back at the end."""
        if not self._lend:
            yield store.publish(iterator, timeout=self.timeout)
            return
        try:
            with store.lend(dict(islice(iterator, count)), timeout=self.timeout) as version:
                yield version
        finally:
            for _ in iterator:  # all processes gather alike, and TRL's end of it unmerges an adapter
                pass

    def send_adapter(self, tensors: Mapping[str, torch.Tensor]) -> str:
        """Publish ``adapter_of(model)`` of ``integrations.adapters``, and have the server load it. Blocks until it has.

        Returns the name by which requests ask for it. Those that run go on with their own: nothing is paused. The
        server unloads the adapter before it.

        Raises RayTorchRpcError as ``send_weights``.
        """
        if self._store is None:
            self.init_weight_transfer()
        name, before = self.publish_adapter(tensors), self._adapter
        self._deliver(
            f"adapter {name!r}", lambda progress: self._vllm.load_lora_adapter(name, name, timeout=progress.left())
        )
        self._adapter = name
        if before is not None:
            with suppress(OSError):  # it is started again just now
                self._vllm.unload_lora_adapter(before, timeout=self.timeout)
        return name

    def publish_adapter(self, tensors: Mapping[str, torch.Tensor]) -> str:
        """Publish ``adapter_of(model)``; returns the name by which a server loads it."""
        if self._adapters is None:
            self._become_member()
            self._adapters = rtr.WeightStore(f"{self._store_name}-adapter", keep=2)
        return name_of(self._adapters, self._adapters.publish(tensors, timeout=self.timeout), self._group)

    def _deliver(self, label: str, bring: Callable[[Progress], None]) -> None:
        """Have the server take something, which may be started again meanwhile."""
        progress = Progress(self.timeout)
        while True:
            try:
                return bring(progress)
            except Exception as error:
                if isinstance(error, OSError) and progress.left():  # of requests: it is not there
                    with suppress(TimeoutError):
                        self._vllm.server_timeout = progress.left()
                        self._vllm.wait_for_server_ready()
                        continue
                raise rtr.RayTorchRpcError(
                    f"the vLLM server at {self._server_url} has not taken {label}; it has to run with "
                    f'VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config \'{{"backend": "raytorchrpc"}}\', in the Ray '
                    f"cluster of the training process or as its child: {error}"
                ) from error

    def _bring(self, version: int, progress: Progress) -> None:
        client = self._vllm
        try:
            client.pause(timeout=progress.left())
            try:
                client.start_weight_update(timeout=progress.left())
            except OSError:
                raise
            except Exception:  # a trainer that was lost in an update has left it open
                client.finish_weight_update(timeout=progress.left())
                client.start_weight_update(timeout=progress.left())
            info = {"store": self._store_name, "group": self._group, "into": self._into, "timeout": self.timeout}
            update = {"version": version, "timeout": progress.left(), "init_info": info}
            client.update_weights(update, timeout=progress.left())
            client.finish_weight_update(timeout=progress.left())
        except Exception:
            with suppress(Exception):  # ranks that did not fail are still in the update
                client.finish_weight_update(timeout=self.timeout)
            raise

    def resume(self) -> None:
        """Have the server generate with the new weights."""
        self._vllm.resume(timeout=self.timeout)

    def destroy(self) -> None:
        """End the group, if it was formed here. Idempotent."""
        self._store = self._adapters = self._adapter = None
        formed, self._formed = self._formed, None
        if formed is not None:
            formed.shutdown()

    def _become_member(self) -> None:
        """Raises NotAMember, which names the group, if this process is in another one."""
        try:
            rtr.current_member()
        except rtr.NotAMember:
            if not ray.is_initialized():
                ray.init()
            config = self._config or rtr.GroupConfig.from_env(joinable_by="cluster")
            self._formed = rtr.init_group([], name=self._group, config=config, include_driver=True)
        else:
            rtr.get_group(self._group)


def use_in_server_mode(**options: Any) -> None:
    """Have TRL's trainers with ``vllm_mode="server"`` bring their weights by raytorchrpc.

    Call it in every training process, before a trainer is made. It replaces how ``GRPOTrainer``, ``RLOOTrainer`` and
    all others that generate with ``trl.generation`` update the server: TRL's own way takes GPUs. Of a PEFT model they
    send the adapter alone, if the server runs with ``--enable-lora``, and else merged weights. Errors are those of
    ``RayTorchRpcWeightTransfer.send_weights``.

    Args:
        options: of ``RayTorchRpcWeightTransfer``, but for ``server_url``, which the trainer's settings have.
    """
    with adapted_to("trl"):
        from trl.generation import vllm_client, vllm_generation

    class Client(vllm_client.VLLMClient):
        communicator: RayTorchRpcWeightTransfer | None

        def init_communicator(self, device: Any = 0) -> None:
            self.communicator = RayTorchRpcWeightTransfer(self.base_url, **options)
            self.communicator.init_weight_transfer()
            atexit.register(self.close_communicator)

        def update_named_params(self, metadata: Any, named_params: Iterator[tuple[str, torch.Tensor]]) -> None:
            assert self.communicator is not None
            self.communicator.send_weights(named_params, len(metadata))
            self.communicator.resume()

        def close_communicator(self) -> None:
            if self.communicator is not None:
                self.communicator.destroy()
                self.communicator = None

    merged = vllm_generation.VLLMGeneration.sync_weights
    merged = getattr(merged, "__wrapped__", merged)

    @wraps(merged)
    def sync_weights(self: Any) -> None:
        if self.mode != "server" or not _sends_adapter(self):
            return merged(self)  # type: ignore[no-any-return]
        tensors = adapter_of(self.model)  # which all processes gather
        if self.accelerator.is_main_process:
            self.vllm_client.model = self.vllm_client.communicator.send_adapter(tensors)

    vllm_generation.VLLMClient, vllm_generation.VLLMGeneration.sync_weights = Client, sync_weights


def publish_adapters(**options: Any) -> None:
    """Have TRL's asynchronous trainers publish adapters of PEFT models, instead of writing files for the server.

    Call it in every training process, before a trainer is made, which gets no ``weight_transfer``. TRL sends an adapter
    alone if the server runs with ``--enable-lora``; a server that is restarted has it after the next update.

    Args:
        options: of ``RayTorchRpcWeightTransfer``, but for ``server_url``, which the trainer's settings have.
    """
    with adapted_to("trl"):
        from trl.experimental.async_distillation import async_distillation_trainer
        from trl.experimental.async_grpo import async_grpo_trainer

    transfer, names = RayTorchRpcWeightTransfer(**options), dict[str, str]()
    atexit.register(transfer.destroy)

    def publish(model: Any, accelerator: Any, adapter_name: str, folder: str) -> None:
        tensors = adapter_of(model)  # which all processes gather
        if accelerator.is_main_process:
            names[folder] = transfer.publish_adapter(tensors)

    def loading(load: Callable[..., None]) -> Callable[..., None]:
        return wraps(load)(lambda client, name, path, **given: load(client, name, names.pop(path, path), **given))

    for module in (async_grpo_trainer, async_distillation_trainer):
        module.save_lora_adapter = publish
        module.VLLMClient.load_lora_adapter = loading(module.VLLMClient.load_lora_adapter)


def _sends_adapter(generation: Any) -> bool:
    """Whether the server takes the adapter of the model alone. Every training process asks, and has the same answer."""
    if not hasattr(generation, "_sends_adapter"):
        from accelerate.utils import broadcast_object_list, is_peft_model

        answer: Any = False
        if is_peft_model(generation.model) and generation.accelerator.is_main_process:
            from trl.experimental.async_grpo.async_grpo_trainer import select_adapter_sync

            try:  # the server needs room for the adapter in use, and the next one
                info, settings = generation.vllm_client.get_server_info(), SimpleNamespace(max_staleness=0)
                answer = select_adapter_sync(info, generation.model, settings)
            except Exception as error:
                answer = error
        (generation._sends_adapter,) = broadcast_object_list([answer], from_process=0)
    if isinstance(generation._sends_adapter, Exception):
        raise generation._sends_adapter
    return bool(generation._sends_adapter)
