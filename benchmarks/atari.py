"""DQN on Pong with one learner and its collectors, over each transport: seconds for 100 iterations of the learner.

The learner has two collectors on the CPU, or eight if Ray has a GPU for it. All transports are set up at once, but only
one is active: collectors block while their queue is full, and the learners run one after the other.
"""

from __future__ import annotations

import importlib.util
from contextlib import ExitStack
from typing import Any

import ray

from benchmarks._harness import TIMEOUT_S, Pick, Unavailable, compare, gpu_count
from raytorchrpc.bench.cases import Figure, Size

TRANSPORTS = ("auto", "torchrpc", "nng", "ray")
#: Settings that differ from the example's defaults, and iterations per turn. Exploration ends at once, so that
#: collectors evaluate their networks as they do in most of a run. In the second case, 72 MB cross per iteration.
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "DQN as usual": (
        {"net": "nature", "batch": 32, "every": 4, "chunk": 64, "capacity": 10_000, "warmup": 1_000, "explore": 500},
        32,
    ),
    "large batches, small network": (
        {
            **{"net": "tiny", "batch": 2_048, "replay": "collectors", "every": 1},
            **{"capacity": 4_000, "warmup": 400, "explore": 500},
        },
        40,
    ),
}
TINY = {"net": "tiny", "batch": 32, "replay": "collectors", "every": 1, "capacity": 200, "warmup": 40, "explore": 50}


def atari(pick: Pick) -> list[Figure]:
    if importlib.util.find_spec("ale_py") is None or importlib.util.find_spec("gymnasium") is None:
        raise Unavailable("it needs ALE: pip install '.[atari]' in a checkout")
    from examples.atari_dqn.player import Player
    from examples.atari_dqn.session import Session
    from examples.atari_dqn.settings import Settings

    device = "cuda" if gpu_count() else "cpu"
    transports = pick(TRANSPORTS, TRANSPORTS, ("auto",))
    figures = []
    for name, (changes, iterations) in pick(CASES, CASES, {"tiny": (TINY, 2)}).items():
        settings = Settings(device=device, collectors=pick(8 if gpu_count() else 2, 2, 1), **changes)
        actions = Player(settings.game, settings.seed).actions
        full, count = settings.depth * settings.collectors, pick(iterations, iterations // 2, 1)
        with ExitStack() as stack:
            sessions = {each: stack.enter_context(Session(settings, each, actions)) for each in transports}

            def turn(
                transport: str, size: Size, sessions: Any = sessions, full: int = full, count: int = count
            ) -> float:
                ray.get(sessions[transport].train(full), timeout=TIMEOUT_S)  # drains the queue
                progress = ray.get(sessions[transport].train(count), timeout=TIMEOUT_S)
                return float(100 * progress["seconds"] / progress["done"])

            figures += compare(
                f"100 iterations of DQN on Atari, {name}", turn, transports, [device], pick(3, 2, 1), unit="s"
            )
    return figures
