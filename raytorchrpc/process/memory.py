"""The memory that this process may use."""

from __future__ import annotations

import os


def default_capacity() -> int:
    """Return a quarter of the memory that this process may use (physical, or its control group's limit), in bytes."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/sys/fs/cgroup/memory.max") as file:
            text = file.read().strip()
        total = min(total, int(text)) if text.isdigit() else total
    except OSError:
        pass  # no control group here
    return max(64 << 20, total // 4)
