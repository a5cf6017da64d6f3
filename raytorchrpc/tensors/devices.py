"""The notation for devices: a CUDA index, or ``"cpu"``."""

from __future__ import annotations

from typing import Final, Literal

CPU: Final = "cpu"

#: One side of an entry: a CUDA index, or the CPU.
Device = int | Literal["cpu"]
