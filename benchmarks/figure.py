"""Draw the README's figure from a result of ``raytorchrpc bench``.

raytorchrpc bench --device cuda --rows auto,ray,ray-zero-copy,ray-rdt-nccl,bare-torchrpc,gpu-copy --json FILE.json
python -m benchmarks.figure FILE.json docs/assets/transfer-times.svg
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from raytorchrpc.bench.reports import label_logarithmic
from raytorchrpc.bench.results import Run, read_run, show_size

#: By row: label, colour (Okabe and Ito's palette for colour-blind readers), marker, dashes. Drawn where measured.
LINES = {
    "ray": ("Ray object store", "#0072B2", "s", (0, (5, 2))),
    "ray-zero-copy": ("Ray object store, zero-copy tensors", "#56B4E9", "D", (0, (5, 2, 1, 2))),
    "ray-rdt-nccl": ("Ray Direct Transport (NCCL)", "#009E73", "^", (0, (2, 1.5))),
    "ray-rdt-gloo": ("Ray Direct Transport (Gloo)", "#009E73", "^", (0, (2, 1.5))),
    "bare-torchrpc": ("torch.distributed.rpc", "#CC79A7", "v", (0, (8, 2, 2, 2))),
    "auto": ("raytorchrpc", "#D55E00", "o", "solid"),
    "gpu-copy": ("hardware limit: copy between the GPUs, no call", "#555555", "x", (0, (1, 1.5))),
    "memcpy": ("hardware limit: copy in memory, no call", "#555555", "x", (0, (1, 1.5))),
}


def draw(run: Run, path: Path) -> None:
    """Writes one panel as SVG: time against size, for CUDA tensors if the run has them."""
    device, _ = run.tables()[-1]
    measured = {row.row: run.points(row) for row in run.measured(device)}
    figure = Figure(figsize=(9, 5.2), layout="constrained")
    axes = figure.subplots()
    for name, (label, color, marker, dashes) in LINES.items():
        if name in measured:
            look = {"marker": marker, "markersize": 6, "linestyle": dashes, "linewidth": 3 if name == "auto" else 1.6}
            sizes, milliseconds = zip(*((size, 1e3 * seconds) for size, seconds in measured[name]), strict=True)
            axes.plot(sizes, milliseconds, color=color, label=label, **look)
    axes.set(xscale="log", yscale="log", xlabel="size of the tensor", ylabel="milliseconds, median")
    axes.set_title(f"One {device.upper()} tensor to another actor, with acknowledgement: less is better")
    label_logarithmic(axes.xaxis, lambda size, _: show_size(size), (1,))
    label_logarithmic(axes.yaxis, subs=(1,))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", frameon=False)
    hardware, software = "; ".join(run.machine[:-1]), run.machine[-1]
    caption = f"{hardware}\n{software}; raytorchrpc {run.version}, {run.started[:10]}"
    figure.supxlabel(caption, fontsize="small", color="#555555")
    with matplotlib.rc_context({"svg.hashsalt": "raytorchrpc"}):  # the same run gives the same file
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="what `raytorchrpc bench --json` wrote")
    parser.add_argument("figure", type=Path, help="the SVG to write")
    options = parser.parse_args()
    draw(read_run(options.result), options.figure)
