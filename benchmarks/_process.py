"""What the kernel reports about this process. Imports nothing, so that actors without torch can use it."""

from __future__ import annotations

import os


def smaps() -> dict[str, int]:
    """Bytes by field of ``smaps_rollup``, and ``Private``, the sum of the private fields."""
    with open("/proc/self/smaps_rollup") as file:
        lines = [line.split() for line in file if line.endswith("kB\n")]
    fields = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}
    return fields | {"Private": sum(size for field, size in fields.items() if field.startswith("Private_"))}


def footprint() -> dict[str, int]:
    """Private bytes and PSS (with a share of shared memory), and the number of descriptors, sockets and threads."""
    memory, targets = smaps(), []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            targets.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return {
        "private": memory["Private"],
        "pss": memory["Pss"],
        "descriptors": len(targets),
        "sockets": sum(target.startswith("socket:") for target in targets),
        "threads": len(os.listdir("/proc/self/task")),
    }
