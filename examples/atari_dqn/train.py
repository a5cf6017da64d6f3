"""Train DQN on an Atari game with Ray actors, over a transport of your choice.

    python -m examples.atari_dqn --out runs/pong                       # from the root of the tree
    python -m examples.atari_dqn --out runs/pong --resume              # goes on where it stopped
    python -m examples.atari_dqn --out runs/ray --transport ray        # the same by plain Ray
    python -m examples.atari_dqn --out runs/gpu --device cuda --collectors 8 --transport auto

Ctrl-C ends it with a checkpoint; a second one ends it at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import signal
import sys
import threading
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


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    defaults = Settings()
    parser = argparse.ArgumentParser(prog="python -m examples.atari_dqn", description="Train DQN on an Atari game.")
    parser.add_argument("--out", type=Path, default=Path("runs/atari"), help="folder for checkpoint, log and curve")
    parser.add_argument("--transport", choices=TRANSPORTS, default="auto", help="how frames and weights travel")
    parser.add_argument("--iterations", type=int, default=250_000, help="updates of the network, earlier runs included")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
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
            parser.error(f"--{name} is a whole number from 1 on")
    if options.device not in ("cpu", "cuda"):
        parser.error("--device is cpu or cuda; Ray chooses which GPU")
    return options


class Interrupt:
    """Set by the first Ctrl-C (or SIGTERM); the next one ends the program as always."""

    def __init__(self) -> None:
        self.came = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, _: Any) -> None:
        self.came.set()
        signal.signal(number, signal.default_int_handler)


def prepared(options: argparse.Namespace) -> tuple[Settings, int, dict[str, Any] | None]:
    """The settings, the game's actions, and the checkpoint. ValueError for what cannot work."""
    settings = Settings(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Settings)})
    player = Player(settings.game, settings.seed)  # also tells whether there is such a game
    player.close()
    checkpoint = reports.load(options.out) if options.resume else None
    if checkpoint is not None:
        for name in FIXED:
            if checkpoint[name] != getattr(settings, name):
                raise ValueError(f"--{name} was {checkpoint[name]!r} in the run that is to go on: give the same")
        if checkpoint["learner"]["iteration"] >= options.iterations:
            raise ValueError(
                f"the checkpoint has {checkpoint['learner']['iteration']} iterations already: ask for more"
            )
    return settings, player.actions, checkpoint


def run(options: argparse.Namespace) -> int:
    settings, actions, checkpoint = prepared(options)
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(runtime_env=rtr.runtime_env(), include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        if settings.device == "cuda" and not ray.cluster_resources().get("GPU"):
            raise ValueError("--device cuda: Ray has no GPU here")
        wanted, has = CPUS * (settings.collectors + 1), ray.cluster_resources().get("CPU", 0)
        if wanted > has:
            print(f"atari_dqn: {wanted:g} CPUs are asked for and Ray has {has:g}; waiting for more", file=sys.stderr)
        return trained(options, settings, actions, checkpoint)
    finally:
        ray.shutdown()


def trained(options: argparse.Namespace, settings: Settings, actions: int, checkpoint: dict[str, Any] | None) -> int:
    """Train, report, and leave a checkpoint. The process's exit code."""
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
        while done < options.iterations and not interrupt.came.is_set():
            progress = advanced(session, min(options.report, options.iterations - done), interrupt)
            done = progress["iteration"]
            if progress["done"]:
                log.add(row_of(progress, session.restarts, options.transport))
                show(log.rows[-1])
            if time.monotonic() - saved > options.checkpoint_s or interrupt.came.is_set() or done >= options.iterations:
                learned = ray.get(session.learner.state.remote(), timeout=120)
                reports.save(options.out, {"learner": learned, "life": life, **fixed})
                reports.draw(options.out, log.rows, title)
                saved = time.monotonic()
    print(f"{'INTERRUPTED' if interrupt.came.is_set() else 'DONE'} at iteration {done}: {options.out}")
    return 0


def advanced(session: Session, iterations: int, interrupt: Interrupt) -> dict[str, Any]:
    """So many iterations, or fewer if the program is interrupted."""
    training = session.train(iterations)
    while True:
        if interrupt.came.is_set():
            ray.get(session.learner.stop.remote(), timeout=120)
        progress = session.finished(training, timeout_s=1)
        if progress is not None:
            return progress


def row_of(progress: dict[str, Any], restarts: int, transport: str) -> dict[str, Any]:
    """What the log says."""
    per_100 = 100 * progress["seconds"] / progress["done"]
    more = {"frames": 4 * progress["steps"], "seconds_per_100": per_100, "restarts": restarts, "transport": transport}
    return {**progress, **more}


def show(row: dict[str, Any]) -> None:
    mean = "none yet" if row["return"] is None else f"{row['return']:.2f}"
    print(
        f"iteration {row['iteration']}  steps {row['steps']}  return {mean}  loss {row['loss']:.4f}  "
        f"epsilon {row['epsilon']:.2f}  {row['seconds_per_100']:.2f} s per 100 iterations",
        flush=True,
    )


def main(arguments: list[str] | None = None) -> int:
    options = parsed(arguments)
    try:
        return run(options)
    except (ValueError, OSError, rtr.RayTorchRpcError, ray.exceptions.RayError) as error:
        text = str(error).strip() if isinstance(error, ray.exceptions.RayTaskError) else " ".join(str(error).split())
        print(f"atari_dqn: {text}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("atari_dqn: interrupted before its end; the last checkpoint is as it was", file=sys.stderr)
        return 130
