"""The actor that plays a game and sends what it sees."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from .network import SIDE, Network
from .player import Player
from .replay import STACK, Replay, Rows
from .settings import Settings
from .transports import Transport


class Collector:
    """Plays with the newest weights and sends what it sees. It holds no state that a restart would lose for good."""

    def __init__(self, settings: Settings, number: int) -> None:
        self.settings, self.number = settings, number
        self._over = threading.Event()

    def end(self) -> None:
        """Announces the end of the run: later errors are ignored."""
        self._over.set()

    def run(self, transport: Transport, steps: int, life: int) -> None:
        """Plays and sends until the run is over or this process ends.

        ``steps``: steps of all collectors so far. ``life``: how often the run was resumed or this actor restarted; it
        seeds the games, so that none is played twice.
        """
        try:
            self._play(transport, steps, life)
        except Exception:
            if not self._over.is_set():
                raise

    def _play(self, transport: Transport, steps: int, life: int) -> None:
        settings = self.settings
        seed = make_seed(settings.seed, self.number, life)
        player = Player(settings.game, seed)
        policy = Network(settings.net, player.actions).requires_grad_(False)
        send = self._send_rows if settings.replay == "learner" else self._make_batch_sender(seed)
        count = settings.chunk if settings.replay == "learner" else max(1, settings.warmup // settings.collectors)
        version = 0
        while not self._over.is_set():
            version = transport.pull(policy, version)
            rows, returns = player.play(policy, count, settings.epsilon_at(steps))
            steps += count * settings.collectors  # assumes that the others advance equally
            send(transport, {"player": self.number, "steps": count, "returns": returns}, rows)
            if settings.replay == "collectors":
                count = settings.every

    def _send_rows(self, transport: Transport, about: dict[str, object], rows: Rows) -> None:
        transport.put(about, rows._asdict())

    def _make_batch_sender(self, seed: int) -> Callable[[Transport, dict[str, object], Rows], None]:
        """Returns a function that adds rows to a local replay memory, and sends a batch from it."""
        settings = self.settings
        memory = Replay(1, settings.capacity // settings.collectors, SIDE, SIDE, seed)
        frames = torch.empty((settings.batch, STACK + 1, SIDE, SIDE), dtype=torch.uint8)

        def send(transport: Transport, about: dict[str, object], rows: Rows) -> None:
            memory.add(0, rows)
            transport.put(about, memory.sample(settings.batch, out=frames)._asdict())

        return send


def make_seed(seed: int, number: int, life: int) -> int:
    """Returns a seed that differs between collectors, lives and settings' seeds."""
    return (seed * 1_000_003 + number * 1_009 + life) % 2**31
