"""The models whose weights the benchmarks move."""

from __future__ import annotations

from typing import NamedTuple

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
