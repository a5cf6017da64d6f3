"""Tensors where ``raytorchrpc bench`` has no row: borrowed ones (``share=True``), and many small ones in one call."""

from __future__ import annotations

from benchmarks._harness import Line, Pick, Skipped, engine, gpu_count, ratios, show
from raytorchrpc.bench.cases import Case, Row

SMALL, LARGE = Case("quiet", size=1_250), Case("quiet", size=640_000_000)
#: 400 tensors of 256 KiB in one call.
MANY = Case("quiet", "in 400 tensors", size=400 * 256 * 1024, tensors=400)
ONE = Case("quiet", "in one tensor", size=MANY.size)


def main(pick: Pick) -> None:
    gpus = gpu_count()
    if not gpus:
        raise Skipped("it needs a GPU, and Ray has none")
    rows = [Row("shared", "lane", "group", "", options={"share": True}, one_gpu=True),
            Row("copied", "lane", "group", "", one_gpu=True)]  # fmt: skip
    run = engine(rows, [SMALL, LARGE], "cuda")
    lines = ratios(run, "shared", {"copied": "the same, copied"})
    small, large = (run.cell("shared", "cuda", case.label, "quiet") for case in (SMALL, LARGE))
    lines.insert(0, Line(LARGE.label, large.median, small.median, "ms", SMALL.label, 1.2))
    show("CUDA tensors by share=True between two actors on one GPU (medians)", lines)
    if gpus < 2:
        print(f"  Not all rows ran: they need two GPUs, and Ray has {gpus}")
        return
    run = engine([Row("auto", "lane", "group", "")], [MANY, ONE], "cuda")
    many, one = (run.cell("auto", "cuda", case.label, "quiet") for case in (MANY, ONE))
    line = Line(MANY.label, many.median, one.median, "ms", "one tensor of the same total size", 2)
    show("Many CUDA tensors in one call between two GPUs (medians)", [line])
