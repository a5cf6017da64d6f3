"""The actor that plays."""

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
    """Plays with the newest weights and sends what it sees. It has nothing that a restart could not make again."""

    def __init__(self, settings: Settings, number: int) -> None:
        self.settings, self.number = settings, number
        self._over = threading.Event()

    def end(self) -> None:
        """What fails from now on does so because the run is over."""
        self._over.set()

    def run(self, transport: Transport, steps: int, life: int) -> None:
        """Play and send, until the run is over or this process ends.

        ``steps``: of all collectors so far. ``life``: how often this was begun before, so that it does not play
        the same games again.
        """
        try:
            self._play(transport, steps, life)
        except Exception:
            if not self._over.is_set():
                raise

    def _play(self, transport: Transport, steps: int, life: int) -> None:
        settings = self.settings
        seed = seed_of(settings.seed, self.number, life)
        player = Player(settings.game, seed)
        policy = Network(settings.net, player.actions).requires_grad_(False)
        send = self._send_rows if settings.replay == "learner" else self._sender_of_batches(seed)
        count = settings.chunk if settings.replay == "learner" else max(1, settings.warmup // settings.collectors)
        version = 0
        while not self._over.is_set():
            version = transport.pull(policy, version)
            rows, returns = player.play(policy, count, settings.epsilon_at(steps))
            steps += count * settings.collectors  # the others are about as far
            send(transport, {"player": self.number, "steps": count, "returns": returns}, rows)
            if settings.replay == "collectors":
                count = settings.every

    def _send_rows(self, transport: Transport, about: dict[str, object], rows: Rows) -> None:
        transport.put(about, rows._asdict())

    def _sender_of_batches(self, seed: int) -> Callable[[Transport, dict[str, object], Rows], None]:
        """Remembers here, and sends a batch of what is remembered."""
        settings = self.settings
        memory = Replay(1, settings.capacity // settings.collectors, SIDE, SIDE, seed)
        frames = torch.empty((settings.batch, STACK + 1, SIDE, SIDE), dtype=torch.uint8)

        def send(transport: Transport, about: dict[str, object], rows: Rows) -> None:
            memory.add(0, rows)
            transport.put(about, memory.sample(settings.batch, out=frames)._asdict())

        return send


def seed_of(seed: int, number: int, life: int) -> int:
    """One for each collector and life, apart for different seeds."""
    return (seed * 1_000_003 + number * 1_009 + life) % 2**31
