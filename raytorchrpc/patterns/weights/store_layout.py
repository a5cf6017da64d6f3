"""What a version of a store has: names, dtypes, global shapes, and the shards that each publisher has of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from raytorchrpc.calls.member import LocalMember
from raytorchrpc.errors import NotFound
from raytorchrpc.patterns.handle import Handle, run
from raytorchrpc.patterns.weights.names import check_fits
from raytorchrpc.patterns.weights.published import LAYOUT
from raytorchrpc.patterns.weights.publishers import look, publishers_of, sources_of
from raytorchrpc.patterns.weights.shards import Box
from raytorchrpc.patterns.weights.slices import Held, KnownLayout, Published, differing
from raytorchrpc.tensors.dtypes import DTYPE_NAMES, DTYPES

#: How many shards of a tensor are printed.
_SHOWN = 4


class PublishedShard(NamedTuple):
    """What one publisher has of a tensor.

    Attributes:
        publisher: the member's name.
        offset: the index of the first element in the global tensor.
        shape: how many elements there are in each dimension.
    """

    publisher: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class TensorLayout(NamedTuple):
    """One tensor of a version.

    Attributes:
        dtype: as it was published.
        shape: of the global tensor.
        shards: who has which part, sorted by publisher. Several may have the same elements.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    shards: tuple[PublishedShard, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the global tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, repr=False)
class StoreLayout(Mapping[str, TensorLayout]):
    """The tensors of one version by name, in the order of publishing: a read-only mapping. Picklable and hashable.

    Attributes:
        store: the store's name.
        version: the version that it describes.
        tensors: names and tensors.
    """

    store: str
    version: int
    tensors: tuple[tuple[str, TensorLayout], ...]

    @cached_property
    def _by_name(self) -> dict[str, TensorLayout]:
        return dict(self.tensors)

    def __getitem__(self, name: str) -> TensorLayout:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all global tensors."""
        return sum(tensor.nbytes for tensor in self.values())

    def empty(self, device: Any = None) -> dict[str, torch.Tensor]:
        """Return a whole tensor for each name, uninitialized, for ``pull`` or for building a model.

        Args:
            device: where; None: torch's default. On ``"meta"`` they take no memory.
        """
        return {name: torch.empty(each.shape, dtype=each.dtype, device=device) for name, each in self.items()}

    def __repr__(self) -> str:
        return (
            f"<raytorchrpc.StoreLayout of {self.store!r}: version {self.version}, {len(self)} tensors, "
            f"{self.nbytes:,} bytes>"
        )

    def __str__(self) -> str:
        """One line for each tensor."""
        names = sorted({shard.publisher for tensor in self.values() for shard in tensor.shards})
        by = f", published by {', '.join(names[:_SHOWN])}" if len(names) <= _SHOWN else f" of {len(names)} publishers"
        rows = [(name, DTYPE_NAMES[each.dtype], str(each.shape), _parts_of(each)) for name, each in self.items()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        head = f"version {self.version} of {self.store!r}: {len(self)} tensors, {self.nbytes:,} bytes{by}"
        return "\n  ".join([head, *lines])


def _parts_of(tensor: TensorLayout) -> str:
    """Who has which part, in a few words; nothing for a tensor that one publisher has."""
    if len(tensor.shards) == 1 and tensor.shards[0].shape == tensor.shape:
        return ""
    parts = [f"{Box(shard.offset, shard.shape)} {shard.publisher}" for shard in tensor.shards]
    more = f", and {len(parts) - _SHOWN} more" if len(parts) > _SHOWN else ""
    return ", ".join(parts[:_SHOWN]) + more


def describe(
    store: Handle, local: LocalMember, version: int | None, until: float, wait: Callable[[int, float], Any]
) -> StoreLayout:
    """Ask those who have a version (None: the newest) for its layout; see ``WeightStore.layout``.

    ``wait``: blocks until that version or a newer one is there.
    """

    def seconds_left() -> float:
        return max(0.0, until - time.monotonic())

    after = 0  # a publisher has lost this version, or retired it since
    while True:
        if version is None:
            wait(after + 1, seconds_left())
        committed = None if publishers_of(store) is None else look(store, local, version, seconds_left())()
        sources = sources_of(store, committed)
        chosen = version if committed is None else committed.version
        try:
            answers = [
                run(source._request(local, LAYOUT, (*source._address, chosen), seconds_left())) for source in sources
            ]
        except NotFound:
            if version is not None:
                raise
            after = 0 if committed is None else committed.version  # its home may just write the next one
            continue
        layouts = [KnownLayout(number, rows) for _, number, rows in answers]
        published = Published([source.home for source in sources], layouts)
        held = {name: published.held(name) for name in published.names}
        check_fits(store.name, [wrong for name, parts in held.items() if (wrong := differing(name, parts)) is not None])
        return StoreLayout(store.name, answers[0][0], tuple((name, _tensor(parts)) for name, parts in held.items()))


def _tensor(held: Sequence[Held]) -> TensorLayout:
    shape, boxes = held[0].slice.global_shape, [(one.publisher, one.slice.box) for one in held]
    shards = (PublishedShard(publisher, *box) for publisher, box in boxes if box.size or not math.prod(shape))
    return TensorLayout(DTYPES[held[0].slice.dtype], shape, tuple(shards))
