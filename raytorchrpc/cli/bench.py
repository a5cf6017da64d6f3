"""``raytorchrpc bench``: checks the options, runs the benchmark, shows and writes the results."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

from raytorchrpc.bench.plots import check_plots, draw
from raytorchrpc.bench.results import Result, published, read_result
from raytorchrpc.bench.tables import LEGEND, document, gaps, tables
from raytorchrpc.errors import ConfigurationError, RayTorchRpcError

#: Least number of processes that Ray may start at once; the actors request no CPU.
_STARTING_AT_ONCE = 8
#: CPUs of a local Ray, which first starts as many idle processes.
_CPUS = 4


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
    if against and (asked.get("pattern") or asked.get("peers")):
        raise ConfigurationError("--against has figures of sizes, not of patterns or peers")
    _check_files([path for path in (json, plot, markdown) if path is not None], plot)
    if results and (json or address or any(value for value in asked.values() if value != "all")):
        raise ConfigurationError("--from shows existing results and measures nothing; combine it only with outputs")
    runs = [read_result(path) for path in results] or [_measure(address, **asked)]
    shown = [result.beside_published() if against else result for result in runs]
    for result in shown:
        _show(result)
    if json:
        json.write_text(runs[0].to_json())
    pictures = [plot.with_stem(f"{plot.stem}-{n + 1}") if n else plot for n in range(len(shown))] if plot else []
    for result, picture in zip(shown, pictures, strict=False):
        picture.write_bytes(draw(result))
    if markdown:
        names = [os.path.relpath(picture, markdown.parent) for picture in pictures]
        markdown.write_text(document(shown, names))
    if all(figure.median is None for result in runs for figure in result.figures):
        raise RayTorchRpcError("no contestant produced a figure; the reasons are above")
    if not results and runs[0].interrupted:
        raise KeyboardInterrupt


def _check_files(files: Sequence[Path], plot: Path | None) -> None:
    """Fail before minutes of measuring, not after them."""
    for path in files:
        if path.is_dir() or not os.access(path.parent, os.W_OK):
            raise ConfigurationError(f"cannot write {path}: it has to be a file in a directory that may be written")
    if len({path.resolve() for path in files}) < len(files):
        raise ConfigurationError("two outputs name the same file")
    if plot is not None:
        check_plots(plot)


def _measure(address: str | None, **asked: Any) -> Result:
    from raytorchrpc.bench.options import make_options  # here: shown results need none of what measures
    from raytorchrpc.bench.runs import run as measure
    from raytorchrpc.process.ray_session import ray_session

    options = make_options(**asked)
    if options.hosts and address is None:
        address = os.environ.get("RAY_ADDRESS", "auto")
    cores = os.cpu_count() or 1
    os.environ.setdefault("RAY_worker_maximum_startup_concurrency", str(max(_STARTING_AT_ONCE, cores)))
    command = shlex.join(["raytorchrpc", *sys.argv[1:]])
    notices = redirect_stdout(sys.stderr)  # of Ray
    with _errors_only(), _progress() as report, notices, ray_session(address, cpus=min(_CPUS, cores)):
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
def _progress() -> Iterator[Callable[[str], None]]:
    """Report on stderr: in one line of a terminal, else in lines."""
    if sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status("") as status:
            yield status.update
    else:
        yield partial(print, file=sys.stderr, flush=True)


def _show(result: Result) -> None:
    print("\n".join(("", *result.machine, f"raytorchrpc {result.tree}, {result.started[:10]}")))
    # Files and pipes get every column on one line.
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
    for table in tables(result):
        print(f"\n{table.text(width)}")
    print(f"\n{LEGEND}")
    if missing := gaps(result):
        print("\n  ".join(("\nNot measured:", *missing)))
    if any(figure.contestant.endswith(", published") for figure in result.figures):
        print(f"\n{published()[0]}")
    print(f"\n{result.seconds:.0f} s; repeat with `{result.command}`.", flush=True)
