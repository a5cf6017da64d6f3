"""A whole run, on a Ray that is up: look around, start the actors, measure, end them."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytorchrpc import __version__
from raytorchrpc.bench import pairs
from raytorchrpc.bench.options import Options, show_size
from raytorchrpc.bench.pairs import Failed, Pair, Placement, Track
from raytorchrpc.bench.results import RowResult, Run
from raytorchrpc.bench.rows import KIND_TEXT
from raytorchrpc.bench.schedule import Measuring, Tell
from raytorchrpc.bench.site import Place, Room, Site, look_around, obstacle
from raytorchrpc.errors import BootstrapError, ConfigurationError

#: Of the budget, the most that starting the actors may take.
_STARTING = 0.6
#: Kept back for the end of the actors and of Ray (seconds).
_ENDING_S = 6.0


def measure(options: Options, command: str, tell: Tell, *, began: float) -> Run:
    """Take all samples. Leaves no actor behind, however it ends.

    ``began``: of time.monotonic(), from when the budget counts: before Ray was started.

    Blocks until about ``options.budget_s`` after that at most. Raises ConfigurationError for a host that is none of
    Ray's, BootstrapError if a host does not answer.
    """
    started = datetime.now(timezone.utc)
    deadline = began + options.budget_s - _ENDING_S
    tell("looking around", 0.0)
    nodes = _nodes(options.hosts)
    site = _site(nodes, options.hosts is not None, deadline)
    tracks = _tracks(options, site)
    placement = Placement((nodes[0]["NodeID"], nodes[1]["NodeID"]), _gpus(options, site))
    made: list[Pair] = []
    try:
        _start(tracks, placement, made, tell, began + options.budget_s * _STARTING)
        gpu_free = min((r.gpu_free for pair in made for r in pair.ready if r.gpu), default=0)
        measuring = Measuring(options, tracks, site, Room.of(site, gpu_free), deadline, tell)
        measuring.run()
        names = sorted({r.gpu_name for pair in made for r in pair.ready if r.gpu_name})
    finally:
        for pair in made:
            pair.end("the run is over")
    return Run(
        version=__version__,
        started=started.isoformat(timespec="seconds"),
        command=command,
        scope="one host" if site.same_host else "two hosts",
        machine=_machine(site, names),
        seconds=round(time.monotonic() - began, 1),
        sizes=options.sizes,
        rows=tuple(_row_result(track, measuring) for track in tracks),
        cells=tuple(measuring.cells),
    )


def _row_result(track: Track, measuring: Measuring) -> RowResult:
    row = track.row
    any_figure = any(
        cell.median_s is not None for cell in measuring.cells if (cell.row, cell.device) == (row.name, track.device)
    )
    return RowResult(
        row=row.name,
        device=track.device,
        kind=KIND_TEXT[row.kind],
        what=row.what,
        published=row.published,
        reason=None if any_figure else track.reason,
        comparable=not row.one_gpu,
    )


# --- where ---------------------------------------------------------------------------------------------------------


def _nodes(hosts: tuple[str, str] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both ends' nodes, as Ray describes them: this process's own, twice, unless hosts are named."""
    alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    if hosts is None:
        here = ray.get_runtime_context().get_node_id()
        node = next(node for node in alive if node["NodeID"] == here)
        return node, node
    return find_node(hosts[0], alive), find_node(hosts[1], alive)


def find_node(host: str, nodes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The node with that id, address or host name. Raises ConfigurationError, naming those there are."""
    keys = ("NodeID", "NodeManagerAddress", "NodeManagerHostname", "NodeName")
    found = [node for node in nodes if host in (node.get(key) for key in keys)]
    if len(found) == 1:
        return found[0]
    known = ", ".join(f"{node['NodeManagerAddress']} ({node['NodeManagerHostname']})" for node in nodes)
    if found:
        ids = ", ".join(node["NodeID"] for node in found)
        raise ConfigurationError(f"several Ray nodes answer to {host!r}; name one by its id: {ids}")
    raise ConfigurationError(f"no Ray node {host!r}; nodes: {known}")


def _site(nodes: tuple[dict[str, Any], dict[str, Any]], elsewhere: bool, deadline: float) -> Site:
    if not elsewhere:
        place = _with_node(look_around(nodes[0]["NodeManagerAddress"]), nodes[0])
        return Site(place, place)
    look = ray.remote(look_around)
    asked = [
        look.options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(
            node["NodeManagerAddress"]
        )
        for node in nodes
    ]
    try:
        places: list[Place] = pairs.get(asked, min(60.0, deadline - time.monotonic()))
    except Failed as failure:
        raise BootstrapError(f"cannot look at both hosts: {failure}") from failure
    return Site(_with_node(places[0], nodes[0]), _with_node(places[1], nodes[1]))


def _with_node(place: Place, node: dict[str, Any]) -> Place:
    has = node["Resources"]
    values = {"gpus": int(has.get("GPU", 0)), "store_bytes": int(has.get("object_store_memory", 0))}
    return Place(**{**vars(place), **values})


def _gpus(options: Options, site: Site) -> tuple[str | None, str | None]:
    if options.hosts is not None or not site.has_gpus:
        return None, None
    visible = [part for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part]
    numbers = visible or [str(index) for index in range(site.a.gpus)]
    return numbers[0], numbers[1 if site.a.gpus > 1 and len(numbers) > 1 else 0]


# --- who -----------------------------------------------------------------------------------------------------------


def _tracks(options: Options, site: Site) -> list[Track]:
    tracks = []
    for device in options.devices:
        for row in options.rows:
            if device in row.devices:
                tracks.append(Track(row, device, reason=obstacle(row, device, site)))
    return tracks


def _start(tracks: Sequence[Track], placement: Placement, made: list[Pair], tell: Tell, deadline: float) -> None:
    """Bring up the actors of every track that can run; ``made`` gets each pair as soon as it exists."""
    needed: dict[str, list[Track]] = {}
    for track in tracks:
        if track.reason is None:
            needed.setdefault(track.row.actors, []).append(track)
    for name, its in needed.items():
        pair = pairs.start(name, [track.row for track in its], any(t.device == "cuda" for t in its), placement)
        made.append(pair)
        for track in its:
            track.pair = pair
    for up, pair in enumerate(pairs.await_ready(list(made), deadline), 1):
        tell(f"starting actors: {up} of {len(made)} pairs", 0.0)
        if pair.failed:
            pair.end(pair.failed)  # one that is still on its way would disturb the others
        for track in tracks:
            if track.pair is pair and pair.failed:
                track.reason = pair.failed
    tell("actors are up", 0.0)


def _machine(site: Site, gpu_names: Sequence[str]) -> tuple[str, ...]:
    places = {place.endpoint.boot_id: place for place in (site.a, site.b)}.values()
    facts = [f"{p.cores} cores, {show_size(p.free_bytes)} of memory free, {p.processor}" for p in places]
    if gpu_names:
        facts.append(f"{site.a.gpus} x {', '.join(gpu_names)}, CUDA {site.a.endpoint.cuda_version}")
    adapters = ", ".join(hca.name for hca in site.a.endpoint.hcas)
    facts.append(f"RDMA adapters: {adapters or 'none'}")
    end = site.a.endpoint
    facts.append(f"Python {end.python_version}, torch {end.torch_version}, Ray {ray.__version__}")
    return tuple(facts)
