"""What each lane can carry between two members, and why not: one rule for each, of what both published.

A new lane is one more entry of ``LANES``.
"""

from __future__ import annotations

from dataclasses import dataclass

from raytorchrpc.lanes.registry import TRAFFIC_TEXT, Traffic
from raytorchrpc.lanes.torchrpc import backends
from raytorchrpc.lanes.torchrpc.backends import AgentPlan
from raytorchrpc.topology import rdma
from raytorchrpc.topology.device_map import gpu_count
from raytorchrpc.topology.endpoint import Endpoint


@dataclass(frozen=True)
class Pair:
    """What a lane's rule looks at. A rule must give the same answer with a and b exchanged."""

    a: Endpoint
    b: Endpoint
    agent_a: AgentPlan
    agent_b: AgentPlan
    named: tuple[str, ...] = ()
    """Lanes that the configuration asks for by name."""
    tcp: bool = False
    """It wants TCP even where Unix sockets could be used."""
    tls: bool = False
    """What crosses a network must be encrypted."""


#: Why a lane cannot carry something (str), or how it does and why (tuple).
Verdict = str | tuple[str, str]


def socket_rule(pair: Pair, traffic: Traffic) -> Verdict:
    a, b = pair.a, pair.b
    if pair.tcp:
        return "tcp socket", "asked for by always_tcp"
    if a.shares(b, "net"):  # Linux's abstract socket names belong to the network namespace, not to the files
        return "unix socket", "same host and network namespace"
    why = "same host, different network namespaces" if a.same_host(b) else "different hosts"
    return "tcp socket", why


def shm_rule(pair: Pair, traffic: Traffic) -> Verdict:
    obstacle = _separate(pair)
    return obstacle or ("shared memory", "same host: one copy, then a view of the memory it arrived in")


def cuda_ipc_rule(pair: Pair, traffic: Traffic) -> Verdict:
    a, b = pair.a, pair.b
    obstacle = _separate(pair)
    if obstacle:
        return obstacle
    bare = sorted(e.name for e in (a, b) if gpu_count(e) == 0)
    if bare:
        return _bare_text(bare)
    if _any_slice(pair):
        return "CUDA cannot share memory between MIG instances"
    return "mapped GPU memory", "same host: one copy from GPU to GPU"


def _in_the_clear(pair: Pair) -> str | None:
    """Why a lane that cannot encrypt is left out; None if it is not."""
    if not pair.tls or pair.a.same_network(pair.b):
        return None
    return "GroupConfig(tls=True), and it does not encrypt what it sends over a network"


def nixl_rule(pair: Pair, traffic: Traffic) -> Verdict:
    a, b = pair.a, pair.b
    if exposed := _in_the_clear(pair):
        return exposed
    bare = sorted(e.name for e in (a, b) if gpu_count(e) == 0) if traffic == "cuda" else []
    if bare:
        return _bare_text(bare)
    named = "nixl" in pair.named
    if a.same_host(b) and not named:
        return "same host: used only where GroupConfig.lanes names it, and none that is meant for one host"
    obstacle = "same host" if a.same_host(b) else rdma.ucx_obstacle(a, b, cuda=traffic == "cuda")
    if obstacle and not named:
        return obstacle
    without = sorted(e.name for e in (a, b) if not e.nixl)
    if without:
        who = f" at {without[0]}" if len(without) == 1 else ""
        return f"NIXL is not installed for torch{who}: pip install 'raytorchrpc[nixl]'"
    if named:
        return ("one-sided reads over what UCX finds" if obstacle else "one-sided reads by RDMA"), "asked for by name"
    return "one-sided reads by RDMA", "different hosts, both with adapters that UCX can use"


def _any_slice(pair: Pair) -> bool:
    return any(" MIG " in gpu.name for e in (pair.a, pair.b) for gpu in e.gpus)


def nccl_rule(pair: Pair, traffic: Traffic) -> Verdict:
    a, b = pair.a, pair.b
    if exposed := _in_the_clear(pair):
        return exposed
    bare = sorted(e.name for e in (a, b) if gpu_count(e) == 0)
    if bare:
        return _bare_text(bare)
    if _any_slice(pair):
        return "NCCL does not work on MIG instances"
    mine, its = ({gpu.uuid for gpu in e.gpus} for e in (a, b))
    if len(mine | its) == 1 and mine != {""}:
        return "both members are on one GPU, and NCCL needs two"
    direct = rdma.nccl_obstacle(a, b)
    if "nccl" in pair.named:
        if a.same_host(b):
            return "NCCL within the host", "asked for by name"
        return ("NCCL over GPUDirect RDMA" if direct is None else "NCCL over the network"), "asked for by name"
    if a.same_host(b):
        return "same host: used only where GroupConfig.lanes names it and not cuda_ipc"
    if direct is not None:
        return f"no GPUDirect RDMA by NCCL either: {direct}"
    if backends.channel_between(a, b, pair.agent_a, pair.agent_b, cuda=True) == "cuda_gdr":
        return "torchrpc has GPUDirect RDMA between these two"
    return "NCCL over GPUDirect RDMA", "GPUDirect RDMA on both sides, by adapters that torchrpc cannot use"


def _separate(pair: Pair) -> str | None:
    """Why two processes cannot map each other's memory through /proc; None if they can."""
    a, b = pair.a, pair.b
    if not a.same_host(b):
        return "different hosts"
    if not a.shares(b, "pid"):
        return "same host, but different containers (pid namespaces)"
    if not a.shares(b, "user"):
        return "same host, but different user namespaces"
    if a.uid != b.uid:
        return f"same host, but different users (uid {min(a.uid, b.uid)} and {max(a.uid, b.uid)})"
    return None


def _bare_text(bare: list[str]) -> str:
    who = "neither member has a GPU" if len(bare) == 2 else f"{bare[0]} has no GPU"
    return f"{who}; map it to 'cpu' with device_maps, or move the tensor to the CPU first"


def torchrpc_rule(pair: Pair, traffic: Traffic) -> Verdict:
    if exposed := _in_the_clear(pair):
        return exposed
    transport = backends.transport_between(pair.a, pair.b, pair.agent_a, pair.agent_b)
    if transport is None:
        return "the two agents have no TensorPipe transport in common"
    if traffic == "calls":
        return f"torchrpc over {transport}", "reaches every member; carries RRefs and autograd"
    if traffic == "cuda":
        bare = sorted(e.name for e in (pair.a, pair.b) if gpu_count(e) == 0)
        if bare:
            return _bare_text(bare)
    channel = backends.channel_between(pair.a, pair.b, pair.agent_a, pair.agent_b, cuda=traffic == "cuda")
    if channel is None:
        return f"the two agents have no TensorPipe channel for {TRAFFIC_TEXT[traffic]} in common"
    return f"torchrpc over {transport}, channel {channel}", backends.CHANNEL_REASONS[channel]


def nng_rule(pair: Pair, traffic: Traffic) -> Verdict:
    how = "ipc" if pair.a.shares(pair.b, "net") and not pair.tcp else "tcp"
    return f"nng over {how}", "reaches every member; slower than the others"
