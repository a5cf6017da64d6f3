"""What only several processes' evidence together shows: routing's own answer, and where two do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from raytorchrpc.config import GroupConfig
from raytorchrpc.doctor.evidence import Evidence
from raytorchrpc.doctor.findings import Finding, some
from raytorchrpc.errors import RayTorchRpcError
from raytorchrpc.lanes.registry import TRAFFIC
from raytorchrpc.routing import planner
from raytorchrpc.topology import nccl_env, rdma
from raytorchrpc.topology.endpoint import Endpoint


def findings(evidence: Sequence[Evidence]) -> list[Finding]:
    """Pure: the same evidence gives the same findings."""
    ends = {each.endpoint.name: each.endpoint for each in evidence}
    return [*_routes(ends), *_containers(ends), *_fabrics(ends), *_gid_indices(ends), *_tokens(evidence)]


def _routes(ends: dict[str, Endpoint]) -> list[Finding]:
    """Members with these processes' evidence, as ``init_group`` would see them, with no settings."""
    try:
        plan = planner.plan(ends, GroupConfig())
    except RayTorchRpcError as error:
        return [
            Finding(
                id="together-no-group",
                level="problem",
                seen=str(error),
                meaning="no group forms of members on these nodes",
                remedy="the same torch release everywhere, and addresses that the others reach",
            )
        ]
    ways: dict[str, list[str]] = {}
    for a, b in combinations(ends, 2):
        route = plan.route(a, b)
        how = [f"{t}: {lanes[0].lane} ({lanes[0].how})" for t in TRAFFIC if (lanes := route.lanes(t))]
        ways.setdefault("; ".join(how), []).append(f"{a} - {b}")
    return [Finding(id="together-routes", level="ok", seen=f"{some(pairs)}: {how}") for how, pairs in ways.items()]


def _containers(ends: dict[str, Endpoint]) -> list[Finding]:
    apart = [
        f"{a.name} and {b.name}"
        for a, b in combinations(ends.values(), 2)
        if a.gpus and b.gpus and a.same_host(b) and not a.shares(b, "pid", "mnt")
    ]
    if not apart:
        return []
    return [
        Finding(
            id="together-containers-apart",
            level="warning",
            seen=f"one host, different containers, GPUs in both: {some(apart)}",
            meaning="TensorPipe's cuda_ipc can abort the process there, and no memory can be mapped; routing leaves "
            "both out, and CUDA tensors between them go through CPU memory and the network",
            remedy="put members that exchange CUDA tensors into one container with all of the host's GPUs",
            lanes=("cuda_ipc", "torchrpc", "shm"),
        )
    ]


def _fabrics(ends: dict[str, Endpoint]) -> list[Finding]:
    with_rdma = [end for end in ends.values() if rdma.usable_ports(end)]
    found = []
    without = [end.name for end in ends.values() if end not in with_rdma]
    if with_rdma and without:
        found.append(
            Finding(
                id="together-rdma-uneven",
                level="warning",
                seen=f"usable RDMA adapters on {len(with_rdma)} of {len(ends)}; none on {some(without)}",
                meaning="tensors to and from the others go over TCP",
                remedy="if those are to have RDMA, their own findings say what is missing",
                lanes=("nixl", "nccl", "torchrpc"),
            )
        )
    for a, b in combinations(with_rdma, 2):
        obstacle = None if a.same_host(b) else rdma.ucx_obstacle(a, b, cuda=False)
        if obstacle:
            found.append(
                Finding(
                    id="together-no-common-fabric",
                    level="warning",
                    seen=f"{a.name} and {b.name} both have RDMA adapters: {obstacle}",
                    meaning="tensors between them go over TCP",
                    remedy="cable or configure one fabric; NCCL and UCX cannot join InfiniBand to RoCE",
                    lanes=("nixl", "nccl", "torchrpc"),
                )
            )
            break  # one pair tells what is wrong
    return found


def _gid_indices(ends: dict[str, Endpoint]) -> list[Finding]:
    found: dict[str, list[str]] = {}
    for end in ends.values():
        value = nccl_env.advise(end)[nccl_env.GID].value
        if value is not None:
            found.setdefault(value, []).append(end.name)
    if len(found) < 2:
        return []
    each = "; ".join(f"{value} on {some(names)}" for value, names in sorted(found.items()))
    return [
        Finding(
            id="together-gid-index-differs",
            level="note",
            seen=f"the right GID index differs: {each}",
            meaning="one NCCL_IB_GID_INDEX for the whole job would be wrong on some; each process sets its own",
            lanes=("nccl",),
        )
    ]


def _tokens(evidence: Sequence[Evidence]) -> list[Finding]:
    on = {each.ray_token == "on" for each in evidence if each.ray_token is not None}
    if len(on) < 2:
        return []
    off = [each.endpoint.name for each in evidence if each.ray_token != "on"]
    return [
        Finding(
            id="together-token-uneven",
            level="warning",
            seen=f"Ray's token authentication is off on {some(off)} and on elsewhere",
            meaning="processes that start there on their own cannot join",
            remedy="RAY_AUTH_MODE=token and the same token on every node",
        )
    ]
