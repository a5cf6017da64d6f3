"""The settings of a training run, the same in each of its processes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """A step is one decision of a collector: four frames of the game. An iteration is one update of the network."""

    game: str = "Pong"
    seed: int = 0
    net: str = "nature"
    device: str = "cpu"
    """Where the learner trains; collectors play on the CPU."""
    threads: int = 1
    """CPU threads of the learner."""
    collectors: int = 2
    batch: int = 32
    """Transitions per iteration."""
    replay: str = "learner"
    """Where the replay memory is. ``learner``: collectors send each new frame once, and the learner samples batches.
    ``collectors``: each stores its own games and sends whole batches, one per iteration."""
    capacity: int = 100_000
    """Frames in all replay memories together (7 KB each)."""
    warmup: int = 10_000
    """Steps, of all collectors together, before the first iteration."""
    every: int = 4
    """Steps per iteration; the learner waits for them."""
    chunk: int = 64
    """Steps that a collector sends at a time, if the replay memory is in the learner."""
    depth: int = 2
    """Items that may wait in the queue, per collector."""
    sync: int = 20
    """Iterations between two publications of the weights."""
    target: int = 1_000
    """Iterations between two updates of the target network."""
    gamma: float = 0.99
    rate: float = 1e-4
    """Learning rate of Adam."""
    explore: int = 250_000
    """Steps until epsilon, the share of random actions, has gone from 1 to ``epsilon``."""
    epsilon: float = 0.05

    def epsilon_at(self, steps: int) -> float:
        """Returns the share of random actions after ``steps`` steps of all collectors."""
        return max(self.epsilon, 1 - (1 - self.epsilon) * steps / self.explore)
