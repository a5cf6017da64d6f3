"""The rules of this package's lanes: what each lane can carry between two members, and why not.

A rule is a pure function of what both members published. ``lanes.registry`` says which rule belongs to which lane.
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
    """The argument of a lane's rule. A rule must give the same answer with a and b exchanged."""

    a: Endpoint
    b: Endpoint
    agent_a: AgentPlan
    agent_b: AgentPlan
    named: tuple[str, ...] = ()
    """``GroupConfig.lanes``: the lanes that the configuration asks for by name."""
    tcp: bool = False
    """``GroupConfig.always_tcp``: use TCP even where Unix sockets would work."""
    tls: bool = False
    """``GroupConfig.tls``: whatever crosses a network must be encrypted."""
    carrier: str = ""
    """The lane that carries the calls; empty until that is decided."""


#: Why the lane cannot carry the traffic (str), or how it carries it and why it can (tuple).
Verdict = str | tuple[str, str]


def socket_rule(pair: Pair, traffic: Traffic) -> Verdict:
    a, b = pair.a, pair.b
    how = "unix socket" if _by_unix_socket(pair) else "tcp socket"
    if traffic != "calls":
        return _in_messages(pair, traffic, how)
    if pair.tcp:
        return how, "asked for by always_tcp"
    if a.shares(b, "net"):
        return how, "same host and network namespace"
    return how, "same host, different network namespaces" if a.same_host(b) else "different hosts"


def _by_unix_socket(pair: Pair) -> bool:
    # Abstract socket names belong to the network namespace, not to the file system.
    return not pair.tcp and pair.a.shares(pair.b, "net")


def _in_messages(pair: Pair, traffic: Traffic, how: str) -> Verdict:
    if traffic == "cpu":
        return how, "in the messages of calls"
    return _no_gpu(pair) or (how, "in the messages of calls, copied to the CPU and back to a GPU")


def shm_rule(pair: Pair, traffic: Traffic) -> Verdict:
    obstacle = _memory_obstacle(pair)
    return obstacle or ("shared memory", "same host: one copy, then a view of the memory it arrived in")


def cuda_ipc_rule(pair: Pair, traffic: Traffic) -> Verdict:
    if obstacle := _memory_obstacle(pair) or _no_gpu(pair):
        return obstacle
    if _has_mig_instance(pair):
        return "CUDA cannot share memory between MIG instances"
    return "mapped GPU memory", "same host: one copy from GPU to GPU"


def nixl_rule(pair: Pair, traffic: Traffic) -> Verdict:
    a, b, cuda = pair.a, pair.b, traffic == "cuda"
    if obstacle := _unencrypted(pair) or (_no_gpu(pair) if cuda else None):
        return obstacle
    named, backend = "nixl" in pair.named, rdma.nixl_backend(a)
    if a.same_host(b) and not named:
        return "same host: used only if GroupConfig.lanes names it and no lane for one host"
    no_rdma = "same host" if a.same_host(b) else rdma.nixl_obstacle(a, b, cuda=cuda)
    if no_rdma and (not named or rdma.nixl_backend(a) != rdma.nixl_backend(b)):
        return no_rdma
    without = sorted(e.name for e in (a, b) if not e.nixl)
    if without:
        where = f" in {without[0]}" if len(without) == 1 else ""
        return f"NIXL is not installed for torch{where}: pip install '.[nixl]' in a checkout"
    if named:
        return f"one-sided reads {f'over what {backend} selects' if no_rdma else 'by RDMA'}", "asked for by name"
    return "one-sided reads by RDMA", f"different hosts, both with adapters that {backend} can use"


def nccl_rule(pair: Pair, traffic: Traffic) -> Verdict:
    a, b = pair.a, pair.b
    if obstacle := _unencrypted(pair) or _no_gpu(pair):
        return obstacle
    if _has_mig_instance(pair):
        return "NCCL does not work on MIG instances"
    gpus_a, gpus_b = ({gpu.uuid for gpu in e.gpus} for e in (a, b))
    if len(gpus_a | gpus_b) == 1 and gpus_a != {""}:
        return "both members use one GPU, and NCCL needs two"
    direct = rdma.ucx_obstacle(a, b, cuda=True)
    if "nccl" in pair.named:
        if a.same_host(b):
            return "NCCL within the host", "asked for by name"
        return ("NCCL over GPUDirect RDMA" if direct is None else "NCCL over the network"), "asked for by name"
    if a.same_host(b):
        return "same host: used only if GroupConfig.lanes names it and not cuda_ipc"
    if direct is not None:
        return f"NCCL cannot use GPUDirect RDMA either: {direct}"
    if backends.channel_between(a, b, pair.agent_a, pair.agent_b, cuda=True) == "cuda_gdr":
        return "torchrpc uses GPUDirect RDMA between these members"
    return "NCCL over GPUDirect RDMA", "GPUDirect RDMA on both sides, with adapters that torchrpc cannot use"


def torchrpc_rule(pair: Pair, traffic: Traffic) -> Verdict:
    if obstacle := _unencrypted(pair):
        return obstacle
    transport = backends.transport_between(pair.a, pair.b, pair.agent_a, pair.agent_b)
    if transport is None:
        return "the two agents have no TensorPipe transport in common"
    if traffic == "calls":
        return f"torchrpc over {transport}", "reaches every member; carries RRefs and autograd"
    if traffic == "cuda" and (obstacle := _no_gpu(pair)):
        return obstacle
    if pair.carrier != "torchrpc" and "torchrpc" not in pair.named and _by_unix_socket(pair):
        return "same network namespace: used only if GroupConfig.lanes names it, as Unix sockets are as fast"
    channel = backends.channel_between(pair.a, pair.b, pair.agent_a, pair.agent_b, cuda=traffic == "cuda")
    if channel is None:
        return f"the two agents have no TensorPipe channel for {TRAFFIC_TEXT[traffic]} in common"
    return f"torchrpc over {transport}, channel {channel}", backends.CHANNEL_REASONS[channel]


def nng_rule(pair: Pair, traffic: Traffic) -> Verdict:
    how = f"nng over {'ipc' if _by_unix_socket(pair) else 'tcp'}"
    return (how, "reaches every member") if traffic == "calls" else _in_messages(pair, traffic, how)


def _unencrypted(pair: Pair) -> str | None:
    """Why a lane that cannot encrypt may not be used; None if it may."""
    if not pair.tls or pair.a.same_network(pair.b):
        return None
    return "GroupConfig(tls=True), and this lane does not encrypt what it sends over a network"


def _has_mig_instance(pair: Pair) -> bool:
    return any(" MIG " in gpu.name for e in (pair.a, pair.b) for gpu in e.gpus)


def _memory_obstacle(pair: Pair) -> str | None:
    """Why the two processes cannot map each other's memory through /proc; None if they can."""
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


def _no_gpu(pair: Pair) -> str | None:
    """Why two members cannot exchange CUDA tensors; None if both have a GPU."""
    names = sorted(end.name for end in (pair.a, pair.b) if gpu_count(end) == 0)
    if not names:
        return None
    if len(names) == 2:
        return "neither member has a GPU"
    return f"{names[0]} has no GPU; map it to 'cpu' with device_maps, or move the tensor to the CPU first"
