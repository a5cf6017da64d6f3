"""torch, Ray, NIXL, and where the process runs."""

from __future__ import annotations

from raytorchrpc.doctor.evidence import Evidence
from raytorchrpc.doctor.findings import Finding
from raytorchrpc.topology import rdma


def findings(evidence: Evidence) -> list[Finding]:
    """Pure: the same evidence gives the same findings."""
    found = [*_torch(evidence), *_ray(evidence), *_nixl(evidence)]
    if evidence.container:
        found.append(Finding(id="container", level="ok", seen=f"inside a container ({evidence.container})"))
    return found


def _torch(evidence: Evidence) -> list[Finding]:
    endpoint = evidence.endpoint
    if not endpoint.torch_version:  # a tree of files
        return []
    if "uv" not in endpoint.tensorpipe_transports:
        return [
            Finding(
                id="torch-without-rpc",
                level="problem",
                seen=f"torch {endpoint.torch_version} has no torchrpc (TensorPipe)",
                meaning="no group forms here",
                remedy="install torch from PyPI or download.pytorch.org, on Linux",
            )
        ]
    backends = ", ".join(endpoint.tensorpipe_transports), ", ".join(endpoint.tensorpipe_channels)
    cuda = f"CUDA {endpoint.cuda_version}" if endpoint.cuda_version else "no CUDA"
    seen = f"torch {endpoint.torch_version}, {cuda}; TensorPipe has {backends[0]}; {backends[1]}"
    return [Finding(id="torch", level="ok", seen=seen)]


def _ray(evidence: Evidence) -> list[Finding]:
    if evidence.ray_version is None:
        return []
    found = [Finding(id="ray", level="ok", seen=f"Ray {evidence.ray_version}")]
    if evidence.ray_token == "missing":
        found.append(
            Finding(
                id="ray-token-missing",
                level="problem",
                seen="Ray's token authentication is on here, and there is no token",
                meaning="this process can join no cluster",
                remedy="copy the cluster's token to ~/.ray/auth_token, or set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH",
            )
        )
    elif evidence.ray_token == "on":
        found.append(Finding(id="ray-token", level="ok", seen="Ray's token authentication is on"))
    elif evidence.ray_token == "off":
        found.append(
            Finding(
                id="ray-token-off",
                level="note",
                seen="Ray's token authentication is off in this process",
                meaning="whoever reaches the ports of an open cluster runs code on it, and gets groups' secrets; a "
                "local ray.init() turns it on by itself",
                remedy="RAY_AUTH_MODE=token for ray start, for drivers and for jobs; `ray get-auth-token --generate` "
                "makes the token",
            )
        )
    return found


def _nixl(evidence: Evidence) -> list[Finding]:
    endpoint = evidence.endpoint
    if not endpoint.torch_version or not rdma.usable_ports(endpoint):
        return []
    if endpoint.nixl:
        return [Finding(id="nixl", level="ok", seen="NIXL is installed", lanes=("nixl",))]
    return [
        Finding(
            id="nixl-missing",
            level="note",
            seen="there are RDMA adapters, and NIXL is not installed",
            meaning="between hosts, CPU tensors go by torchrpc (TCP on RoCE), CUDA tensors by nccl or torchrpc",
            remedy="pip install 'raytorchrpc[nixl]' on every node",
            lanes=("nixl",),
        )
    ]
