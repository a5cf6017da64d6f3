"""The tensors of a version before it is published: those of a model, or copies of those that an iterator yields."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Mapping
from typing import Any, TypeGuard

import torch

from raytorchrpc.errors import ConfigurationError
from raytorchrpc.patterns.weights.model_tensors import Model, resolved, shard_of, shards_of
from raytorchrpc.patterns.weights.shards import PlaceInWhole, Shard
from raytorchrpc.patterns.weights.snapshots import (
    CopyBytes,
    Layout,
    SnapshotPool,
    TensorSpec,
    VersionMemory,
    copy_tensors,
)
from raytorchrpc.tensors.cuda_streams import follow_streams
from raytorchrpc.tensors.dtypes import view_at

#: CPU memory that copies share. Smaller pieces do not always return to the system once they are unused (bytes).
_BUCKET, _ALIGN = 64 << 20, 64

#: Names and tensors, DTensors or Shards, one after the other.
Pairs = Iterable[tuple[str, Any]]


def are_pairs(given: Model | Pairs) -> TypeGuard[Pairs]:
    """Whether the argument of ``publish`` is an iterable of pairs, rather than a module or a mapping."""
    return isinstance(given, Iterable) and not isinstance(given, (torch.nn.Module, Mapping, torch.Tensor, str, bytes))


class Draft:
    """The tensors that a member publishes, by name. Used by one thread."""

    def __init__(self, store: str, is_sharded: bool) -> None:
        """``is_sharded``: others publish to the store, too."""
        self.store, self._is_sharded = store, is_sharded
        self.tensors: dict[str, torch.Tensor] = {}  # without autograd; their memory holds their elements
        self.places: dict[str, PlaceInWhole] = {}  # of shards
        self.layout: Layout | None = None
        self._pairs: Pairs | None = None
        self.memory: VersionMemory | None = None  # for tensors of ``layout``, of which some are copied already

    @property
    def has_copies(self) -> bool:
        """Whether its tensors are copies, of what an iterator yields."""
        return self._pairs is not None

    @property
    def nbytes(self) -> int:
        return sum([tensor.nbytes for tensor in self.tensors.values()])

    def take(self, model: Model | Pairs) -> None:
        """Take the tensors of a model, not copies of them; or pairs, for ``copy``. Raises ConfigurationError."""
        if are_pairs(model):
            self._pairs = model
            return
        shards = shards_of(model, self.store)
        self.tensors = {name: resolved(name, shard.tensor, self.store) for name, shard in shards.items()}
        for name, shard in shards.items():
            if not shard.is_whole:
                self._note_place(name, shard)

    def copy(self, pool: SnapshotPool, layout: Layout | None) -> None:
        """Copy the tensors of pairs one at a time, and keep none of those that are given. No effect on a model.

        ``layout``: of the version before. Tensors like those that it has go to memory of ``pool`` for all of it. Others
        get memory of their own. Raises ConfigurationError, and whatever the iterator raises; then nothing is left.
        """
        if (pairs := self._pairs) is None:
            return
        names = set[str]()
        known = {} if layout is None else {name: place for place, name in enumerate(layout.names)}
        copy = _Copy(pool.copy_bytes)
        try:
            for pair in pairs:
                name, shard = self._checked(pair, names)
                del pair
                names.add(name)
                if shard is not None:
                    if not shard.is_whole:
                        self._note_place(name, shard)
                    shard = shard._replace(tensor=resolved(name, shard.tensor, self.store))
                    self.tensors[name] = copy(self._memory_for(name, shard, pool, layout, known), shard.tensor)
                del shard  # before the next one is made
            if not names:
                raise ConfigurationError(
                    f"the iterable of weights for {self.store!r} has no tensors: was the iterator used before? Make a "
                    f"new one for each version"
                )
        except BaseException:
            self.tensors.clear()
            self.put_back(pool)
            raise
        finally:
            if isinstance(pairs, Generator):
                pairs.close()
        if layout is not None and self.tensors.keys() == known.keys():
            self.tensors = {name: self.tensors[name] for name in layout.names}

    def put_back(self, pool: SnapshotPool) -> None:
        """Return the memory of ``layout``, if there is any: no version is made of it."""
        if self.memory is not None and self.layout is not None:
            pool.put_back(self.layout.specs, self.memory)

    def _memory_for(
        self, name: str, shard: Shard, pool: SnapshotPool, layout: Layout | None, known: Mapping[str, int]
    ) -> torch.Tensor | None:
        """Where to copy a tensor; None: nowhere in particular."""
        spec = TensorSpec(shard.tensor.dtype, tuple(shard.tensor.shape), shard.tensor.device)
        if layout is None or (place := known.get(name)) is None or layout.specs[place] != spec:
            return None
        if self.memory is None:
            self.layout, self.memory = layout, pool.memory(layout.specs)
        self.memory.changed[place] = None
        return self.memory.tensors[place]

    def _note_place(self, name: str, shard: Shard) -> None:
        if not self._is_sharded:
            raise ConfigurationError(
                f"{name!r} of the weights for {self.store!r} is a shard: name all members that have shards, as in "
                f"WeightStore({self.store!r}, publishers=[...])"
            )
        self.places[name] = shard.global_shape, shard.offset

    def _checked(self, pair: Any, names: Collection[str]) -> tuple[str, Shard | None]:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], str):
            raise ConfigurationError(
                f"the weights for {self.store!r} have a {type(pair).__name__} where a pair (name, tensor) has to be"
            )
        name, value = pair
        if name in names:
            raise ConfigurationError(
                f"the weights for {self.store!r} have {name!r} twice: give each tensor a name once"
            )
        return name, shard_of(name, value, self.store)


class _Copy:
    """Copies one tensor after the other, on the streams that this thread has now.

    A generator that is suspended inside of ``torch.cuda.stream`` changes the current stream of its caller.
    """

    def __init__(self, copy_bytes: CopyBytes) -> None:
        is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        devices = range(torch.cuda.device_count()) if is_used else ()
        self._streams = {index: torch.cuda.current_stream(index) for index in devices}
        self._copy_bytes = copy_bytes
        self._bucket, self._begin = torch.empty(0, dtype=torch.uint8, device="cpu"), 0

    def __call__(self, target: torch.Tensor | None, source: torch.Tensor) -> torch.Tensor:
        stream = self._streams.get(source.get_device())
        if stream is None or torch.cuda.current_stream(source.device) == stream:
            return self._copied(target, source)
        follow = follow_streams([source.device])
        with torch.cuda.stream(stream):
            follow()
            copied = self._copied(target, source)
            follow_back = follow_streams([source.device])
        follow_back()  # the generator may write to its tensor next, or free it
        return copied

    def _copied(self, target: torch.Tensor | None, source: torch.Tensor) -> torch.Tensor:
        if target is None:
            with torch.inference_mode(False):
                target = self._memory(source)
        copy_tensors([target], [source], self._copy_bytes)
        return target

    def _memory(self, like: torch.Tensor) -> torch.Tensor:
        if not like.is_cpu:
            return torch.empty(like.shape, dtype=like.dtype, device=like.device)
        if self._begin + like.nbytes > self._bucket.nbytes:
            self._bucket, self._begin = torch.empty(max(_BUCKET, like.nbytes), dtype=torch.uint8, device="cpu"), 0
        begin, self._begin = self._begin, (self._begin + like.nbytes + _ALIGN - 1) & -_ALIGN
        return view_at(self._bucket, begin, (like.dtype, tuple(like.shape)))
