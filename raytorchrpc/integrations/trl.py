"""Brings the weights of TRL's ``AsyncGRPOTrainer`` to a vLLM server: ``weight_transfer=RayTorchRpcWeightTransfer()``.

The first training process publishes each version once, and the server's workers pull it. They generate meanwhile, and
pause only while they pull. The server runs with ``--weight-transfer-config '{"backend": "raytorchrpc"}'``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import ray
import torch

import raytorchrpc as rtr
from raytorchrpc.integrations.engines import Progress
from raytorchrpc.integrations.versions import adapted_to

with adapted_to("trl"):
    from trl.experimental.async_grpo.vllm_client import VLLMClient


class RayTorchRpcWeightTransfer:
    """What ``AsyncGRPOTrainer(weight_transfer=...)`` takes. Every training process makes one; the first one uses it.

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
        timeout: float = 600,
    ) -> None:
        """Describe the transfer; does nothing yet.

        Args:
            server_url: of the server: ``AsyncGRPOConfig.vllm_server_base_url``.
            store: the name of the ``WeightStore`` in the training process.
            group: the name of the group that this process is in, or else forms.
            config: settings of the group that is formed. None: from the environment, and ``joinable_by="cluster"``.
            into: how the weights get into vLLM's model; see ``raytorchrpc.integrations.vllm.engine.InitInfo``.
            timeout: seconds for the server to start, and for each update.
        """
        self._server_url, self._store_name, self._into = server_url, store, into
        self.timeout = timeout
        """Seconds for the next update; may be changed between two."""
        self._group, self._config = group, config
        self._formed: rtr.Group | None = None
        self._store: rtr.WeightStore | None = None
        self._vllm = VLLMClient(server_url, timeout)

    def init_weight_transfer(self) -> None:
        """Become a member, and make the store. Blocks until the server is there.

        The server's workers find the store with the first update, which may be one that they began before this process
        was restarted.
        """
        self._vllm.wait_for_server_ready()
        self._become_member()
        self._store = rtr.WeightStore(self._store_name, keep=2)

    def pause(self) -> None:
        """Do nothing yet: the server generates until the weights are published."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Publish the weights, pause the server, and have its workers pull them. Blocks until they have them.

        A server that is started again meanwhile is updated, too. Raises RayTorchRpcError if the server fails, or does
        not answer in time; its text says whether the server's model has tensors of two versions.
        """
        if self._store is None:  # a second train() of this trainer, for which TRL initialises nothing
            self.init_weight_transfer()
        assert self._store is not None
        version = self._store.publish(iterator, timeout=self.timeout)
        progress = Progress(self.timeout)
        while True:
            try:
                return self._bring(version, progress)
            except Exception as error:
                with suppress(Exception):  # ranks that did not fail are still in the update
                    self._vllm.finish_weight_update(timeout=self.timeout)
                if isinstance(error, OSError) and progress.left():  # of requests: it is not there
                    with suppress(TimeoutError):
                        self._vllm.server_timeout = progress.left()
                        self._vllm.wait_for_server_ready()
                        continue
                raise rtr.RayTorchRpcError(
                    f"the vLLM server at {self._server_url} has not taken version {version} of {self._store_name!r}, "
                    f"and stays paused; it has to run with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config "
                    f'\'{{"backend": "raytorchrpc"}}\', in the Ray cluster of the training process or as its child: '
                    f"{error}"
                ) from error

    def _bring(self, version: int, progress: Progress) -> None:
        client = self._vllm
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

    def resume(self) -> None:
        """Have the server generate with the new weights."""
        self._vllm.resume(timeout=self.timeout)

    def destroy(self) -> None:
        """End the group, if it was formed here. Idempotent."""
        self._store, formed, self._formed = None, self._formed, None
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
