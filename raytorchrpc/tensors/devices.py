"""The notation for devices, a CUDA index or ``"cpu"``, and the check of a device map. Loads without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from raytorchrpc.errors import LaneUnavailable

CPU: Final = "cpu"

#: One side of an entry: a CUDA index, or the CPU.
Device = int | Literal["cpu"]


def check_mapped(tensors: Sequence[Any], peer: str, mapping: Mapping[Any, Device], lane: str) -> None:
    """Raise LaneUnavailable for a CUDA tensor that is not in the device map to ``peer`` (own -> its)."""
    for index in {tensor.get_device() for tensor in tensors if tensor.is_cuda}:
        if index not in mapping:
            shown = ", ".join(f"{_shown(local)} -> {_shown(target)}" for local, target in mapping.items()) or "empty"
            raise LaneUnavailable(
                lane,
                f"a tensor on cuda:{index} has no mapping to member {peer!r} (device map: {shown}); map it with "
                f"GroupConfig(device_maps=...), to a GPU or to 'cpu', give the peer's actor a GPU, or send "
                f"tensor.cpu()",
            )


def _shown(device: Device) -> str:
    return device if device == CPU else f"cuda:{device}"
