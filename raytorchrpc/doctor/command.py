"""``raytorchrpc doctor``: checks the options, collects evidence, prints the report. Needs neither typer nor rich."""

from __future__ import annotations

import math
import sys
from pathlib import Path

from raytorchrpc import __version__
from raytorchrpc.doctor.evidence import Evidence
from raytorchrpc.doctor.reports import make_report
from raytorchrpc.doctor.terminal import show
from raytorchrpc.errors import ConfigurationError, RayTorchRpcError

DEFAULT_TIMEOUT_S = 60.0
HEALTHY, UNHEALTHY, BAD_USAGE = 0, 1, 2


def run(
    *,
    cluster: bool = False,
    address: str | None = None,
    actors: str | None = None,
    as_json: bool = False,
    sysfs_root: Path | None = None,
    strict: bool = False,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> int:
    """Print a report; returns the exit code.

    0: healthy. 1: problems, or warnings with ``strict``. 2: bad usage, with one line on stderr.
    """
    try:
        evidence = _collect(cluster, address, actors, sysfs_root, timeout_s)
    except (RayTorchRpcError, ConnectionError) as error:
        print(f"raytorchrpc doctor: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_USAGE
    report = make_report(evidence, __version__)
    if as_json:
        print(report.model_dump_json(indent=1))
    else:
        show(report)
    return HEALTHY if report.healthy(strict=strict) else UNHEALTHY


def _collect(
    cluster: bool, address: str | None, actors: str | None, sysfs_root: Path | None, timeout_s: float
) -> list[Evidence]:
    names = [name.strip() for name in actors.split(",") if name.strip()] if actors is not None else []
    if actors is not None and not names:
        raise ConfigurationError("--actors names no actor")
    if len(set(names)) < len(names):
        raise ConfigurationError("--actors names an actor twice")
    if sum((cluster, bool(names), sysfs_root is not None)) > 1:
        raise ConfigurationError("--cluster, --actors and --sysfs-root exclude each other: name one")
    if address is not None and not (cluster or names):
        raise ConfigurationError("--address requires --cluster or --actors")
    if not 0 < timeout_s < math.inf:
        raise ConfigurationError("--timeout must be a number of seconds above 0")
    # Imported here: bad options are reported without loading Ray and torch.
    from raytorchrpc.doctor import collector

    if sysfs_root is not None:
        return [collector.gather_from(sysfs_root)]
    if not cluster and not names:
        return [collector.gather()]
    from raytorchrpc._ray_session import running_cluster
    from raytorchrpc.doctor.cluster import collect_from_actors, collect_from_nodes

    with running_cluster(address):
        return collect_from_actors(names, timeout_s) if names else collect_from_nodes(timeout_s)
