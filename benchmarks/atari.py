"""DQN on Pong with one learner and its collectors, over each transport: seconds for 100 iterations of the learner.

The learner has two collectors on the CPU, or eight if Ray has a GPU for it. All transports are set up at once, but only
one is active: collectors block while their queue is full, and the learners run one after the other in changing order.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import statistics
from contextlib import ExitStack
from typing import Any

import ray

from benchmarks._harness import Line, Pick, Skipped, gpu_count, show

#: DI-engine's documentation on torchrpc: Atari DQN, seconds for 100 epochs, 16 CPU cores, 32 GiB of memory, one A100.
PUBLISHED = {"nng": 127.64, "torchrpc (TCP)": 29.3906, "torchrpc (IB)": 28.7763}

TRANSPORTS = ("auto", "torchrpc", "nng", "ray")
#: By the learner's device.
COLLECTORS = {"cpu": 2, "cuda": 8}

#: The measured cases: settings that differ from the example's defaults, and iterations per turn. Exploration ends at
#: once, so that collectors evaluate their networks as they do in most of a run.
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "as published: DQN as usual": (
        {"net": "nature", "batch": 32, "every": 4, "chunk": 64, "capacity": 10_000, "warmup": 1_000, "explore": 500},
        32,
    ),
    # 72 MB per iteration, of which the learner uses 49 pixels per frame; a batch costs its collector one step of the
    # game.
    "transport-bound: large batches, small network": (
        {
            **{"net": "tiny", "batch": 2_048, "replay": "collectors", "every": 1},
            **{"capacity": 4_000, "warmup": 400, "explore": 500},
        },
        40,
    ),
}
TINY = {"net": "tiny", "batch": 32, "replay": "collectors", "every": 1, "capacity": 200, "warmup": 40, "explore": 50}
#: Ratio up to which auto counts as no slower: the spread of the medians between runs.
NO_SLOWER = 1.05


def measured(settings: Any, transports: tuple[str, ...], iterations: int, repeats: int) -> dict[str, list[float]]:
    """Seconds for 100 iterations, by transport."""
    from examples.atari_dqn.player import Player
    from examples.atari_dqn.session import Session

    actions = Player(settings.game, settings.seed).actions
    took: dict[str, list[float]] = {transport: [] for transport in transports}
    with ExitStack() as stack:
        sessions = {name: stack.enter_context(Session(settings, name, actions)) for name in transports}
        full = settings.depth * settings.collectors
        for session in sessions.values():  # until reused memory is allocated
            ray.get(session.train(6 * full if repeats > 1 else 1), timeout=300)
        for turn in range(repeats):
            at = turn % len(transports)
            for name in transports[at:] + transports[:at]:
                ray.get(sessions[name].train(full), timeout=300)  # drains the queue
                progress = ray.get(sessions[name].train(iterations), timeout=300)
                took[name].append(100 * progress["seconds"] / progress["done"])
    return took


def main(pick: Pick) -> None:
    if importlib.util.find_spec("ale_py") is None or importlib.util.find_spec("gymnasium") is None:
        raise Skipped("it needs ALE: pip install '.[atari]' in a checkout")
    from examples.atari_dqn.settings import Settings

    device = "cuda" if gpu_count() else "cpu"
    collectors = pick(COLLECTORS[device], COLLECTORS[device], 1)
    transports = pick(TRANSPORTS, TRANSPORTS, ("auto",))
    lines, texts = [], []
    for case, (changes, iterations) in pick(CASES, CASES, {"tiny": (TINY, 2)}).items():
        settings = Settings(device=device, collectors=collectors, **changes)
        took = measured(settings, transports, pick(iterations, iterations // 2, 1), pick(3, 2, 1))
        medians = {name: statistics.median(values) for name, values in took.items()}
        short = case.partition(":")[0]
        bounds = {("auto", "ray"): NO_SLOWER, ("auto", "torchrpc"): NO_SLOWER, ("torchrpc", "nng"): None}
        bounds |= {("auto", "nng"): round(1 / 3, 3) if short == "transport-bound" else NO_SLOWER, ("nng", "ray"): None}
        lines += [Line(f"{short}, {ours}", medians[ours], medians[peer], "s", peer, bound)
                  for (ours, peer), bound in bounds.items() if {ours, peer} <= medians.keys()]  # fmt: skip
        texts += [case, "  " + ", ".join(f"{key}={value}" for key, value in dataclasses.asdict(settings).items())]
        for name, values in took.items():
            texts.append(f"  {name:<10}{medians[name]:>8.2f} s ({'  '.join(f'{value:.2f}' for value in values)})")
    show(f"Atari DQN, 1 learner ({device}) and {collectors} collectors: seconds for 100 iterations (medians)", lines)
    print("\n".join(texts))
    figures = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in PUBLISHED.items())
    print(f"published (100 epochs, another program and machine): {figures}")
