"""Brings a version layer by layer: into the parameters where vLLM leaves them alone, else as vLLM loads the layer.

Where the tensors of a checkpoint go is recorded once, from what vLLM's own loaders do with meta tensors.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from typing import Any, NamedTuple

import torch

import raytorchrpc as rtr
from raytorchrpc.integrations.engines import Progress, check_layout, divide
from raytorchrpc.integrations.recording import Copy, NoPlan, Parts, Recorder, View, check_filled, memory_of, record
from raytorchrpc.integrations.vllm import internals
from raytorchrpc.process import threads


class Layer(NamedTuple):
    """One module, and what its own parameters and buffers are made of."""

    module: torch.nn.Module
    name: str
    parts: Sequence[tuple[str, Copy]]
    """What goes into its tensors, with their names."""
    zeros: Sequence[tuple[str, View]]
    """What the loaders fill with zeros, as rows that pad a vocabulary."""
    kept: Sequence[str]
    """Its tensors that the loaders leave as they are."""
    nbytes: int
    processed: str | None
    """What vLLM makes of it after loading; None: it leaves it as it was loaded."""

    def fill_padding(self) -> None:
        """As the loaders do; also where nothing was taken out, as vLLM may have discarded the weights in its sleep."""
        for name, view in self.zeros:
            view.of(getattr(self.module, name).data).zero_()

    def targets(self) -> Iterable[rtr.Shard]:
        """Where its parts go now, in its tensors."""
        return [copied.shard(getattr(self.module, name).data) for name, copied in self.parts]


class LayeredUpdate:
    """Pulls what each layer needs, and has vLLM process those layers that its kernels do not read as loaded."""

    def __init__(self, engine: Any, store: rtr.WeightStore, layout: Any, into: str, group_bytes: int) -> None:
        """Plan the updates of a model; nothing moves.

        Args:
            engine: has the model, its configuration and its device.
            store: where the tensors come from.
            layout: of a version of this store.
            into, group_bytes: see ``InitInfo``.

        Raises:
            NoPlan: the loaders do more than to copy tensors.
            ConfigurationError: ``into`` is impossible, or the published tensors are not those of the model.
        """
        self._store = store
        self._engine, self._modules = engine, {module: name for name, module in engine.model.named_modules()}
        layers, self._sharing = _layers_of(engine.model, self._modules, layout)
        attention = filter(internals.is_attention, self._modules)
        self._attention = [module for module in attention if internals.reads_weights(module)]
        processed = [layer for layer in layers if layer.processed or into == "layers"]
        if into == "parameters" and processed:
            first = processed[0]
            raise rtr.ConfigurationError(f"into='parameters' is impossible for {first.name!r}: {first.processed}")
        direct = [layer for layer in layers if layer not in processed]
        self._groups = [_Group(direct, store, loads=False)] if direct else []
        for each in divide(processed, lambda layer: layer.nbytes, group_bytes):
            self._groups.append(_Group(each, store, loads=True))
        ways = {"in its parameters": direct, "layer by layer": processed}
        sizes = {way: sum(layer.nbytes for layer in chosen) / 1e6 for way, chosen in ways.items() if chosen}
        why = next((layer.processed for layer in processed if layer.processed), "as asked" if processed else None)
        self.how = " and ".join(f"{way} ({size:,.1f} MB)" for way, size in sizes.items()) + (f": {why}" if why else "")

    def bring(self, version: int, progress: Progress) -> None:
        """Bring a version into the model, pulling each group while vLLM processes the one before. Blocks."""
        if len(self._groups) > 1:  # else the one pull writes nothing that it refuses
            check_layout("vLLM", self._engine.model, self._store.layout(version, timeout=progress.left()))
        pulling: Future[None] | None = None
        try:
            for group, following in itertools.zip_longest(self._groups, self._groups[1:]):
                pulling = pulling or self._start(group, version, progress)
                pulling.result()
                progress.has_written = True
                pulling = self._start(following, version, progress) if following else None
                for layer in group.taken_out:
                    internals.process(layer.module)
        finally:
            if pulling is not None:
                pulling.exception()  # until then its thread writes to the layers
            for group in self._groups:
                for layer in group.taken_out:
                    internals.put_back(layer.module)
        for module in self._sharing:
            module.quant_method.process_weights_after_loading(module)  # type: ignore[union-attr, operator]
        for module in self._attention:
            module.process_weights_after_loading(self._engine.model_config.dtype)

    def _start(self, group: _Group, version: int, progress: Progress) -> Future[None]:
        """Begin to pull a group, on a thread."""
        device, seconds, done = self._engine.device, progress.left(), Future[None]()
        for layer in group.taken_out:
            internals.take_out(layer.module, device, layer.kept)
        targets = group.targets()
        stream: AbstractContextManager[Any] = nullcontext()
        if device.type == "cuda":  # copies are queued where the layers are processed
            stream = torch.cuda.stream(torch.cuda.current_stream(device))

        def pull() -> None:
            with stream:
                group.pull(targets, version, seconds)

        threads.start(threads.settle, done, pull, name="raytorchrpc-vllm-pull")
        return done


class _Group:
    """Layers that are pulled together."""

    def __init__(self, layers: Sequence[Layer], store: rtr.WeightStore, loads: bool) -> None:
        self._layers, self.taken_out = layers, layers if loads else ()
        """Which vLLM loads and processes, instead of reading them as they are."""
        self._store = copy(store)  # each remembers how its own pulls go
        self._memory: Sequence[int] = ()
        self._targets: Sequence[rtr.Shard] = ()
        """Of layers that are not taken out: the last ones, and where these were."""
        self._parts = Parts(copied.source for layer in layers for _, copied in layer.parts)

    def targets(self) -> Sequence[rtr.Shard]:
        """Where the tensors go now. Layers that are not taken out stay where they are, unless vLLM moves them."""
        for layer in self._layers:
            layer.fill_padding()
        if self.taken_out:
            return [shard for layer in self._layers for shard in layer.targets()]
        memory = [getattr(layer.module, name).data_ptr() for layer in self._layers for name, _ in layer.parts]
        if memory != self._memory:
            self._memory, self._targets = memory, [shard for layer in self._layers for shard in layer.targets()]
        return self._targets

    def pull(self, targets: Sequence[rtr.Shard], version: int, timeout: float) -> None:
        """Fill the targets. Blocks."""
        self._parts.pull(self._store, targets, version, timeout)


def _layers_of(
    model: torch.nn.Module, names: Mapping[torch.nn.Module, str], layout: Any
) -> tuple[list[Layer], list[torch.nn.Module]]:
    """The layers that a checkpoint has something for, in the order of the model, which stays as it is.

    And the modules that share memory with these, and have to be processed again after them. ``names``: of all modules.

    Raises NoPlan, and ConfigurationError if the model has no place for a tensor, or lacks some.
    """
    with internals.as_loaded(model):
        there = {module: internals.tensors_of(module) for module in names}
        in_use = {module: internals.tensors_in_use(module) for module in names}
        recorded = record("vLLM", model, layout, [tensor for tensors in there.values() for tensor in tensors.values()])
    owners = {
        memory_of(tensor): (module, name) for module, tensors in there.items() for name, tensor in tensors.items()
    }
    parts, zeros = defaultdict[Any, list[tuple[str, Copy]]](list), defaultdict[Any, list[tuple[str, View]]](list)
    for to, copied in recorded.copies:
        module, name = owners[memory_of(to)]
        parts[module].append((name, copied))
    for to, view in recorded.zeros:
        module, name = owners[memory_of(to)]
        zeros[module].append((name, view))
    layers = []
    for module in names:
        if not (copies := parts.get(module)):
            continue
        if internals.is_attention(module):
            raise NoPlan(f"{copies[0][1].source!r} is a scale of {names[module]}, which vLLM loads with the attention")
        loaded, used = there[module], in_use[module]
        changed = [name for name in loaded if not _is_like(loaded[name], used.get(name))]
        kept = [name for name in loaded if not recorded.filled[memory_of(loaded[name])]]
        if not set(changed).isdisjoint(kept):
            raise NoPlan(f"vLLM makes {kept} of {names[module]!r} of other tensors")
        processed = internals.why_processed(module)
        if changed and processed is None:
            processed = f"vLLM changes the layout of {changed[0]!r} after loading"
        size = sum(math.prod(copied.to.shape) * loaded[name].itemsize for name, copied in copies)
        layers.append(Layer(module, names[module], copies, zeros[module], kept, size, processed))
    check_filled("vLLM", model, layout, _lacking(recorded, there, in_use, names))
    planned = {memory_of(tensor) for layer in layers for tensor in in_use[layer.module].values() if tensor.numel()}
    sharing = [
        module
        for module in names
        if module not in parts
        and any(memory_of(tensor) in planned for tensor in in_use[module].values())
        and internals.why_processed(module)
    ]
    return layers, sharing


def _is_like(loaded: torch.Tensor, in_use: torch.Tensor | None) -> bool:
    """Whether a tensor that the kernels read has the layout of the one that the loaders fill."""
    same = (loaded.shape, loaded.dtype, loaded.stride())
    return in_use is not None and (in_use.shape, in_use.dtype, in_use.stride()) == same


def _lacking(
    recorded: Recorder,
    there: Mapping[torch.nn.Module, internals.Tensors],
    in_use: Mapping[torch.nn.Module, internals.Tensors],
    names: Mapping[torch.nn.Module, str],
) -> list[str]:
    """The parameters that nothing fills, or not all of them."""
    lacking, shared = [], set()
    for module, tensors in there.items():
        for name, tensor in tensors.items():
            filled, used = recorded.filled[memory_of(tensor)], in_use[module].get(name)
            if filled and used is not None and used.numel():
                shared.add(memory_of(used))
            if (
                isinstance(tensor, torch.nn.Parameter)
                and not internals.is_attention(module)
                and filled < tensor.numel()
            ):
                lacking.append((f"{names[module]}.{name}", used if not filled else None))
    return [name for name, used in lacking if used is None or not used.numel() or memory_of(used) not in shared]
