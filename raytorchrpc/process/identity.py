"""What tells this process from all others, and the state of others of this host."""

from __future__ import annotations

import os

unique = ""
"""Of this process alone: 16 characters. A forked child has another one, so read it each time."""


def _renew() -> None:
    global unique
    unique = os.urandom(8).hex()


_renew()
os.register_at_fork(after_in_child=_renew)


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
