"""What SGLang does in an update of its weights, on a CPU: its own engine needs a GPU.

``Engine`` has the methods of ``sglang.Engine``, and its ranks are children that it starts as SGLang does. They keep a
session between begin and end, and call a custom loader, in the steps of SGLang's ``SchedulerWeightUpdaterManager`` and
``WeightUpdater``. As there, what a loader raises ends the engine. The model has fused and divided parameters, and
loaders in the manner of SGLang's linear layers. tests/integrations/test_sglang.py compares signatures.
"""

from __future__ import annotations

import importlib
import io
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
from collections.abc import Iterable
from importlib import metadata
from importlib.util import find_spec
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import raytorchrpc as rtr

QKV = {"q_proj": 0, "k_proj": 1, "v_proj": 2}


class Layer(torch.nn.Module):
    def __init__(self, hidden: int, rank: int, ranks: int) -> None:
        super().__init__()
        self.rank, self.part = rank, hidden // ranks
        self.qkv_proj = torch.nn.Parameter(torch.zeros(3 * self.part, hidden), requires_grad=False)
        self.o_proj = torch.nn.Parameter(torch.zeros(hidden, self.part), requires_grad=False)
        self.norm = torch.nn.Parameter(torch.zeros(hidden), requires_grad=False)
        self.qkv_proj.weight_loader = self.load_fused
        self.o_proj.weight_loader = self.load_divided

    def load_fused(self, parameter: Any, loaded: torch.Tensor, which: int) -> None:
        target = parameter.data.narrow(0, which * self.part, self.part)
        target.copy_(loaded.narrow(0, self.rank * self.part, self.part))

    def load_divided(self, parameter: Any, loaded: torch.Tensor) -> None:
        parameter.data.copy_(loaded.narrow(1, self.rank * self.part, self.part))


class Model(torch.nn.Module):
    """Of one rank. ``computes``: its loader needs the values of the tensors."""

    def __init__(self, hidden: int, layers: int, rank: int, ranks: int, computes: bool) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(hidden, rank, ranks) for _ in range(layers))
        self.computes, self.derived = computes, torch.zeros(hidden)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        there = dict(self.named_parameters())
        for name, tensor in weights:
            if self.computes and not bool(tensor.isfinite().all()):
                raise ValueError(f"{name} has no finite values")
            layer, _, last = name.removesuffix(".weight").rpartition(".")
            parameter = there.get(f"{layer}.{'qkv_proj' if last in QKV else last}")
            if parameter is None:
                continue  # as in SGLang
            if last in QKV:
                parameter.weight_loader(parameter, tensor, QKV[last])
            else:
                getattr(parameter, "weight_loader", lambda its, loaded: its.data.copy_(loaded))(parameter, tensor)
        self.post_load_weights()

    def post_load_weights(self) -> None:
        self.derived = self.layers[0].norm + 1


def checkpoint(hidden: int, layers: int, seed: int) -> dict[str, torch.Tensor]:
    """The tensors of a whole model, by their names in a checkpoint."""
    torch.manual_seed(seed)
    found = {}
    for layer in range(layers):
        for name in (*QKV, "o_proj"):
            found[f"layers.{layer}.{name}.weight"] = torch.randn(hidden, hidden)
        found[f"layers.{layer}.norm.weight"] = torch.randn(hidden)
    return found


class Rank:
    """What a scheduler process of SGLang keeps of its updates."""

    def __init__(self, model: Model, loaders: list[str]) -> None:
        self.model, self.loaders, self.has_session, self.dies = model, loaders, False, False

    def begin_weight_update(self) -> tuple[bool, str]:
        if self.has_session:
            return False, "a weight-update session is already open; call end_weight_update() first"
        self.has_session = True
        return True, "Success"

    def end_weight_update(self) -> tuple[bool, str]:
        if not self.has_session:
            return False, "no weight-update session is open; call begin_weight_update() first"
        self.has_session = False
        return True, "Success"

    def update_weights_from_tensor(self, sent: bytes, load_format: str | None) -> tuple[bool, str]:
        if not self.has_session:
            return False, "update_weights_from_tensor must run between begin_weight_update() and end_weight_update()"
        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        named_tensors = [(name, tensor.to("cpu")) for name, tensor in pickle.loads(sent)]
        if load_format in self.loaders:
            module, _, name = load_format.rpartition(".")
            getattr(importlib.import_module(module), name)(self.model, named_tensors)
        elif load_format is None:
            self.model.load_weights(named_tensors)
        else:
            raise NotImplementedError(f"Unknown load_format={load_format}")
        dist.barrier()
        return True, "Success"

    def state(self) -> dict[str, torch.Tensor]:
        found = {name: its.data.clone() for name, its in self.model.named_parameters()}
        return {**found, "derived": self.model.derived}

    def die_in_next_update(self) -> None:
        self.dies = True

    def fail_in_next_pull(self) -> None:
        """As if the trainer was lost while tensors arrive."""
        pull = rtr.WeightStore.pull

        def fail(*_: Any, **__: Any) -> int:
            rtr.WeightStore.pull = pull
            raise rtr.PeerLost("trainer", "the test says so", True)

        rtr.WeightStore.pull = fail


