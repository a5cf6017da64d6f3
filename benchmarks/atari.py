"""DQN on Pong with one learner and its collectors, over each transport: seconds for 100 iterations of the learner.

The learner has two collectors on the CPU, or eight if Ray has a GPU for it. All transports are set up at once, but only
one is active: collectors block while their queue is full, and the learners run one after the other in changing order.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import statistics
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import ray

from benchmarks._harness import Row, local_ray, show

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
#: Ratio up to which auto counts as no slower: the spread of the medians between runs.
NO_SLOWER = 1.05


def measured(settings: Any, iterations: int, repeats: int) -> dict[str, list[float]]:
    """Seconds for 100 iterations, by transport."""
    from examples.atari_dqn.player import Player
    from examples.atari_dqn.session import Session

    actions = Player(settings.game, settings.seed).actions
    took: dict[str, list[float]] = {transport: [] for transport in TRANSPORTS}
    with ExitStack() as stack:
        sessions = {name: stack.enter_context(Session(settings, name, actions)) for name in TRANSPORTS}
        for session in sessions.values():  # until reused memory is allocated
            ray.get(session.train(6 * settings.depth * settings.collectors), timeout=300)
        for turn in range(repeats):
            order = TRANSPORTS[turn % len(TRANSPORTS) :] + TRANSPORTS[: turn % len(TRANSPORTS)]
            for name in order:
                ray.get(sessions[name].train(settings.depth * settings.collectors), timeout=300)  # drains the queue
                progress = ray.get(sessions[name].train(iterations), timeout=300)
                took[name].append(100 * progress["seconds"] / progress["done"])
    return took


def main(quick: bool = False, cases: Iterable[str] = tuple(CASES)) -> None:
    if importlib.util.find_spec("ale_py") is None or importlib.util.find_spec("gymnasium") is None:
        print("\nAtari DQN: skipped, because it needs ALE: pip install '.[atari]' in a checkout")
        return
    from examples.atari_dqn.settings import Settings

    # Nominal: only one learner and its collectors are active at any time.
    with local_ray(cpus=2 * len(TRANSPORTS) * (max(COLLECTORS.values()) + 1)):
        device = "cuda" if ray.cluster_resources().get("GPU") else "cpu"
        collectors = COLLECTORS[device]
        rows, lines = [], []
        for case in cases:
            changes, iterations = CASES[case]
            settings = Settings(device=device, collectors=collectors, **changes)
            took = measured(settings, iterations // 2 if quick else iterations, 2 if quick else 3)
            medians = {name: statistics.median(values) for name, values in took.items()}
            target = round(1 / 3, 3) if case.startswith("transport-bound") else NO_SLOWER
            short = case.partition(":")[0]
            rows.append(Row(f"{short}, auto", medians["auto"], medians["nng"], "s", "nng", target))
            rows.append(Row(f"{short}, auto", medians["auto"], medians["ray"], "s", "ray", NO_SLOWER))
            rows.append(Row(f"{short}, auto", medians["auto"], medians["torchrpc"], "s", "torchrpc", NO_SLOWER))
            rows.append(Row(f"{short}, torchrpc", medians["torchrpc"], medians["nng"], "s", "nng"))
            rows.append(Row(f"{short}, nng", medians["nng"], medians["ray"], "s", "ray"))
            lines.append(case)
            lines.append("  " + ", ".join(f"{key}={value}" for key, value in dataclasses.asdict(settings).items()))
            for name, values in took.items():
                each = "  ".join(f"{value:.2f}" for value in values)
                lines.append(
                    f"  {name:<10}{medians[name]:>8.2f} s   {medians[name] / medians['nng']:>6.2f} x nng   "
                    f"{medians[name] / medians['ray']:>6.2f} x ray   ({each})"
                )
    where = f"1 learner ({device}) and {collectors} collectors"
    show(f"Atari DQN, {where}: seconds for 100 iterations (medians)", rows)
    print("\n".join(lines))
    figures = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in PUBLISHED.items())
    ratio = PUBLISHED["torchrpc (TCP)"] / PUBLISHED["nng"]
    print(f"published (100 epochs, another program and machine): {figures} (torchrpc (TCP) = {ratio:.2f} x nng)")
