"""Actors of somebody who has never heard of raytorchrpc. This module must not import it."""

from __future__ import annotations

import os
import tempfile
from typing import Any


class Plain:
    def double(self, x: Any) -> Any:
        return x * 2

    def pid(self) -> int:
        return os.getpid()


class PlainAsync:
    async def double(self, x: Any) -> Any:
        return x * 2


class FailsToStart:
    def __init__(self) -> None:
        self._weights = [self._load()]  # Python marks this part of the line in a traceback

    def _load(self) -> Any:
        raise ValueError("the checkpoint is missing")

    def double(self, x: Any) -> Any:
        return x * 2


class RunsItsOwnRpc:
    """Uses torch.distributed.rpc on its own, which allows one agent per process."""

    def begin(self) -> None:
        import torch.distributed.rpc as rpc

        self._folder = tempfile.TemporaryDirectory()
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{self._folder.name}/rendezvous")
        rpc.init_rpc("mine", rank=0, world_size=1, rpc_backend_options=options)

    def end(self) -> None:
        import torch.distributed.rpc as rpc

        rpc.shutdown()
        self._folder.cleanup()
