"""What the benchmarks of weights share: the shapes of models, and what their ends do with a store."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from benchmarks._harness import interleaved, timed

#: How a tensor parallel layer divides a weight: by rows, by columns, or not at all.
ROWS, COLUMNS, WHOLE = 0, 1, None


class Model(NamedTuple):
    """The shapes of a decoder."""

    name: str
    layers: int
    hidden: int
    inner: int
    queries: int
    keys: int
    vocabulary: int

    def weights(self) -> dict[str, tuple[tuple[int, ...], int | None]]:
        """Shapes by name, and how tensor parallelism divides them."""
        hidden, inner, queries, keys = self.hidden, self.inner, self.queries, self.keys
        of_layer: dict[str, tuple[tuple[int, ...], int | None]] = {
            "q": ((queries, hidden), ROWS), "k": ((keys, hidden), ROWS), "v": ((keys, hidden), ROWS),
            "o": ((hidden, queries), COLUMNS), "gate": ((inner, hidden), ROWS), "up": ((inner, hidden), ROWS),
            "down": ((hidden, inner), COLUMNS), "norm1": ((hidden,), WHOLE), "norm2": ((hidden,), WHOLE),
        }  # fmt: skip
        layers = {f"{layer}.{name}": weight for layer in range(self.layers) for name, weight in of_layer.items()}
        return {"embedding": ((self.vocabulary, hidden), ROWS), **layers}


TINY = Model("tiny", 1, 128, 256, 128, 128, 512)
#: Shapes like those of Qwen3, whose embedding is tied.
MODELS = (
    Model("0.02B", 8, 256, 768, 256, 256, 32_000),
    Model("0.6B", 28, 1024, 3072, 2048, 1024, 151_936),
    Model("8B", 36, 4096, 12_288, 4096, 1024, 151_936),
)


# --- what an end does: its model, by name, is ``end.model``, and the store ``end.store`` ------------------------------


def publish(end: Any) -> int:
    """Returns the version."""
    return int(end.store.publish(end.model))


def pull(end: Any, **options: Any) -> float:
    """Seconds of a pull."""
    return timed(lambda: end.store.pull(end.model, **options))


def pulls(end: Any, repeats: int) -> float:
    """Median milliseconds of so many pulls."""
    return statistics.median(pull(end) for _ in range(repeats)) * 1e3


def copies(end: Any, repeats: int) -> float:
    """Median milliseconds of a copy of each tensor within the end's device."""
    pairs = [(tensor.clone(), tensor) for tensor in tensors(end.model).values()]
    return interleaved({"copy": lambda: [target.copy_(source) for target, source in pairs]}, repeats, 1)["copy"]


def sums(end: Any) -> dict[str, float]:
    """The sum of each tensor, by name."""
    return {name: float(tensor.double().sum()) for name, tensor in tensors(end.model).items()}


def tensors(model: Any) -> dict[str, torch.Tensor]:
    """The tensors of a module, or of a dict of tensors or shards."""
    found: Mapping[str, Any] = model if isinstance(model, Mapping) else dict(model.named_parameters())
    return {name: getattr(value, "tensor", value).detach() for name, value in found.items()}


def size_of(model: Any) -> int:
    """Bytes."""
    return sum(tensor.nbytes for tensor in tensors(model).values())


def check_same(sent: Mapping[str, float], arrived: Mapping[str, float]) -> None:
    """Raise if the sums of what arrived are not those of what was sent."""
    for name, value in sent.items():
        if abs(value - arrived[name]) > 1e-6 * max(1.0, abs(value)):
            raise RuntimeError(f"{name!r} arrived changed: {value} became {arrived[name]}")
