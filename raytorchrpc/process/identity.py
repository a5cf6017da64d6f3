"""The state of other processes of this host."""

from __future__ import annotations


def has_ended(pid: int) -> bool:
    """Whether the process with this pid, which existed before, has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state = file.read().rpartition(b")")[2].split()[0]
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return state in (b"Z", b"X")
