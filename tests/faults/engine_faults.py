"""Kills trainers, engines and workers at random moments, and asks no more of them than before: see ``run``."""

from __future__ import annotations

import math
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray

import raytorchrpc as rtr
from tests.faults import engine_fakes as fakes

#: Whatever is asked of an actor has come to its end by then, or it hangs (seconds).
PATIENCE_S = 90.0
#: What an actor raises that was killed, or whose peer was.
LOST = (ray.exceptions.RayError, rtr.RayTorchRpcError)


@dataclass
class Report:
    """What came of it."""

    kills: dict[str, int] = field(default_factory=dict)
    refused: int = 0
    """How often an engine has refused to generate."""
    generated: int = 0
    violations: list[str] = field(default_factory=list)
    recovered_s: list[float] = field(default_factory=list)


@dataclass
class Form:
    """How an adapter brings weights, in these tests."""

    train: Callable[..., float]
    """Brings a new value to the engine, and returns it. Takes a case; see ``engine_fakes.altered``."""
    newest: Callable[[], float]
    """The value that was published last; 0: none since the trainer was restarted."""
    generate: Callable[[], list[float]]
    """The values in the engine's model."""
    pids: Callable[[], dict[str, int]]
    """Of those who may be killed."""
    brings_itself: bool = True
    """An engine that was restarted has the newest weights before anybody brings it some."""
    remesh: Callable[[], object] = lambda: None
    """Starts trainers and engines again, as other numbers of processes."""


def get(ref: Any) -> Any:
    return ray.get(ref, timeout=PATIENCE_S)


def actor(cls: Any, *args: Any, **options: Any) -> Any:
    """An engine answers while it is busy; others do one thing at a time."""
    is_busy = cls in (fakes.Engine, fakes.SglangHolder, fakes.VerlManager, fakes.Sender)
    threads = {"max_concurrency": 8} if is_busy else {}
    return ray.remote(cls).options(num_cpus=0, max_restarts=-1, **threads).remote(*args, **options)


@contextmanager
def vllm(
    in_child: bool, trains: type[fakes.VllmTrainer] = fakes.VllmTrainer, timeout: float = fakes.TIMEOUT_S
) -> Iterator[Form]:
    with _shards(trains, actor(fakes.Engine, in_child, timeout=timeout), timeout) as form:
        form.brings_itself = not trains.lends
        yield form


@contextmanager
def server(trains: type[Any], group: str, timeout: float = fakes.TIMEOUT_S) -> Iterator[Form]:
    trainer, engine = actor(trains, timeout), actor(fakes.Engine, True, group=group, timeout=timeout)
    form = _form_of(trainer, engine)
    form.brings_itself = not trains.lends
    form.remesh = lambda: (ray.kill(trainer, no_restart=False), get(engine.start.remote(2)))
    yield form
    for each in (trainer, engine):
        ray.kill(each)


def _form_of(trainer: Any, engine: Any) -> Form:
    return Form(
        train=lambda case="": float(get(trainer.train.remote(engine, case))),
        newest=lambda: float(get(trainer.newest.remote())),
        generate=lambda: list(get(engine.generate.remote())),
        pids=lambda: {**get(trainer.pids.remote()), **get(engine.pids.remote())},
    )


