"""``raytorchrpc bench``: checks the options, runs the benchmark, shows and writes the results."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from raytorchrpc.bench.patterns import Options, make_options
from raytorchrpc.bench.plots import check_plots, draw
from raytorchrpc.bench.results import Result, published, read_result, write_file
from raytorchrpc.bench.tables import LEGEND, document, gaps, summary, tables
from raytorchrpc.errors import ConfigurationError, RayTorchRpcError

#: Least number of processes that Ray may start at once; the actors request no CPU.
_STARTING_AT_ONCE = 8
#: CPUs of a local Ray, which first starts as many idle processes.
_CPUS = 4
#: Least seconds between two lines of progress without a terminal.
_PROGRESS_PERIOD_S = 5.0


def run(
    *,
    address: str | None = None,
    against: str | None = None,
    json: Path | None = None,
    plot: Path | None = None,
    markdown: Path | None = None,
    results: Sequence[Path] = (),
    **asked: Any,
) -> None:
    """Measure what is ``asked`` (arguments of ``make_options``), or read ``results``; print tables and write files.

    Raises:
        ConfigurationError: an option is invalid, before anything starts, or names a cluster or host that is not there.
        RayTorchRpcError: the run failed, or no contestant produced a figure.
        KeyboardInterrupt: somebody has ended the run; what it had measured is shown and written.
    """
    if against not in (None, "published"):
        raise ConfigurationError(f"--against {against!r} is unknown; known: published")
    asked = {
        name: value
        for name, value in asked.items()
        if value not in (None, (), []) and value is not False and (name, value) != ("device", "all")
    }
    _check_files([path for path in (json, plot, markdown) if path is not None], plot)
    if results and (json or address or asked):
        raise ConfigurationError("--from shows existing results and measures nothing; combine it only with outputs")
    if results:
        runs = [read_result(path) for path in results]
    else:
        if against and asked.keys() & {"pattern", "peers"}:
            raise ConfigurationError("--against has figures of sizes, not of patterns or peers")
        runs = [_measure(make_options(**asked), address, _repeat_command(asked, address))]
    shown = [result.beside_published() if against else result for result in runs]
    for result in shown:
        _show(result, against)
    if json:
        write_file(json, runs[0].to_json())
    pictures = [plot.with_stem(f"{plot.stem}-{n + 1}") if n else plot for n in range(len(shown))] if plot else []
    for result, picture in zip(shown, pictures, strict=False):
        write_file(picture, draw(result))
    if markdown:
        write_file(markdown, document(shown, [os.path.relpath(picture, markdown.parent) for picture in pictures]))
    if all(figure.median is None for result in runs for figure in result.figures):
        raise RayTorchRpcError("no contestant produced a figure; the reasons are above")
    if not results and runs[0].interrupted:
        raise KeyboardInterrupt


def _check_files(files: Sequence[Path], plot: Path | None) -> None:
    """Fail before minutes of measuring, not after them."""
    for path in files:
        if path.is_dir():
            raise ConfigurationError(f"cannot write {path}: a directory")
        if not path.parent.is_dir():
            raise ConfigurationError(f"cannot write {path}: no such directory")
        if not os.access(path.parent, os.W_OK):
            raise ConfigurationError(f"cannot write {path}: its directory is read-only")
    if len({path.resolve() for path in files}) < len(files):
        raise ConfigurationError("two outputs name the same file")
    if plot is not None:
        if plot.suffix != ".png":
            raise ConfigurationError(f"--plot writes PNG; {plot} does not end in .png")
        check_plots()


def _repeat_command(asked: Mapping[str, Any], address: str | None) -> str:
    """The command for the same run, without the outputs."""
    words = ["raytorchrpc", "bench"]
    for name, value in {**asked, **({"address": address} if address else {})}.items():
        words.append(f"--{name.removesuffix('_s')}")
        if name == "hosts":
            words += value
        elif isinstance(value, (list, tuple)):
            words.append(",".join(value))
        elif value is not True:
            words.append(f"{value:g}" if isinstance(value, float) else str(value))
    return shlex.join(words)


def _measure(options: Options, address: str | None, command: str) -> Result:
    from raytorchrpc.bench.runs import run as measure  # here: shown results need none of what measures
    from raytorchrpc.process.ray_session import ray_session

    if options.hosts and address is None:
        address = os.environ.get("RAY_ADDRESS", "auto")
    cores = os.cpu_count() or 1
    os.environ.setdefault("RAY_worker_maximum_startup_concurrency", str(max(_STARTING_AT_ONCE, cores)))
    with _errors_only(), _progress() as report:
        report("starting Ray" if address is None else f"connecting to {address}", 0.0)
        with redirect_stdout(sys.stderr), ray_session(address, cpus=min(_CPUS, cores)):  # notices of Ray
            return measure(options, command, report)


@contextmanager
def _errors_only() -> Iterator[None]:
    """Hide warnings about lanes that fall back; the tables show the same."""
    logger = logging.getLogger("raytorchrpc")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def _progress() -> Iterator[Callable[[str, float], None]]:
    """Report on stderr: a bar, or occasional lines without a terminal."""
    if not sys.stderr.isatty():
        last = time.monotonic()

        def line(text: str, part: float) -> None:
            nonlocal last
            if time.monotonic() - last >= _PROGRESS_PERIOD_S:
                last = time.monotonic()
                print(f"{part:4.0%} {text}", file=sys.stderr, flush=True)

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.table import Column

    text = TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis"))
    columns = BarColumn(20), TaskProgressColumn(), TimeElapsedColumn(), text
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda text, part: bar.update(task, completed=part, description=text)


def _show(result: Result, against: str | None) -> None:
    print("\n".join(("", *result.machine, f"raytorchrpc {result.tree}, {result.started[:10]}")))
    # On a terminal, columns that do not fit follow below; files and pipes get every column on one line.
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for table in tables(result):
        print(f"\n{table.text(width)}")
    print("\n".join(("", LEGEND, *summary(result))))
    if missing := gaps(result):
        print("\n  ".join(("\nNot measured:", *missing)))
    if against and any(figure.contestant.endswith(", published") for figure in result.figures):
        print(f"\n{published()[0]}")
    print(f"\n{result.seconds:.0f} s; repeat with `{result.command}`.", flush=True)
