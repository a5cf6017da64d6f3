"""Direct calls against Ray's and bare torchrpc's, with CPU tensors of several sizes."""

from __future__ import annotations

from benchmarks._harness import Pick, engine, ratios, show
from raytorchrpc.bench.cases import PATTERN_ROWS, Case, choose

SIZES = 20_000, 1_250_000, 10_000_000, 40_000_000, 640_000_000
TARGETS = {("quiet, nothing", "ray"): 0.7, ("quiet, 40 MB", "ray"): 0.5}


def main(pick: Pick) -> None:
    cases = [Case("quiet", size=size) for size in (0, *pick(SIZES, SIZES[:-1], SIZES[:1]))]
    for window in (1, 8, 64):
        cases.append(Case("in-flight", f"{window} in flight", unit="calls/s", in_flight=window))
    names = ["auto", "ray", *pick(["bare-torchrpc"], ["bare-torchrpc"], [])]
    effort = {"repeats": pick(5, 3, 1), "window_s": pick(0.5, 0.2, 0.01)}
    run = engine(choose(names, PATTERN_ROWS), cases, **effort)
    peers = {"ray": "Ray actor call", "bare-torchrpc": "torch rpc_sync"}
    show("Calls between two actors of one host (medians)", ratios(run, "auto", peers, TARGETS))
