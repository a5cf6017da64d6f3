"""``raytorchrpc bench --pattern``: checks the options, measures, shows and writes the results."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from raytorchrpc.bench.pattern_results import PatternRun, read_pattern_run
from raytorchrpc.bench.pattern_tables import costs, document, draw, figures, skipped, to_csv
from raytorchrpc.bench.patterns import PatternOptions, make_options
from raytorchrpc.bench.results import write_file
from raytorchrpc.cli.bench import check_files, print_tables, repeat_command, session
from raytorchrpc.errors import ConfigurationError, RayTorchRpcError


def has_patterns(results: Sequence[Path]) -> bool:
    """Whether one of the files looks like a result of ``--pattern``."""
    return any(path.is_file() and b'"pattern"' in path.read_bytes() for path in results)


def run(
    *,
    pattern: Sequence[str] = (),
    rows: Sequence[str] = (),
    sizes: Sequence[str] = (),
    device: str = "all",
    quick: bool = False,
    budget_s: float | None = None,
    hosts: Sequence[str] = (),
    address: str | None = None,
    against: str | None = None,
    csv: Path | None = None,
    json: Path | None = None,
    plot: Path | None = None,
    markdown: Path | None = None,
    results: Sequence[Path] = (),
) -> None:
    """Measure, or read the one of ``results``; print tables and write files. Raises like ``bench.run``."""
    if against:
        raise ConfigurationError("--against has figures of sizes, not of patterns")
    asked = {"pattern": pattern, "rows": rows, "sizes": sizes, "device": device, "quick": quick, "budget": budget_s}
    check_files([path for path in (csv, json, plot, markdown) if path is not None], plot)
    if not results:
        options = make_options(
            pattern, rows=rows, sizes=sizes, device=device, quick=quick, budget_s=budget_s, hosts=hosts
        )
        shown = _measure(options, address, repeat_command({**asked, "address": address}))
    elif len(results) > 1 or json or any(value not in ((), None, False, "all") for value in asked.values()):
        raise ConfigurationError("--from shows one existing result of --pattern; combine it only with outputs")
    else:
        shown = read_pattern_run(results[0])
    _show(shown)
    if json:
        write_file(json, shown.model_dump_json(indent=1) + "\n")
    if csv:
        write_file(csv, to_csv(shown))
    if plot:
        write_file(plot, draw(shown))
    if markdown:
        write_file(markdown, document(shown, None if plot is None else os.path.relpath(plot, markdown.parent)))
    if not shown.tables():
        raise RayTorchRpcError("no row produced a figure; the reasons are above")


def _measure(options: PatternOptions, address: str | None, command: str) -> PatternRun:
    from raytorchrpc.bench.pattern_run import measure_patterns  # bad options are reported without loading Ray and torch

    with session(address) as (report, began):
        return measure_patterns(options, command, report, began=began)


def _show(run: PatternRun) -> None:
    print("\n".join(("", *run.machine)))
    print_tables([table(run, device, pattern) for device, pattern in run.tables() for table in (figures, costs)])
    if missing := skipped(run):
        print("\n  ".join(("\nNot measured:", *missing)))
    print(f"\n{run.seconds:.0f} s; repeat with `{run.command}`.")
