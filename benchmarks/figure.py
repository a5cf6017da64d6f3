"""Draw the figure of docs/performance.md from a result of ``raytorchrpc bench``.

raytorchrpc bench --device cuda --json FILE.json
python -m benchmarks.figure FILE.json docs/assets/transfer-times.svg

It is narrow enough for a telephone, and takes the colour of the text around it.
"""

from __future__ import annotations

import argparse
import io
import re
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from raytorchrpc.bench.cases import show_size
from raytorchrpc.bench.plots import label_logarithmic
from raytorchrpc.bench.results import Result, read_result

#: By contestant: label, colour (Okabe and Ito's palette for colour-blind readers), marker, dashes.
LINES = {
    "ray": ("Ray object store", "#0072B2", "s", (0, (5, 2))),
    "ray-zero-copy": ("Ray object store, zero-copy tensors", "#56B4E9", "D", (0, (5, 2, 1, 2))),
    "ray-rdt-nccl": ("Ray Direct Transport (NCCL)", "#009E73", "^", (0, (2, 1.5))),
    "ray-rdt-gloo": ("Ray Direct Transport (Gloo)", "#009E73", "^", (0, (2, 1.5))),
    "bare-torchrpc": ("torch.distributed.rpc", "#CC79A7", "v", (0, (8, 2, 2, 2))),
    "raytorchrpc": ("raytorchrpc", "#D55E00", "o", "solid"),
    "gpu-copy": ("hardware limit: copy between the GPUs, no call", "#555555", "x", (0, (1, 1.5))),
    "memcpy": ("hardware limit: copy in memory, no call", "#555555", "x", (0, (1, 1.5))),
}


#: The size whose times are the picture's description.
DESCRIBED = 40_000_000


def draw(result: Result) -> str:
    """One panel as SVG: time against size, for CUDA tensors if the result has them."""
    device = "cuda" if any(one.device == "cuda" and one.median for one in result.figures) else "cpu"
    measured: dict[str, list[tuple[int, float]]] = {}
    for one in result.figures:
        if one.device == device and isinstance(one.size, int) and one.median is not None:
            measured.setdefault(one.contestant, []).append((one.size, one.median))
    figure = Figure(figsize=(4.6, 5.4), layout="constrained")
    axes = figure.subplots()
    described = []
    for name, (label, color, marker, dashes) in LINES.items():
        if name in measured:
            look = {
                "marker": marker,
                "markersize": 5,
                "linestyle": dashes,
                "linewidth": 3 if name == "raytorchrpc" else 1.6,
            }
            sizes, milliseconds = zip(*measured[name], strict=True)
            axes.plot(sizes, milliseconds, color=color, label=label, **look)
            described += [
                f"{label} {ms:.3g} ms" for size, ms in zip(sizes, milliseconds, strict=True) if size == DESCRIBED
            ]
    axes.set(xscale="log", yscale="log", xlabel="size of the tensor", ylabel="milliseconds, median: less is better")
    label_logarithmic(axes.xaxis, lambda size, _: show_size(size), (1,))
    label_logarithmic(axes.yaxis, subs=(1,))
    axes.grid(alpha=0.3)
    figure.legend(fontsize="small", frameon=False, loc="outside upper left")
    drawn = io.StringIO()
    look = {"svg.hashsalt": "raytorchrpc", "svg.fonttype": "none", "font.family": "sans-serif"}
    with matplotlib.rc_context(look):  # the same run gives the same file
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    title = f"Time to deliver one {device.upper()} tensor to another actor, with acknowledgement"
    machine = f"{'; '.join(result.machine)}; raytorchrpc {result.version}, {result.started[:10]}"
    text = f"At {show_size(DESCRIBED)}: {', '.join(described)}. {machine}."
    return in_the_colour_of_the_page(drawn.getvalue(), title, text)


def in_the_colour_of_the_page(svg: str, title: str, text: str) -> str:
    """matplotlib's black as the colour of the text around the picture, and a description for who cannot see it."""
    head = re.search(r'viewBox="[^"]*"', svg)
    assert head
    _, _, body = svg.partition("</metadata>")
    root = f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" {head[0]}'
    return (
        f'{root} role="img" aria-labelledby="figure-title figure-desc" fill="currentColor">\n'
        f'<title id="figure-title">{title}</title>\n<desc id="figure-desc">{text}</desc>\n'
        "<style>svg:root { color: #24292f }"
        " @media (prefers-color-scheme: dark) { svg:root { color: #e6edf3 } }</style>\n"
        + body.strip().replace("#000000", "currentColor")
        + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="what `raytorchrpc bench --json` wrote")
    parser.add_argument("figure", type=Path, help="the SVG to write")
    options = parser.parse_args()
    options.figure.write_text(draw(read_result(options.result)), encoding="utf-8")


if __name__ == "__main__":
    main()
