"""Manifests for the tests: with every option there is, and the samples among the examples."""

from __future__ import annotations

from typing import Any

from raytorchrpc.manifest import ClusterOptions, JobOptions, build

IMAGE = "registry.example/team/raytorchrpc:1.0"
BASE: dict[str, Any] = {"name": "train", "image": IMAGE, "ray_version": "2.60.0"}
RDMA: dict[str, Any] = {"gpus": 8, "rdma_resource": "rdma/hca_shared_devices_a", "rdma_count": 2, "host_network": True}


def everything(kind: str) -> list[dict[str, Any]]:
    """Manifests that have, together, every field that one can have."""
    if kind == "RayCluster":
        return [build(ClusterOptions(**BASE, **more)) for more in ({}, RDMA)]
    return [build(JobOptions(**BASE, entrypoint="python train.py", **more)) for more in ({}, RDMA)]


#: File in examples -> the command that writes it.
SAMPLES = {
    "kubernetes/rayjob.yaml": [
        *("rayjob", "--name", "train", "--image", IMAGE, "--ray-version", "2.60.0"),
        *("--entrypoint", "python /opt/job/train.py"),
    ],
    "kubernetes/raycluster.yaml": [
        *("raycluster", "--name", "actors", "--image", IMAGE, "--ray-version", "2.60.0"),
        *("--workers", "4", "--env", "RAYTORCHRPC_RPC_TIMEOUT_S=120"),
    ],
    # Training over NCCL: a process group of 32 ranks, one for each GPU.
    "kubernetes/rayjob-nccl.yaml": [
        *("rayjob", "--name", "ddp", "--image", IMAGE, "--ray-version", "2.60.0"),
        *("--workers", "4", "--gpus", "8", "--cpus", "64", "--memory", "512Gi", "--shm", "128Gi"),
        *("--rdma-resource", "rdma/hca_shared_devices_a", "--host-network"),
        *("--entrypoint", "python /opt/job/ddp.py --workers 32 --backend nccl"),
    ],
    "async_rl/rayjob.yaml": [
        *("rayjob", "--name", "async-rl", "--image", IMAGE, "--ray-version", "2.60.0", "--workers", "2"),
        *("--entrypoint", "python /opt/async_rl/train.py --nodes 2 --environments 12 --judges 3"),
    ],
}
