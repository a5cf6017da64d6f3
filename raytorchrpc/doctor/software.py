"""Findings about torch, Ray, NIXL and the container."""

from __future__ import annotations

from collections.abc import Iterator

from raytorchrpc.doctor.evidence import Evidence
from raytorchrpc.doctor.findings import Finding, note, ok, problem
from raytorchrpc.topology import rdma


def findings(evidence: Evidence) -> Iterator[Finding]:
    """Pure: equal evidence gives equal findings."""
    if evidence.endpoint.torch_version:  # empty for a file tree
        yield _torch(evidence)
    if evidence.ray_version is not None:
        yield ok("ray", f"Ray {evidence.ray_version}")
        yield from _token(evidence)
    yield from _nixl(evidence)
    if evidence.container:
        yield ok("container", f"runs in a container ({evidence.container})")


def _torch(evidence: Evidence) -> Finding:
    endpoint = evidence.endpoint
    if "uv" not in endpoint.tensorpipe_transports:
        return problem(
            "torch-without-rpc",
            f"torch {endpoint.torch_version} was built without torch.distributed.rpc (TensorPipe)",
            "no group can form here",
            "install torch for Linux from PyPI or download.pytorch.org",
        )
    transports, channels = ", ".join(endpoint.tensorpipe_transports), ", ".join(endpoint.tensorpipe_channels)
    cuda = f"CUDA {endpoint.cuda_version}" if endpoint.cuda_version else "no CUDA"
    return ok("torch", f"torch {endpoint.torch_version}, {cuda}; TensorPipe has {transports}; {channels}")


def _token(evidence: Evidence) -> Iterator[Finding]:
    if evidence.ray_token == "missing":
        yield problem(
            "ray-token-missing",
            "Ray's token authentication is on, but this process has no token",
            "this process cannot join a cluster",
            "copy the cluster's token to ~/.ray/auth_token, or set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH",
        )
    elif evidence.ray_token == "on":
        yield ok("ray-token", "Ray's token authentication is on")
    elif evidence.ray_token == "off":
        yield note(
            "ray-token-off",
            "Ray's token authentication is off in this process",
            "whoever reaches the ports of an open cluster can run code on it and obtain the secrets of groups; a local "
            "ray.init() turns authentication on by itself",
            "set RAY_AUTH_MODE=token for ray start, drivers and jobs; `ray get-auth-token --generate` makes the token",
        )


def _nixl(evidence: Evidence) -> Iterator[Finding]:
    endpoint = evidence.endpoint
    if not endpoint.torch_version or not rdma.usable_ports(endpoint):
        return
    if endpoint.nixl:
        yield ok("nixl", "NIXL is installed")
    else:
        yield note(
            "nixl-missing",
            "there are RDMA adapters, but NIXL is not installed",
            "between hosts, CPU tensors use torchrpc (TCP on RoCE) and CUDA tensors nccl or torchrpc",
            "pip install 'raytorchrpc[nixl]' on every node",
        )