def run_rank(pipe: Any, rank: int, ranks: int, meeting: str, loaders: list[str], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    if find_spec("sglang") is None:  # which the tests of kills do without
        metadata.version = lambda _: "0.5.23"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    its = Rank(Model(*arguments[:2], rank, ranks, *arguments[2:]), loaders)
    pipe.send(None)
    while True:
        name, args = pipe.recv()
        pipe.send(getattr(its, name)(*args))


def _serialized(named_tensors: list[tuple[str, torch.Tensor]]) -> bytes:
    """For one rank: what is in shared memory can be opened once."""
    file = io.BytesIO()
    ForkingPickler(file).dump(named_tensors)
    return file.getvalue()


class Engine:
    """With the methods of ``sglang.Engine`` that bring weights."""

    def __init__(
        self,
        *,
        tp_size: int = 1,
        custom_weight_loader: list[str],
        hidden: int = 64,
        layers: int = 2,
        computes: bool = False,
        sessions: bool = True,
    ) -> None:
        """``sessions``: False: as an older SGLang, which has no begin and end of an update."""
        start = multiprocessing.get_context("spawn")
        meeting = tempfile.mktemp(prefix="ranks-")
        self._pipes, self._ranks, self._lock = [], [], threading.Lock()
        self.flushes_refused = self.flushes = 0
        for rank in range(tp_size):
            pipe, other = start.Pipe()
            args = (other, rank, tp_size, meeting, custom_weight_loader, (hidden, layers, computes))
            self._ranks.append(start.Process(target=run_rank, args=args, daemon=True))
            self._ranks[-1].start()
            other.close()
            self._pipes.append(pipe)
        for pipe in self._pipes:
            pipe.recv()
        if not sessions:
            self.begin_weight_update()
            vars(self).update(begin_weight_update=None, end_weight_update=None)

    def tell(self, name: str, *args: Any) -> list[Any]:
        """Call a method of all ranks."""
        return self._tell_each([(name, args)] * len(self._pipes))

    def _tell_each(self, calls: list[tuple[str, tuple[Any, ...]]]) -> list[Any]:
        """If a rank has ended, so does this process, as under SGLang's watchdog."""
        try:
            with self._lock:
                for pipe, call in zip(self._pipes, calls, strict=True):
                    pipe.send(call)
                return [pipe.recv() for pipe in self._pipes]
        except (EOFError, OSError):
            self._end()
            raise

    def kill(self) -> None:
        for process in self._ranks:
            process.kill()
            process.join()

    def _end(self) -> None:
        self.kill()
        os.kill(os.getpid(), signal.SIGKILL)

    def flush_cache(self) -> SimpleNamespace:
        """``flushes_refused``: as SGLang does while requests run, and for a moment after the last answer."""
        success = not self.flushes_refused
        self.flushes_refused -= not success
        self.flushes += success
        return SimpleNamespace(success=success)

    def begin_weight_update(self, selector: str = "all") -> tuple[bool, str]:
        return self._merged(self.tell("begin_weight_update"))

    def end_weight_update(self) -> tuple[bool, str]:
        return self._merged(self.tell("end_weight_update"))

    def update_weights_from_tensor(
        self, named_tensors: list[tuple[str, torch.Tensor]], load_format: str | None = None, flush_cache: bool = True
    ) -> tuple[bool, str]:
        calls = [("update_weights_from_tensor", (_serialized(named_tensors), load_format)) for _ in self._pipes]
        answer = self._merged(self._tell_each(calls))
        if flush_cache and not self.flush_cache().success:
            self._end()  # by an assertion of SGLang 0.5.17
        return answer

    @staticmethod
    def _merged(answers: list[tuple[bool, str]]) -> tuple[bool, str]:
        return all(success for success, _ in answers), " | ".join(message for _, message in answers)


class Holder:
    """An actor with an engine, as a user writes it."""

    def __init__(self, **options: Any) -> None:
        from raytorchrpc.integrations.sglang import LOADER

        self.engine = Engine(**{"custom_weight_loader": [LOADER], **options})

    def connect(self, store: str = "policy", **options: Any) -> None:
        from raytorchrpc.integrations.sglang import Updates

        self.updates = Updates(self.engine, store, **options)

    def bring(self, version: int | None = None, **options: Any) -> int:
        return int(self.updates.bring(version, **options))

    def refuse_flushes(self, count: int) -> None:
        self.engine.flushes_refused, self.engine.flushes = count, 0

    def flushes(self) -> int:
        return self.engine.flushes

    def states(self) -> list[dict[str, torch.Tensor]]:
        return self.engine.tell("state")

    def tell(self, name: str) -> None:
        self.engine.tell(name)


class Publisher:
    """An actor that publishes checkpoints."""

    def __init__(self, hidden: int = 64, layers: int = 2) -> None:
        self.size = hidden, layers

    def publish(self, seed: int, store: str = "policy", rename: str = "", dtype: str = "float32") -> int:
        weights = rtr.WeightStore(store, keep=2)
        pairs = ((rename + name, its.to(getattr(torch, dtype))) for name, its in checkpoint(*self.size, seed).items())
        return int(weights.publish(pairs))
