"""Applies the rules: those of one process's evidence, and those that compare the evidence of several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from raytorchrpc.config import GroupConfig
from raytorchrpc.doctor import devices, machine
from raytorchrpc.doctor.report import LEVELS, Evidence, Finding, NodeReport, Report, note, ok, problem, some, warning
from raytorchrpc.errors import RayTorchRpcError
from raytorchrpc.lanes.registry import TRAFFIC
from raytorchrpc.routing import planner
from raytorchrpc.topology import nccl_env, rdma
from raytorchrpc.topology.endpoint import Endpoint

#: In display order.
RULES = (machine.software, devices.gpus, devices.adapters, devices.nccl, machine.memory, machine.network)


def examine_evidence(evidence: Evidence) -> tuple[Finding, ...]:
    """Apply every rule to one process's evidence. Pure."""
    return tuple(finding for rule in RULES for finding in rule(evidence))


def make_report(evidence: Sequence[Evidence], version: str) -> Report:
    """Report on one or several processes, named after their endpoints. Pure."""
    nodes = tuple(
        NodeReport(
            name=each.endpoint.name or each.endpoint.hostname or "this machine",
            findings=examine_evidence(each),
            nccl=devices.nccl_values(each),
            evidence=each,
        )
        for each in evidence
    )
    jointly = tuple(together(evidence)) if len(evidence) > 1 else ()
    levels = [finding.level for findings in (*(node.findings for node in nodes), jointly) for finding in findings]
    level = max(levels, key=LEVELS.index, default=LEVELS[0])
    return Report(version=version, level=level, nodes=nodes, together=jointly)


# --- several processes ----------------------------------------------------------------------------------------------


def together(evidence: Sequence[Evidence]) -> Iterator[Finding]:
    """Findings about the routes between processes, and about what does not fit together. Pure."""
    endpoints = {each.endpoint.name: each.endpoint for each in evidence}
    yield from _routes(endpoints)
    yield from _containers(endpoints)
    yield from _fabrics(endpoints)
    yield from _gid_indices(endpoints)
    yield from _tokens(evidence)


def _routes(endpoints: dict[str, Endpoint]) -> Iterator[Finding]:
    """What ``init_group`` would decide, without settings, for members in these processes."""
    try:
        plan = planner.plan(endpoints, GroupConfig())
    except RayTorchRpcError as error:
        yield problem(
            "together-no-group",
            str(error),
            "members on these nodes cannot form a group",
            "use one torch release everywhere, and addresses that the other nodes reach",
        )
        return
    routes: dict[str, list[str]] = {}
    for a, b in combinations(endpoints, 2):
        route = plan.route(a, b)
        how = [f"{t}: {lanes[0].lane} ({lanes[0].how})" for t in TRAFFIC if (lanes := route.lanes(t))]
        routes.setdefault("; ".join(how), []).append(f"{a} - {b}")
    for lanes_used, pairs in routes.items():
        yield ok("together-routes", f"{some(pairs)}: {lanes_used}")
    for text in plan.unused:
        yield warning(
            "together-slower", text, "tensors between them take longer than they need", "remove the cause that is named"
        )


def _containers(endpoints: dict[str, Endpoint]) -> Iterator[Finding]:
    apart = [
        f"{a.name} and {b.name}"
        for a, b in combinations(endpoints.values(), 2)
        if a.gpus and b.gpus and a.same_host(b) and not a.shares(b, "pid", "mnt")
    ]
    if apart:
        yield warning(
            "together-containers-apart",
            f"one host, different containers, GPUs in both: {some(apart)}",
            "TensorPipe's cuda_ipc can abort the process there, and no memory can be mapped; routing excludes both, "
            "and CUDA tensors between them go through CPU memory and the network",
            "put members that exchange CUDA tensors into one container with all of the host's GPUs",
        )


def _fabrics(endpoints: dict[str, Endpoint]) -> Iterator[Finding]:
    with_rdma = [end for end in endpoints.values() if rdma.usable_ports(end)]
    without = [end.name for end in endpoints.values() if end not in with_rdma]
    if with_rdma and without:
        yield warning(
            "together-rdma-uneven",
            f"usable RDMA adapters on {len(with_rdma)} of {len(endpoints)}; none on {some(without)}",
            "tensors to and from the others use TCP",
            "if they should have RDMA, their own findings say what is missing",
        )


def _gid_indices(endpoints: dict[str, Endpoint]) -> Iterator[Finding]:
    groups: dict[str, list[str]] = {}
    for end in endpoints.values():
        value = nccl_env.advise(end)[nccl_env.GID].value
        if value is not None:
            groups.setdefault(value, []).append(end.name)
    if len(groups) > 1:
        each = "; ".join(f"{value} on {some(names)}" for value, names in sorted(groups.items()))
        yield note(
            "together-gid-index-differs",
            f"the right GID index differs: {each}",
            "one NCCL_IB_GID_INDEX for the whole job would be wrong on some nodes; each process sets its own",
        )


def _tokens(evidence: Sequence[Evidence]) -> Iterator[Finding]:
    on = {each.ray_token == "on" for each in evidence if each.ray_token is not None}
    if len(on) > 1:
        off = [each.endpoint.name for each in evidence if each.ray_token != "on"]
        yield warning(
            "together-token-uneven",
            f"Ray's token authentication is off on {some(off)} and on elsewhere",
            "processes started there on their own cannot join the cluster",
            "set RAY_AUTH_MODE=token and the same token on every node",
        )
