"""Weights from one publisher to several readers at once, against a broadcast by torch.distributed and one reader."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import raytorchrpc as rtr
from benchmarks._harness import Line, Pick, await_gpu, each, gpu_count, group_of, on, show
from benchmarks._weights import publish, size_of, sums

#: Tensors of 32 MiB on GPUs, of 4 MiB on CPUs.
TENSORS, SIDES = {"cuda": 128, "cpu": 16}, {"cuda": (4096, 4096), "cpu": (2048, 1024)}
READERS = (1, 2, 3)
#: From one round to the next (seconds).
ROUND_S = {"cuda": 0.2, "cpu": 1.0}


def load(end: Any, store: Any, device: str, count: int) -> int:
    """Make the model; returns its bytes."""
    value = float(rtr.current_member().name == "publisher")
    make = {"dtype": torch.bfloat16, "device": device}
    end.store = store
    end.model = {f"{number}": torch.full(SIDES[device], value, **make) for number in range(count)}
    return size_of(end.model)


def pull(end: Any) -> None:
    end.store.pull(end.model)


def join(end: Any) -> None:
    """Put the model into one tensor, and meet the other members."""
    end.whole = torch.cat([tensor.view(-1) for tensor in end.model.values()])
    broadcast(end)
    await_gpu()


def broadcast(end: Any) -> None:
    torch.distributed.broadcast(end.whole, group_src=0, group=rtr.process_group())


def paced(end: Any, work: Callable[[Any], None], rounds: int, begin: float, period_s: float) -> list[float]:
    """Milliseconds of each round of ``work``, of which the first begins at ``begin`` (``time.monotonic``)."""
    took = []
    for number in range(rounds):
        at = begin + number * period_s
        time.sleep(max(0.0, at - time.monotonic()))
        work(end)
        await_gpu()
        took.append((time.monotonic() - at) * 1e3)
    return took


def main(pick: Pick) -> None:
    gpus = gpu_count()
    device = "cuda" if gpus > 1 else "cpu"
    rounds, period_s = pick(15, 5, 1), pick(ROUND_S[device], ROUND_S[device], 0.1)
    # Readers on all GPUs but the publisher's.
    places = ["0", *(str(1 + number % (gpus - 1)) for number in range(max(READERS)))] if gpus > 1 else []
    names = [f"reader{number}" for number in READERS]
    with group_of("publisher", *names, gpus=places) as (group, ends):
        publisher, *readers = ends.values()
        store = rtr.WeightStore("whole", home="publisher")
        size, *_ = each([publisher, *readers], load, store, device, pick(TENSORS[device], TENSORS[device], 1))
        on(publisher, publish)

        def measure(members: list[Any], work: Callable[[Any], None]) -> float:
            """Median milliseconds of a round, by its slowest member."""
            for repeats in (pick(3, 3, 1), rounds):  # at first they get to know one another
                its = each(members, paced, work, repeats, time.monotonic() + pick(0.5, 0.5, 0.1), period_s)
            return statistics.median(map(max, zip(*its, strict=True)))

        took = {count: measure(readers[:count], pull) for count in READERS}
        if any(arrived != on(publisher, sums) for arrived in each(readers, sums)):
            raise RuntimeError("the weights arrived changed")
        alone = min(len(readers), gpus - 1) if device == "cuda" else len(readers)
        members = ["publisher", *names[:alone]]
        group.process_group("nccl" if device == "cuda" else "gloo", members=members)
        each([ends[name] for name in members], join)
        by_broadcast = measure([ends[name] for name in members], broadcast)
    lines = []
    for count, ms in took.items():
        what = f"{count} reader{'s' if count > 1 else ''}, {size / 1e9:.3g} GB"
        target = 1.2 if device == "cuda" and count == max(READERS) else None
        lines.append(Line(what, ms, by_broadcast, "ms", f"broadcast to {alone}", target))
    lines.append(Line(what, ms, took[1], "ms", "one reader"))
    show(f"Weights from one publisher to readers that pull at once, {device}, {gpus} GPUs (medians)", lines)
