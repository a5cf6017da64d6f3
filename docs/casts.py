"""Draws what commands show in a terminal: runs each in one, and writes docs/assets/cast-NAME.svg.

    python docs/casts.py              # all of them, in half a minute; needs the extra demo
    python docs/casts.py top routes

The pictures have the page's text colour, and colours that are readable on a light page and on a dark one.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import ray
import torch
from rich.console import Console
from rich.style import Style
from rich.text import Text

import raytorchrpc as rtr

CONSOLE = Console()
ASSETS = Path(__file__).parent / "assets"
COLUMNS = {"top": 100}  # of the terminal; of all others 80
WIDTH, HEIGHT = 7.25, 17  # of one character (pixels)
#: What each picture shows, for who does not see it.
SHOWN = {
    "doctor": "The doctor lists findings of a machine without GPUs: notes, each with its meaning and what to do, then "
    "what is as it should be, and its verdict.",
    "demo": "The demo trains a classifier with a parameter server and two workers. It shows the lanes between them, "
    "what each called, and how long a pull and a push take directly and through Ray's object store.",
    "top": "Calls per second of each pair of members and of each method, what waits in a queue, and how far behind "
    "readers of weights are.",
    "routes": "The lanes of each pair of members for calls, CPU tensors and CUDA tensors, and why.",
}
_CONTROL = re.compile(
    r"\x1b\[(?P<number>\d*)(?P<code>[ABCDGJKhl])|\x1b\[\?\d+[hl]|(?P<text>(?:\x1b\[[\d;]*m|[^\x1b])+)"
)


def in_terminal(name: str, *command: str) -> str:
    """What is on the terminal when the command has ended, with its colours as escapes."""
    ours, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 60, COLUMNS.get(name, 80), 0, 0))
    environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        command, stdout=terminal, stderr=subprocess.DEVNULL, env={**environ, "TERM": "xterm-256color"}
    )
    os.close(terminal)
    written = b""
    try:
        while part := os.read(ours, 1 << 16):
            written += part
    except OSError:  # the end, on Linux
        pass
    os.close(ours)
    if process.wait(60) not in (0, 1):  # the doctor ends with 1 where it finds a problem
        sys.exit(f"{' '.join(command)} ended with {process.returncode}")
    return "\n".join(screen(written.decode())).strip("\n")


def screen(written: str) -> list[str]:
    """The lines after all movements of the cursor: up, to the start of a line, and the erasure of a line."""
    lines, at = [""], 0
    for match in _CONTROL.finditer(written.replace("\r\n", "\n")):
        if match["code"] == "A":
            at = max(0, at - int(match["number"] or 1))
        elif match["code"] == "K":
            lines[at] = ""
        for number, part in enumerate((match["text"] or "").split("\n")):
            at += number > 0
            lines += [""] * (at + 1 - len(lines))
            _, again, last = part.rpartition("\r")
            lines[at] = last if again else lines[at] + last
    return lines


def draw(name: str, command: str, shown: str) -> str:
    """The picture of a terminal's lines, below the command that wrote them."""
    lines = [
        Text("$ " + command if name != "routes" else ">>> " + command, "bold"),
        *map(Text.from_ansi, shown.splitlines()),
    ]
    width, height = COLUMNS.get(name, 80) * WIDTH + 16, len(lines) * HEIGHT + 14
    rows = "\n".join(
        f'  <text y="{(number + 1) * HEIGHT + 3}" x="8">{row(line)}</text>' for number, line in enumerate(lines)
    )
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height}" width="{width:g}" height="{height}" role="img" class="cast" aria-labelledby="cast-{name}-title cast-{name}-desc" font-family="ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace" font-size="12" fill="currentColor">
  <title id="cast-{name}-title">{escape(command)}</title>
  <desc id="cast-{name}-desc">{escape(SHOWN[name])}</desc>
  <style>svg:root {{ color: #24292f }} @media (prefers-color-scheme: dark) {{ svg:root {{ color: #e6edf3; --rtr-strong: #ff9b5e; --rtr-peer: #6cb6ff }} }}</style>
  <rect x="0.5" y="0.5" width="{width - 1:g}" height="{height - 1}" rx="6" fill="none" stroke="currentColor" stroke-opacity="0.3"/>
{rows}
</svg>
"""  # noqa: E501


def row(line: Text) -> str:
    """Its parts of one style each, every one at its column."""
    plain, out, start = line.plain.rstrip(), "", 0
    marks = {mark for span in line.spans for mark in (span.start, span.end) if mark < len(plain)}
    for end in (*sorted(marks - {0}), len(plain)):
        style = line.get_style_at_offset(CONSOLE, start)
        colour = f' style="fill: var(--rtr-{kind})"' if (kind := colour_of(style)) else ""
        looks = colour + ' font-weight="600"' * bool(style.bold) + ' opacity="0.7"' * bool(style.dim)
        for part in re.finditer(r"\S+(?: \S+)*", plain[start:end]):
            length = f'textLength="{len(part[0]) * WIDTH:g}" lengthAdjust="spacingAndGlyphs"'
            out += f'<tspan x="{8 + (start + part.start()) * WIDTH:g}" {length}{looks}>{escape(part[0])}</tspan>'
        start = end
    return out


def colour_of(style: Style) -> str:
    """The name of the page's colour: the strong one for what a terminal shows in red, yellow or magenta."""
    if style.color is None or style.color.is_default:
        return ""
    return "strong, #b34700" if (style.color.number or 0) % 8 in (1, 3, 5) else "peer, #0b61a4"


@ray.remote(num_cpus=0.1)
class Learner:
    def __init__(self) -> None:
        self.model = torch.nn.Linear(1000, 1000)

    def learn(self, batches: Any, weights: Any) -> None:
        weights.publish(self.model)
        for _ in batches:
            weights.publish(self.model)

    @rtr.method(concurrent=True)
    def report(self, reward: float) -> None: ...


@ray.remote(num_cpus=0.1)
class Collector:
    def collect(self, batches: Any, weights: Any) -> None:
        model, version = torch.nn.Linear(1000, 1000), 0
        while True:
            version = weights.pull(model, since=version)
            rtr.rpc_sync("learner").report(1.0)
            try:
                batches.put(torch.rand(32, 84, 84))
            except rtr.Closed:
                return


@contextmanager
def group_at_work() -> Iterator[rtr.Group]:
    ray.init(include_dashboard=False, log_to_driver=False, logging_level="error")
    learner, collectors = Learner.remote(), {f"collector_{number}": Collector.remote() for number in range(2)}
    with rtr.init_group({"learner": learner, **collectors}, name="training") as group:
        batches = rtr.Queue("batches", home="learner", maxsize=4)
        weights = rtr.WeightStore("policy", home="learner")
        working = [learner.learn.remote(batches, weights)]
        working += [collector.collect.remote(batches, weights) for collector in collectors.values()]
        yield group
        batches.close(force=True)
        ray.get(working)
    ray.shutdown()


def main(names: list[str]) -> None:
    if unknown := set(names) - set(SHOWN):
        sys.exit(f"casts: there is no {', '.join(unknown)}; there are {', '.join(SHOWN)}")
    command = [sys.executable, "-m", "raytorchrpc.cli"]
    for name in ("doctor", "demo"):
        if name in names:
            write(name, f"raytorchrpc {name}", in_terminal(name, *command, name))
    if {"top", "routes"} & set(names):
        with group_at_work() as group:
            if "routes" in names:
                os.environ["COLUMNS"] = "80"
                write("routes", "print(group.routes())", str(group.routes()))
            if "top" in names:
                address = ray.get_runtime_context().gcs_address
                write("top", "raytorchrpc top", in_terminal("top", *command, "top", "--once", "--address", address))


def write(name: str, command: str, shown: str) -> None:
    (ASSETS / f"cast-{name}.svg").write_text(draw(name, command, shown), encoding="utf-8")
    print(f"docs/assets/cast-{name}.svg: {len(shown.splitlines())} lines")


if __name__ == "__main__":
    main(sys.argv[1:] or list(SHOWN))
