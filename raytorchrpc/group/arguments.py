"""Checks the arguments of ``Group`` and ``init_group``."""

from __future__ import annotations

from typing import Any

from raytorchrpc.calls.options import MAX_TIMEOUT_S
from raytorchrpc.errors import ConfigurationError


def check_events(events: Any) -> None:
    """Raise ConfigurationError unless this is a number of events to keep."""
    if isinstance(events, bool) or not isinstance(events, int) or events < 1:
        raise ConfigurationError(f"events is the number of events each member keeps, 1 or more; not {events!r}")


def check_timeout(timeout: Any, name: str = "timeout") -> None:
    """Raise ConfigurationError unless this is a number of seconds."""
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout <= MAX_TIMEOUT_S:
        raise ConfigurationError(
            f"{name} must be above 0, and at most {MAX_TIMEOUT_S} (a day), in seconds; not {timeout!r}"
        )
