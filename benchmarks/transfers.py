"""Benchmarks that are rows and cases of ``raytorchrpc bench``: calls, tensors, huge pages, metrics and traces."""

from __future__ import annotations

import os
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from benchmarks._harness import Line, Pick, Skipped, engine, gpu_count, ratios, show
from raytorchrpc.bench.cases import PATTERN_ROWS, Case, Row, choose


def _row(name: str, **more: Any) -> Row:
    return Row(name, "group", name, "raytorchrpc", **more)


def calls(pick: Pick) -> None:
    """Direct calls against Ray's and bare torchrpc's, with CPU tensors of several sizes."""
    sizes = 20_000, 1_250_000, 10_000_000, 40_000_000, 640_000_000
    cases = [Case("quiet", size=size) for size in (0, *pick(sizes, sizes[:-1], sizes[:1]))]
    cases += [Case("in-flight", f"{n} in flight", unit="calls/s", in_flight=n) for n in (1, 8, 64)]
    names = ["auto", "ray", *pick(["bare-torchrpc"], ["bare-torchrpc"], [])]
    run = engine(choose(names, PATTERN_ROWS), cases, repeats=pick(5, 3, 1), window_s=pick(0.5, 0.2, 0.01))
    peers = {"ray": "Ray actor call", "bare-torchrpc": "torch rpc_sync"}
    targets = {("quiet, nothing", "ray"): 0.7, ("quiet, 40 MB", "ray"): 0.5}
    show("Calls between two actors of one host (medians)", ratios(run, "auto", peers, targets))


def tensors(pick: Pick) -> None:
    """Tensors that ``raytorchrpc bench`` has no row for: borrowed ones, and many small ones in one call."""
    gpus = gpu_count()
    if not gpus:
        raise Skipped("it needs a GPU, and Ray has none")

    def compared(row: str, case: Case, peer: Case, what: str, target: float) -> Line:
        ours, its = (run.cell(row, "cuda", each.label, "quiet") for each in (case, peer))
        return Line(case.label, ours.median, its.median, "ms", what, target)

    small, large = Case("quiet", size=1_250), Case("quiet", size=640_000_000)
    run = engine([_row("shared", options={"share": True}, one_gpu=True), _row("copied", one_gpu=True)],
                 [small, large], "cuda")  # fmt: skip
    lines = [compared("shared", large, small, small.label, 1.2)]
    lines += ratios(run, "shared", {"copied": "the same, copied"})
    show("CUDA tensors by share=True between two actors on one GPU (medians)", lines)
    if gpus < 2:
        print(f"  Not all rows ran: they need two GPUs, and Ray has {gpus}")
        return
    many = Case("quiet", "in 400 tensors", size=400 * 256 * 1024, tensors=400)
    one = Case("quiet", "in one tensor", size=many.size)
    run = engine([_row("auto")], [many, one], "cuda")
    line = compared("auto", many, one, "one tensor of the same total size", 2)
    show("Many CUDA tensors in one call between two GPUs (medians)", [line])


def huge_pages(pick: Pick) -> None:
    """Effect of ``runtime_env()`` on large CPU tensors: the same calls between actors started with and without it.

    One way plus an acknowledgement; the receiver allocates new memory for every tensor and frees it.
    """
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    mode = enabled.read_text().strip() if enabled.exists() else "missing"
    print(f"  {enabled}: {mode}")
    sizes = 10_000_000, 40_000_000, 640_000_000
    cases = [Case("quiet", size=size) for size in pick(sizes, sizes, (1_000_000,))]
    torchrpc: dict[str, Any] = {"lanes": ("socket", "torchrpc")}
    # The second is torchrpc's route between hosts, here over loopback.
    tcp = {**torchrpc, "transports": ("uv",), "channels": ("mpt_uv", "basic")}
    routes = {"torchrpc": torchrpc, "its TCP": tcp, "shm": {}}
    # By the ends that have the environment, those that start without it.
    without = {"both": (), "receiver only": (0,), "sender only": (1,), "neither": (0, 1)}
    ends = pick(list(without), list(without), ["both", "neither"])
    for name in pick(list(routes), list(routes), ["shm"]):
        rows = [_row(case, config=routes[name], bare_ends=without[case]) for case in ends]
        run = engine(rows, cases, repeats=pick(10, 3, 1), window_s=pick(0.3, 0.1, 0))
        for case in ends[:-1]:
            # Where the kernel provides huge pages only on request.
            matters = "[madvise]" in mode and name != "shm" and case == "both"
            targets = {("quiet, 640 MB", "neither"): 0.7} if matters else {}
            title = f"runtime_env(), {case}: large CPU tensors by {name}, one host (medians)"
            show(title, ratios(run, case, {"neither": "neither"}, targets))


def observability(pick: Pick, against: str | None = None) -> None:
    """What metrics and tracing cost an empty call, against the same call with all off.

    ``against``: the folder of another checkout to compare with, with metrics and tracing off in both.
    """
    if against is not None and not Path(against, "raytorchrpc").is_dir():
        raise SystemExit(f"{against} is no checkout: it has no folder raytorchrpc")
    with tempfile.TemporaryDirectory() as elsewhere:

        def traced(group: Any) -> AbstractContextManager[Any]:
            return group.trace(Path(elsewhere, "trace.json"))

        other = None if against is None else str(Path(against).resolve())
        env = {} if other is None else {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
        rows = [_row("off", env=env), _row("metrics", env=env, config={"metrics_period_s": 1.0})]
        rows.append(_row("traced", env=env, pair="off", own_turn=True, around=traced))
        rows += [] if other is None else [_row("other", env={"PYTHONPATH": other})]
        before = os.getcwd()
        os.chdir(before if other is None else elsewhere)  # workers search the driver's folder before PYTHONPATH
        try:
            run = engine(rows, [Case("quiet")], repeats=pick(60, 15, 1), window_s=pick(0.1, 0.1, 0.01))
        finally:
            os.chdir(before)
    lines = [line for name in ("metrics", "traced") for line in ratios(run, name, {"off": "all off"})]
    lines += ratios(run, "off", {"other": str(other)}, {("quiet, nothing", "other"): 1.02})
    show("Cost of metrics_period_s=1, and of tracing, for an empty call (medians)", lines)
