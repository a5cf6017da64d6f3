"""A whole run on an initialised Ray: describe the hosts, start the actors, measure, end the actors."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytorchrpc import __version__
from raytorchrpc.bench import pairs
from raytorchrpc.bench.options import Options, show_size
from raytorchrpc.bench.pairs import Failed, Pair, Placement, Series
from raytorchrpc.bench.results import RowResult, Run
from raytorchrpc.bench.rows import KIND_TEXT
from raytorchrpc.bench.schedule import Report, Sampler
from raytorchrpc.bench.site import Host, MemoryLimits, Site, describe_host, obstacle
from raytorchrpc.errors import BootstrapError, ConfigurationError

#: Share of the budget that starting the actors may use.
_START_SHARE = 0.6
#: Reserved for ending the actors and Ray (seconds).
_SHUTDOWN_S = 6.0


def measure(options: Options, command: str, report: Report, *, began: float) -> Run:
    """Take all samples. Always ends the actors it started.

    ``began``: the start of the budget by time.monotonic(), before Ray was started. Blocks until about
    ``options.budget_s`` after it at most. Raises ConfigurationError for a host that Ray does not have, BootstrapError
    if a host does not answer.
    """
    started = datetime.now(timezone.utc)
    deadline = began + options.budget_s - _SHUTDOWN_S
    report("examining the hosts", 0.0)
    nodes = _nodes(options.hosts)
    site = _site(nodes, options.hosts is not None, deadline)
    rows = [(row, device) for device in options.devices for row in options.rows if device in row.devices]
    all_series = [Series(row, device, reason=obstacle(row, device, site)) for row, device in rows]
    placement = Placement((nodes[0]["NodeID"], nodes[1]["NodeID"]), _gpus(options, site))
    made: list[Pair] = []
    try:
        _start(all_series, placement, made, report, began + options.budget_s * _START_SHARE)
        gpu_free = min((r.gpu_free for pair in made for r in pair.ready if r.gpu), default=0)
        sampler = Sampler(options, all_series, site, MemoryLimits.of(site, gpu_free), deadline, report)
        sampler.run()
        names = sorted({r.gpu_name for pair in made for r in pair.ready if r.gpu_name})
    finally:
        for pair in made:
            pair.end("the run has ended")
    return Run(
        version=__version__,
        started=started.isoformat(timespec="seconds"),
        command=command,
        scope="one host" if site.same_host else "two hosts",
        machine=_machine(site, names),
        seconds=round(time.monotonic() - began, 1),
        sizes=options.sizes,
        rows=tuple(_row_result(series, sampler) for series in all_series),
        cells=sampler.cells,
    )


def _row_result(series: Series, sampler: Sampler) -> RowResult:
    row = series.row
    cells = [cell for cell in sampler.cells if (cell.row, cell.device) == (row.name, series.device)]
    return RowResult(
        row=row.name,
        device=series.device,
        kind=KIND_TEXT[row.kind],
        what=row.what,
        published=row.published,
        reason=series.reason if all(cell.median_s is None for cell in cells) else None,
        comparable=not row.one_gpu,
    )


# --- hosts ---------------------------------------------------------------------------------------------------------


def _nodes(hosts: tuple[str, str] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Ray's description of both ends' nodes: this process's node twice, unless hosts are named."""
    alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    if hosts is None:
        here = ray.get_runtime_context().get_node_id()
        node = next(node for node in alive if node["NodeID"] == here)
        return node, node
    return find_node(hosts[0], alive), find_node(hosts[1], alive)


def find_node(host: str, nodes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The node with that id, address or host name. Raises ConfigurationError, naming the existing ones."""
    keys = ("NodeID", "NodeManagerAddress", "NodeManagerHostname", "NodeName")
    found = [node for node in nodes if host in (node.get(key) for key in keys)]
    if len(found) == 1:
        return found[0]
    known = ", ".join(f"{node['NodeManagerAddress']} ({node['NodeManagerHostname']})" for node in nodes)
    if found:
        ids = ", ".join(node["NodeID"] for node in found)
        raise ConfigurationError(f"several Ray nodes match {host!r}; name one by its id: {ids}")
    raise ConfigurationError(f"no Ray node {host!r}; nodes: {known}")


def _site(nodes: tuple[dict[str, Any], dict[str, Any]], elsewhere: bool, deadline: float) -> Site:
    if not elsewhere:
        host = _with_node(describe_host(nodes[0]["NodeManagerAddress"]), nodes[0])
        return Site(host, host)
    asked = []
    for node in nodes:
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        task = ray.remote(describe_host).options(num_cpus=0, scheduling_strategy=there)
        asked.append(task.remote(node["NodeManagerAddress"]))
    try:
        hosts: list[Host] = pairs.get(asked, min(60.0, deadline - time.monotonic()))
    except Failed as failure:
        raise BootstrapError(f"cannot examine both hosts: {failure}") from failure
    return Site(*map(_with_node, hosts, nodes))


def _with_node(host: Host, node: dict[str, Any]) -> Host:
    has = node["Resources"]
    return replace(host, gpus=int(has.get("GPU", 0)), store_bytes=int(has.get("object_store_memory", 0)))


def _gpus(options: Options, site: Site) -> tuple[str | None, str | None]:
    if options.hosts is not None or not site.has_gpus:
        return None, None
    visible = [part for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part]
    numbers = visible or [str(index) for index in range(site.a.gpus)]
    return numbers[0], numbers[1 if site.a.gpus > 1 and len(numbers) > 1 else 0]


# --- actors -----------------------------------------------------------------------------------------------------------


def _start(
    all_series: Sequence[Series], placement: Placement, made: list[Pair], report: Report, deadline: float
) -> None:
    """Start the actors of every series that can run; appends each pair to ``made`` as soon as it exists."""
    needed: dict[str, list[Series]] = {}
    for series in all_series:
        if series.reason is None:
            needed.setdefault(series.row.actors, []).append(series)
    for name, its in needed.items():
        pair = pairs.start(name, its[0].row, any(series.device == "cuda" for series in its), placement)
        made.append(pair)
        for series in its:
            series.pair = pair
    for up, pair in enumerate(made, 1):
        pair.await_start(deadline)
        report(f"starting actors: {up} of {len(made)} pairs", 0.0)
        if pair.failed:
            pair.end(pair.failed)  # one that still starts would disturb the others
            for series in needed[pair.name]:
                series.reason = pair.failed
    report("actors are up", 0.0)


def _machine(site: Site, gpu_names: Sequence[str]) -> tuple[str, ...]:
    end = site.a.endpoint
    hosts = {host.endpoint.boot_id: host for host in (site.a, site.b)}.values()
    facts = [f"{p.cores} cores, {show_size(p.free_bytes)} of memory free, {p.processor}" for p in hosts]
    if gpu_names:
        facts.append(f"{site.a.gpus} x {', '.join(gpu_names)}, CUDA {end.cuda_version}")
    facts.append(f"RDMA adapters: {', '.join(hca.name for hca in end.hcas) or 'none'}")
    facts.append(f"Python {end.python_version}, torch {end.torch_version}, Ray {ray.__version__}")
    return tuple(facts)
