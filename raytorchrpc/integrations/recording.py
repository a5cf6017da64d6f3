"""Records what the loaders of an engine's model do with the tensors of a checkpoint, so that nothing moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from raytorchrpc import ConfigurationError, Shard, WeightStore
from raytorchrpc._compat import torch_internals

#: Converting to or from these keeps the values, but for rounding.
_PLAIN = {torch.float32, torch.bfloat16, torch.float16, torch.float64}


class NoPlan(Exception):
    """The model's loaders do more with a tensor than to copy parts of it. Never leaves the integrations."""


class View(NamedTuple):
    """A part of a tensor's memory, in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.as_strided(self.shape, self.strides, tensor.storage_offset() + self.offset)


class Copy(NamedTuple):
    """A box of one tensor of the checkpoint, and where in a parameter it goes."""

    source: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    to: View

    def shard(self, parameter: torch.Tensor) -> Shard:
        """The part of a parameter's memory, as a pull fills it."""
        return Shard(self.to.of(parameter), self.global_shape, self.offset)


def box_of(base: torch.Tensor, view: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], list[int | None]]:
    """Which box of a contiguous tensor a view of it shows: offset, shape, and the view's dimension for each of its own.

    Raises NoPlan if the view transposes or flattens dimensions.
    """
    rest, offset = view.storage_offset(), []
    for step in base.stride():
        offset.append(rest // step if step else 0)
        rest = rest % step if step else rest
    shown = [dimension for dimension, extent in enumerate(view.shape) if extent != 1]
    shape, dimensions = list[int](), list[int | None]()
    for extent, step, first in zip(base.shape, base.stride(), offset, strict=True):
        if shown and view.stride(shown[0]) == step and first + view.shape[shown[0]] <= extent:
            dimensions.append(shown.pop(0))
            shape.append(view.shape[dimensions[-1] or 0])
        else:
            dimensions.append(None)
            shape.append(1 if base.numel() else extent)
    if shown or rest:
        raise NoPlan("it transposes or reshapes it")
    return tuple(offset), tuple(shape), dimensions


class Recorder(torch_internals.DispatchMode):
    """Notes what is copied from the tensors of a checkpoint, which are meta tensors, and to where, instead of it.

    Fills of the model's tensors with zeros are noted too.
    """

    def __init__(self, checkpoint: Mapping[str, torch.Tensor], own: Iterable[torch.Tensor]) -> None:
        """``own``: the tensors of the model."""
        super().__init__()
        self._sources = {memory_of(tensor): (name, tensor) for name, tensor in checkpoint.items()}
        self.filled = dict.fromkeys(map(memory_of, own), 0)
        """Elements that were filled, by the memory of the model's tensors."""
        self.copies: list[tuple[torch.Tensor, Copy]] = []
        """To where, and what."""
        self.zeros: list[tuple[torch.Tensor, View]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self._copy(*args[:2])
            return args[0]
        if func is torch.ops.aten.zero_.default or (func is torch.ops.aten.fill_.Scalar and args[1] == 0):
            to = args[0]
            if memory_of(to) in self.filled:
                self.filled[memory_of(to)] += to.numel()
                self.zeros.append((to, View(tuple(to.shape), to.stride(), to.storage_offset())))
                return to
        return func(*args, **(kwargs or {}))

    def _copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        known = self._sources.get(memory_of(source)) if source.is_meta else None
        if known is None:
            raise NoPlan("a loader computes with the checkpoint's tensors")
        name, base = known
        if memory_of(to) not in self.filled:
            raise NoPlan(f"a loader copies {name!r} to a tensor of its own")
        if to.shape != source.shape:
            raise NoPlan(f"a loader reshapes {name!r}")
        if to.dtype != source.dtype and not {to.dtype, source.dtype} <= _PLAIN:
            raise ConfigurationError(
                f"{name!r} is {source.dtype} as published, and the engine's model loads it as {to.dtype}, so the model "
                f"is quantised: publish the tensors of its quantised checkpoint, with their scales"
            )
        try:
            offset, shape, dimensions = box_of(base, source)
        except NoPlan as error:
            raise NoPlan(f"a loader changes {name!r}: {error}") from None
        strides = tuple(1 if dimension is None else to.stride(dimension) for dimension in dimensions)
        view = View(shape, strides, int(to.storage_offset()))
        self.filled[memory_of(to)] += to.numel()
        self.copies.append((to, Copy(name, tuple(base.shape), offset, view)))


def record(engine: str, model: Any, layout: Any, own: Iterable[torch.Tensor]) -> Recorder:
    """Have a model's loaders load the tensors of a store, without memory. ``own``: the tensors of the model.

    Raises NoPlan, and ConfigurationError if the model has no place for a tensor.
    """
    meta = layout.empty("meta")
    recorder = Recorder(meta, own)
    try:
        with torch.no_grad(), recorder:
            model.load_weights(meta.items())
    except ConfigurationError:
        raise
    except (KeyError, AssertionError, ValueError) as error:
        raise ConfigurationError(
            f"{engine}'s {type(model).__name__} cannot load the weights of {layout.store!r} ({type(error).__name__}: "
            f"{error}): publish them under the names, and in the shapes, of the model's Hugging Face checkpoint"
        ) from error
    except (NotImplementedError, RuntimeError) as error:  # of torch: there is no such thing on the meta device
        raise NoPlan(f"a loader needs the values of the checkpoint's tensors: {error}") from error
    return recorder


def check_filled(engine: str, model: Any, layout: Any, lacking: Sequence[str]) -> None:
    """Raise ConfigurationError if there are parameters that nothing fills, or not all of them."""
    if lacking:
        more = f" and {len(lacking) - 5} more" if len(lacking) > 5 else ""
        raise ConfigurationError(
            f"the weights of {layout.store!r} do not fill {', '.join(map(repr, lacking[:5]))}{more} of {engine}'s "
            f"{type(model).__name__}: publish all tensors of its Hugging Face checkpoint, under their names there"
        )


def memory_of(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


class Parts:
    """Parts of the tensors of a store that are pulled together: always the same ones, in the same order."""

    def __init__(self, sources: Iterable[str]) -> None:
        """``sources``: which tensor each part is of."""
        self._names, self._mapping, times = list[str](), dict[str, str](), Counter[str]()
        for source in sources:
            times[source] += 1
            self._names.append(source if times[source] == 1 else f"{source} ({times[source]})")
            if times[source] > 1:  # one tensor goes to several places
                self._mapping[self._names[-1]] = source

    def pull(self, store: WeightStore, targets: Iterable[Shard], version: int, timeout: float) -> None:
        """Fill where each part goes. Blocks."""
        model, mapping = dict(zip(self._names, targets, strict=True)), self._mapping or None
        store.pull(model, version, mapping=mapping, only=self._names, convert=True, timeout=timeout)
