"""What actors have under Ray, for members that live in this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from tests.unit.callees import Gate


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """That of every actor: one method at a time."""
    made = Gate(1)
    for module in ("exposed", "incoming", "served_call"):
        monkeypatch.setattr(f"raytorchrpc.calls.server.{module}.gate_of", lambda instance, group: made)
    return made


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[asyncio.AbstractEventLoop]:
    """That of every actor."""
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever, daemon=True)
    thread.start()
    monkeypatch.setattr("raytorchrpc._compat.ray_internals.actor_event_loop", lambda group: made)
    yield made
    made.call_soon_threadsafe(made.stop)
    thread.join(20)
    made.close()