@contextmanager
def _shards(trains: type, engine: Any, timeout: float) -> Iterator[Form]:
    """With a trainer of whole tensors, and after ``remesh`` two of shards, and as many processes of the engine.

    Cases "changed mesh" and "another home": the first of the two, or the other one, goes on alone.
    """
    trainers, formed = [actor(trains, timeout)], list[Any]()

    def train(case: str = "") -> float:
        nonlocal formed
        if len(trainers) == 1:
            return float(get(trainers[0].train.remote(engine, case)))
        chosen = {"changed mesh": trainers[:1], "another home": trainers[1:]}.get(case, trainers[:])
        if chosen != formed:
            meeting = tempfile.mktemp(prefix="trainers-")
            get([each.form.remote(rank, len(chosen), meeting) for rank, each in enumerate(chosen)])
        value, formed = float(time.monotonic_ns() // 1000 % 2**20), []  # exact as float32; to be formed if this fails
        results = get([each.train.remote(engine, case, value) for each in chosen])
        formed = chosen
        return float(results[0])

    def remesh() -> None:
        trainers.append(actor(trains, timeout))
        group.add({"trainer_1": trainers[1]}, timeout=PATIENCE_S)
        ray.kill(trainers[0], no_restart=False)
        get(engine.start.remote(2))
        with suppress(*LOST):
            get(engine.generate.remote())  # its processes have started
        group.wait_ready(PATIENCE_S)

    with rtr.init_group({"trainer": trainers[0], "engine": engine}, timeout=PATIENCE_S) as group:
        form = _form_of(trainers[0], engine)
        form.train, form.remesh = train, remesh
        yield form
    for each in (*trainers, engine):
        ray.kill(each)


@contextmanager
def sglang(timeout: float = fakes.TIMEOUT_S) -> Iterator[Form]:
    with _shards(fakes.SglangTrainer, actor(fakes.SglangHolder, timeout), timeout) as form:
        yield form


@contextmanager
def verl(timeout: float = fakes.TIMEOUT_S) -> Iterator[Form]:
    trainers = [actor(fakes.VerlWorker, f"trainer_{number}", timeout=timeout) for number in range(2)]
    rollout = actor(fakes.VerlWorker, "rollout", timeout=timeout)
    manager = actor(fakes.VerlManager, trainers, rollout)
    yield Form(
        train=lambda case="": float(get(manager.update.remote(case))),
        newest=lambda: float(get(manager.newest.remote())),
        generate=lambda: list(get(rollout.generate.remote())),
        pids=lambda: {name: pid for each in (*trainers, rollout) for name, pid in get(each.pids.remote()).items()},
        brings_itself=False,
    )
    for each in (manager, *trainers, rollout):
        ray.kill(each)


@contextmanager
def torchrl(timeout: float = fakes.TIMEOUT_S) -> Iterator[Form]:
    """Without kills of the trainer, with which torchrl's collectors end."""
    collectors = [actor(fakes.Collector, number) for number in range(2)]
    sender = actor(fakes.Sender, collectors, timeout)
    yield Form(
        train=lambda case="": float(get(sender.update.remote(case))),
        newest=lambda: float(get(sender.newest.remote())),
        generate=lambda: list(get(sender.generate.remote())),
        pids=lambda: {name: pid for each in collectors for name, pid in get(each.pids.remote()).items()},
        brings_itself=False,
        remesh=lambda: get(sender.start.remote([actor(fakes.Collector, 2)])),
    )
    for each in (sender, *collectors):
        ray.kill(each)


FORMS: dict[str, Callable[..., Any]] = {
    "vllm in its actor": partial(vllm, False),
    "vllm in a child": partial(vllm, True),
    "vllm with a loan": partial(vllm, False, fakes.LendingTrainer),
    "vllm with a loan in a child": partial(vllm, True, fakes.LendingTrainer),
    "vllm as a server": partial(server, fakes.ServedTrainer, "served"),
    "trl and a server": partial(server, fakes.TrlTrainer, "trl"),
    "trl with a loan": partial(server, fakes.LendingTrlTrainer, "trl"),
    "sglang": sglang,
    "verl": verl,
    "torchrl": torchrl,
}


def run(name: str, count: int, seed: int, loud: bool = False) -> Report:
    """Kill ``count`` processes, one after the other, while weights are brought and an engine generates.

    After each kill the same calls as before have to work again; nobody makes anything anew.
    """
    report, draw = Report(), random.Random(seed)
    with FORMS[name]() as form:
        _again(form.train, report, "the first update")
        victims: list[str] = []
        for number in range(count):
            victims = victims or draw.sample(names := sorted(form.pids()), len(names))
            _round(form, victim := victims.pop(), draw, report)
            if loud:
                took = report.recovered_s[-1] if report.recovered_s else math.nan
                print(f"{name}, seed {seed}: kill {number + 1}, {victim}: {took:.2f} s {report.violations}", flush=True)
            if any("HANG" in violation for violation in report.violations):
                break
    return report


def _round(form: Form, victim: str, draw: random.Random, report: Report) -> None:
    pids = form.pids()
    trains = victim.startswith("trainer") or not form.brings_itself or draw.random() < 0.5
    works = [lambda: _generate(form, report), *([form.train] if trains else [])]
    over = threading.Event()
    loops = [threading.Thread(target=_repeat, args=(work, over), daemon=True) for work in works]
    wanted = form.newest()
    for loop in loops:
        loop.start()
    over.wait(draw.uniform(0.0, 0.3))
    with suppress(ProcessLookupError):
        os.kill(pids[victim], signal.SIGKILL)
    report.kills[victim] = report.kills.get(victim, 0) + 1
    began, after = time.monotonic(), f"after the {victim} was killed"
    if not trains:  # it has the newest weights before anybody brings it some
        while pids == _again(form.pids, report, f"asking {after}"):
            over.wait(0.01)
        values = _again(lambda: _generate(form, report), report, f"generating {after}")
        if values != [wanted]:
            report.violations.append(f"{after} the engine has {values}, not {wanted}")
    _again(form.train, report, f"an update {after}")
    over.set()
    for loop in loops:
        loop.join(PATIENCE_S + 10)
        if loop.is_alive():
            report.violations.append(f"HANG {after}")
            return
    value = _again(form.train, report, f"another update {after}")
    values = _again(lambda: _generate(form, report), report, f"generating {after}")
    if values != [value]:
        report.violations.append(f"{after} and an update the engine has {values}, not {value}")
    report.recovered_s.append(time.monotonic() - began)


def _repeat(work: Callable[[], Any], over: threading.Event) -> None:
    while not over.is_set():
        with suppress(*LOST):
            work()


def _generate(form: Form, report: Report) -> list[float]:
    try:
        values = form.generate()
    except rtr.RayTorchRpcError:
        report.refused += 1
        raise
    report.generated += 1
    if len(values) > 1:
        report.violations.append(f"generated with parts of {len(values)} versions: {values}")
    return values


def _again(work: Callable[[], Any], report: Report, what: str) -> Any:
    """Its result, as soon as it succeeds."""
    until, failure = time.monotonic() + PATIENCE_S, None
    while time.monotonic() < until:
        try:
            return work()
        except LOST as error:
            failure = error
            time.sleep(0.02)
    report.violations.append(f"HANG: {what}: {failure!r}")
    return None
