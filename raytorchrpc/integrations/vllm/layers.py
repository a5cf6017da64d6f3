"""Brings a version layer by layer: into the parameters where vLLM leaves them alone, else as vLLM loads the layer."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from typing import Any

import torch

import raytorchrpc as rtr
from raytorchrpc.integrations.engines import Progress, divide
from raytorchrpc.integrations.recording import distinct
from raytorchrpc.integrations.vllm import UpdateStatus, internals
from raytorchrpc.integrations.vllm.placement import Layer, Placement, place
from raytorchrpc.integrations.vllm.updates import Target, Update
from raytorchrpc.process import threads


def plan(target: Target, layout: Any, into: str, group_bytes: int) -> Update:
    """The update of a model. Raises NoPlan, and ConfigurationError if ``into`` or the layout does not suit it."""
    placement = place(target.model, layout)
    processed = [layer for layer in placement.layers if layer.processed or into == "layers"]
    if into == "parameters" and processed:
        first = processed[0]
        raise rtr.ConfigurationError(f"into='parameters' is impossible for {first.name!r}: {first.processed}")
    return LayeredUpdate(target, placement, processed, group_bytes)


class LayeredUpdate(Update):
    """Pulls what each layer needs, and has vLLM process those layers that its kernels do not read as loaded."""

    def __init__(self, target: Target, placement: Placement, processed: Sequence[Layer], group_bytes: int) -> None:
        self._target, self._placement, store = target, placement, target.store
        direct = [layer for layer in placement.layers if layer not in processed]
        self._direct = _Group(direct, store) if direct else None
        self._groups = [_Group(each, store) for each in divide(processed, lambda layer: layer.nbytes, group_bytes)]
        sizes = {"parameters": sum(layer.nbytes for layer in direct), "layers": sum(each.nbytes for each in processed)}
        why = next((layer.processed for layer in processed if layer.processed), "as asked" if processed else "")
        into = "layers" if processed else "parameters"
        self.status = UpdateStatus(into, why, {way: size for way, size in sizes.items() if size})

    def bring(self, version: int, progress: Progress) -> None:
        """See ``Update``."""
        if self._direct is not None:
            with progress.phase("pull"):
                self._direct.pull(self._direct.targets(), version, progress.left())
            progress.has_written = True
        if self._groups:
            self._bring_processed(version, progress)
        with progress.phase("process"):
            for module in self._placement.sharing:
                module.quant_method.process_weights_after_loading(module)  # type: ignore[union-attr, operator]
            for module in self._placement.attention:
                module.process_weights_after_loading(self._target.config.dtype)  # type: ignore[operator]

    def _bring_processed(self, version: int, progress: Progress) -> None:
        """Pull each group while vLLM processes the one before."""
        pulling: Future[None] | None = None
        try:
            for number, group in enumerate(self._groups):
                pulling = pulling or self._start(group, version, progress)
                with progress.phase("pull"):
                    pulling.result()
                pulling, progress.has_written = None, True
                if number + 1 < len(self._groups):
                    pulling = self._start(self._groups[number + 1], version, progress)
                with progress.phase("process"):
                    for layer in group.layers:
                        internals.process(layer.module)
        finally:
            if pulling is not None:
                pulling.exception()  # until then its thread writes to the layers
            for group in self._groups:
                group.put_back()

    def _start(self, group: _Group, version: int, progress: Progress) -> Future[None]:
        """Begin to pull a group, on a thread."""
        device, left, done = self._target.device, progress.left(), Future[None]()
        with progress.phase("prepare"):
            targets = group.take_out(device)
        stream: AbstractContextManager[Any] = nullcontext()
        if device.type == "cuda":  # copies are queued where the layers are processed
            stream = torch.cuda.stream(torch.cuda.current_stream(device))

        def pull() -> None:
            try:
                with stream:
                    group.pull(targets, version, left)
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        threads.start(pull, name="raytorchrpc-vllm-pull")
        return done


class _Group:
    """Layers that are pulled together."""

    def __init__(self, layers: Sequence[Layer], store: rtr.WeightStore) -> None:
        self.layers = layers
        self._store = copy(store)  # each remembers how its own pulls go
        self._names, self._mapping = distinct([part.copied.source for layer in layers for part in layer.parts])

    def take_out(self, device: torch.device) -> dict[str, rtr.Shard]:
        """Give the layers memory to load into; returns where the tensors go."""
        for layer in self.layers:
            internals.take_out(layer.module, device, layer.kept)
        return self.targets()

    def targets(self) -> dict[str, rtr.Shard]:
        """Where the tensors go now."""
        found = []
        for layer in self.layers:
            for name, view in layer.zeros:
                view.of(getattr(layer.module, name).data).zero_()
            found += [part.shard(getattr(layer.module, part.parameter)) for part in layer.parts]
        return dict(zip(self._names, found, strict=True))

    def pull(self, targets: dict[str, rtr.Shard], version: int, timeout: float) -> None:
        """Fill the targets. Blocks."""
        mapping = self._mapping or None
        self._store.pull(targets, version, mapping=mapping, only=self._names, convert=True, timeout=timeout)

    def put_back(self) -> None:
        """Have the layers as they were, if they were not processed."""
        for layer in self.layers:
            internals.put_back(layer.module)
