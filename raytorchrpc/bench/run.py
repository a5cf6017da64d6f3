"""A whole run on an initialised Ray: describe the hosts, measure, end the actors."""

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
from raytorchrpc.bench.cases import Options
from raytorchrpc.bench.links import Failed, get
from raytorchrpc.bench.results import RowResult, Run, show_size
from raytorchrpc.bench.rows import KIND_TEXT
from raytorchrpc.bench.schedule import PatternsRunner, Report, Runner, SizesRunner
from raytorchrpc.bench.site import Host, Site, describe_host
from raytorchrpc.bench.teams import Place
from raytorchrpc.errors import BootstrapError, ConfigurationError


def measure(options: Options, command: str, report: Report) -> Run:
    """Take all measurements. Always ends the actors it started.

    Blocks until the actors are up, and then for about ``options.budget_s`` at most. Raises ConfigurationError for a
    host that Ray does not have, BootstrapError if a host does not answer.
    """
    started, began = datetime.now(timezone.utc), time.monotonic()
    report("examining the hosts", 0.0)
    nodes = _nodes(options.hosts)
    site = _site(nodes, options.hosts is not None)
    patterns = any(case.pattern for case in options.cases)
    nodes_used = [node["NodeID"] for node in nodes]
    place = Place(nodes_used, _gpus(options, site, patterns), frozenset(site.a.endpoint.tensorpipe_channels))
    runner: Runner = (PatternsRunner if patterns else SizesRunner)(options, site, place, report)
    try:
        runner.run()
        names = sorted({ready.gpu_name for team in runner.teams for ready in team.ready if ready.gpu_name})
    finally:
        runner.end()
    return Run(
        version=__version__,
        started=started.isoformat(timespec="seconds"),
        command=command,
        scope="one host" if site.same_host else "two hosts",
        machine=_machine(site, names),
        seconds=round(time.monotonic() - began, 1),
        rows=_row_results(options, runner),
        cells=tuple(runner.cells),
    )


def _row_results(options: Options, runner: Runner) -> tuple[RowResult, ...]:
    found = []
    for device in options.devices:
        for row in (row for row in options.rows if device in row.devices):
            reasons = {cell.reason for cell in runner.cells if (cell.row, cell.device) == (row.name, device)}
            known: Any = {"what": row.what, "published": row.published, "comparable": not row.one_gpu}
            reason = reasons.pop() if len(reasons) == 1 else None
            found.append(RowResult(row=row.name, device=device, kind=KIND_TEXT[row.kind], reason=reason, **known))
    return tuple(found)


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


def _site(nodes: tuple[dict[str, Any], dict[str, Any]], elsewhere: bool) -> Site:
    if not elsewhere:
        host = _with_node(describe_host(nodes[0]["NodeManagerAddress"]), nodes[0])
        return Site(host, host)
    asked = []
    for node in nodes:
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        task = ray.remote(describe_host).options(num_cpus=0, scheduling_strategy=there)
        asked.append(task.remote(node["NodeManagerAddress"]))
    try:
        hosts: list[Host] = get(asked, 60.0)
    except Failed as failure:
        raise BootstrapError(f"cannot examine both hosts: {failure}") from failure
    return Site(*map(_with_node, hosts, nodes))


def _with_node(host: Host, node: dict[str, Any]) -> Host:
    has = node["Resources"]
    return replace(host, gpus=int(has.get("GPU", 0)), store_bytes=int(has.get("object_store_memory", 0)))


def _gpus(options: Options, site: Site, patterns: bool) -> Sequence[str | None]:
    """CUDA_VISIBLE_DEVICES of the actors, by rank: of patterns all GPUs, else at most two."""
    if not site.has_gpus:
        return ()
    if options.hosts is not None:
        return None, None
    visible = [part for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part]
    numbers = (visible or [str(index) for index in range(site.a.gpus)])[: site.a.gpus]
    return numbers if patterns else (numbers * 2)[:2] if len(numbers) == 1 else numbers[:2]


def _machine(site: Site, gpu_names: Sequence[str]) -> tuple[str, ...]:
    end = site.a.endpoint
    hosts = {host.endpoint.boot_id: host for host in (site.a, site.b)}.values()
    facts = [f"{p.cores} cores, {show_size(p.free_bytes)} of memory free, {p.processor}" for p in hosts]
    if gpu_names:
        facts.append(f"{site.a.gpus} x {', '.join(gpu_names)}, CUDA {end.cuda_version}")
    facts.append(f"RDMA adapters: {', '.join(hca.name for hca in end.hcas) or 'none'}")
    facts.append(f"Python {end.python_version}, torch {end.torch_version}, Ray {ray.__version__}")
    return tuple(facts)
