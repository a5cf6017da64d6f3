"""Trains DQN on an Atari game with Ray actors, over a transport of your choice.

    python -m examples.atari_dqn --out runs/pong                       # from the repository's root
    python -m examples.atari_dqn --out runs/pong --resume              # continues from the checkpoint
    python -m examples.atari_dqn --out runs/ray --transport ray        # the same over plain Ray
    python -m examples.atari_dqn --out runs/gpu --device cuda --collectors 8 --transport auto

Ctrl-C ends the run with a checkpoint. A second one ends it at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import ray

import raytorchrpc as rtr

from . import reports
from .network import NETS
from .player import Player
from .session import CPUS, Session
from .settings import Settings
from .transports import TRANSPORTS

#: Settings that a resumed run cannot change.
FIXED = ("game", "net", "seed")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    defaults = Settings()
    parser = argparse.ArgumentParser(prog="python -m examples.atari_dqn", description="Train DQN on an Atari game.")
    parser.add_argument("--out", type=Path, default=Path("runs/atari"), help="folder for checkpoint, log and curve")
    parser.add_argument("--transport", choices=TRANSPORTS, default="auto", help="how frames and weights are sent")
    parser.add_argument("--iterations", type=int, default=250_000, help="network updates, including earlier runs")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --out")
    parser.add_argument("--report", type=int, default=500, help="iterations between two reports")
    parser.add_argument("--checkpoint-s", type=float, default=60, help="seconds between two checkpoints, at least")
    choices = {"net": NETS, "replay": ("learner", "collectors"), "device": None}
    for field in dataclasses.fields(Settings):
        default = getattr(defaults, field.name)
        parser.add_argument(f"--{field.name}", type=type(default), default=default, choices=choices.get(field.name))
    options = parser.parse_args(arguments)
    counts = ("iterations", "report", "threads", "collectors", "batch", "warmup", "every", "chunk", "depth", "sync")
    for name in (*counts, "target", "capacity", "explore"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be an integer of at least 1")
    if options.device not in ("cpu", "cuda"):
        parser.error("--device must be cpu or cuda; Ray assigns the GPU")
    return options


class Interrupt:
    """Records the first Ctrl-C (or SIGTERM). The next one ends the program as usual."""

    def __init__(self) -> None:
        self.requested = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, _: Any) -> None:
        self.requested = True
        signal.signal(number, signal.default_int_handler)


def prepare(options: argparse.Namespace) -> tuple[Settings, int, dict[str, Any] | None]:
    """Returns the settings, the number of actions, and the checkpoint. Raises ValueError for invalid options."""
    settings = Settings(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Settings)})
    player = Player(settings.game, settings.seed)  # raises ValueError for an unknown game
    player.close()
    checkpoint = reports.load(options.out) if options.resume else None
    if checkpoint is not None:
        for name in FIXED:
            if checkpoint[name] != getattr(settings, name):
                raise ValueError(f"--{name} was {checkpoint[name]!r} in the run to resume: pass the same value")
        if checkpoint["learner"]["iteration"] >= options.iterations:
            raise ValueError(
                f"the checkpoint has {checkpoint['learner']['iteration']} iterations already: raise --iterations"
            )
    return settings, player.actions, checkpoint


def run(options: argparse.Namespace) -> int:
    settings, actions, checkpoint = prepare(options)
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(runtime_env=rtr.runtime_env(), include_dashboard=False, logging_level="error")
    try:
        if settings.device == "cuda" and not ray.cluster_resources().get("GPU"):
            raise ValueError("--device cuda: this Ray cluster has no GPU")
        needed, available = CPUS * (settings.collectors + 1), ray.cluster_resources().get("CPU", 0)
        if needed > available:
            print(f"atari_dqn: needs {needed:g} CPUs, but Ray has {available:g}; waiting for more", file=sys.stderr)
        return train(options, settings, actions, checkpoint)
    finally:
        ray.shutdown()


def train(options: argparse.Namespace, settings: Settings, actions: int, checkpoint: dict[str, Any] | None) -> int:
    """Trains, reports and writes checkpoints. Returns the exit status."""
    state = None if checkpoint is None else checkpoint["learner"]
    life = 0 if checkpoint is None else checkpoint["life"] + 1
    done = 0 if state is None else state["iteration"]
    log = reports.Log(options.out, upto=done)
    fixed = {name: getattr(settings, name) for name in FIXED}
    title = f"{settings.game}, DQN ({settings.net}), transport {options.transport}"
    interrupt = Interrupt()
    with Session(settings, options.transport, actions, state, life) as session:
        print(session.routes, flush=True)
        saved = time.monotonic()
        while done < options.iterations and not interrupt.requested:
            progress = advance(session, min(options.report, options.iterations - done), interrupt)
            done = progress["iteration"]
            if progress["done"]:
                log.add(make_row(progress, session.restarts, options.transport))
                print_row(log.rows[-1])
            if time.monotonic() - saved > options.checkpoint_s or interrupt.requested or done >= options.iterations:
                learned = ray.get(session.learner.state.remote(), timeout=120)
                reports.save(options.out, {"learner": learned, "life": life, **fixed})
                reports.draw(options.out, log.rows, title)
                saved = time.monotonic()
    print(f"{'INTERRUPTED' if interrupt.requested else 'DONE'} at iteration {done}: {options.out}")
    return 0


def advance(session: Session, iterations: int, interrupt: Interrupt) -> dict[str, Any]:
    """Runs ``iterations``, or fewer if the program is interrupted, and returns statistics."""
    training = session.train(iterations)
    while True:
        if interrupt.requested:
            ray.get(session.learner.stop.remote(), timeout=120)
        progress = session.finished(training, timeout_s=1)
        if progress is not None:
            return progress


def make_row(progress: dict[str, Any], restarts: int, transport: str) -> dict[str, Any]:
    """Returns a line of the log."""
    per_100 = 100 * progress["seconds"] / progress["done"]
    more = {"frames": 4 * progress["steps"], "seconds_per_100": per_100, "restarts": restarts, "transport": transport}
    return {**progress, **more}


def print_row(row: dict[str, Any]) -> None:
    mean = "none yet" if row["return"] is None else f"{row['return']:.2f}"
    print(
        f"iteration {row['iteration']}  steps {row['steps']}  return {mean}  loss {row['loss']:.4f}  "
        f"epsilon {row['epsilon']:.2f}  {row['seconds_per_100']:.2f} s per 100 iterations",
        flush=True,
    )


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        return run(options)
    except (ValueError, OSError, rtr.RayTorchRpcError, ray.exceptions.RayError) as error:
        text = str(error).strip() if isinstance(error, ray.exceptions.RayTaskError) else " ".join(str(error).split())
        print(f"atari_dqn: {text}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("atari_dqn: interrupted; the last checkpoint is unchanged", file=sys.stderr)
        return 130
