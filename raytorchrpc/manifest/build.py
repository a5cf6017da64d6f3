"""KubeRay's ``ray.io/v1`` objects as plain dicts, and their YAML."""

from __future__ import annotations

from typing import Any

import yaml

from raytorchrpc.manifest.options import ClusterOptions, JobOptions, bytes_of
from raytorchrpc.runtime_env import DEFAULTS

_SHM = "dshm"
#: Share of /dev/shm for Ray's object store; the rest is for NCCL.
_STORE_SHARE = 0.6


def ray_cluster(options: ClusterOptions) -> dict[str, Any]:
    """Build a ``RayCluster``."""
    return _object("RayCluster", options, _cluster_spec(options))


def ray_job(options: JobOptions) -> dict[str, Any]:
    """Build a ``RayJob`` with its own cluster, which is deleted after the job has ended."""
    spec = {
        "entrypoint": options.entrypoint,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": options.ttl_s,
        "rayClusterSpec": _cluster_spec(options),
    }
    return _object("RayJob", options, spec)


def _object(kind: str, options: ClusterOptions, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": options.name, "namespace": options.namespace}
    return {"apiVersion": "ray.io/v1", "kind": kind, "metadata": metadata, "spec": spec}


def to_yaml(manifest: dict[str, Any], options: ClusterOptions) -> str:
    """Serialise to YAML, with a comment at the top for what the fields cannot express."""
    notes = "".join(f"# {line}\n" for line in _notes(options))
    text: str = yaml.safe_dump(manifest, sort_keys=False, default_flow_style=False, width=110)
    return notes + text


def _notes(options: ClusterOptions) -> list[str]:
    notes = [
        f"Made by `raytorchrpc manifest`. The image has raytorchrpc, torch and Ray {options.ray_version}.",
        f"/dev/shm takes up to {options.shm} of the {options.memory} of each worker; so does shared memory of the",
        "group's members, which does not show there. See docs/kubernetes.md.",
    ]
    if options.rdma_resource and options.root:
        notes += [
            "Workers run as root: IPC_LOCK does nothing for another user, whose locked memory stays limited (8 MiB",
            "usually), and then RDMA fails or is not used.",
        ]
    elif options.rdma_resource:
        notes += [
            "Workers do not run as root, and IPC_LOCK does nothing for them: the container runtime of every node needs",
            "LimitMEMLOCK=infinity, or RDMA fails or is not used.",
        ]
    if options.host_network:
        notes += ["Workers use the nodes' network: at most one of them fits on a node, and not beside the head."]
    return notes


def _cluster_spec(options: ClusterOptions) -> dict[str, Any]:
    store = int(bytes_of(options.shm) * _STORE_SHARE)
    return {
        "rayVersion": options.ray_version,
        # KubeRay creates a Secret with the token and mounts it in every pod, including the submitter of a job.
        "authOptions": {"mode": options.auth},
        "headGroupSpec": {
            # No actors on the head, which runs the cluster's control processes.
            "rayStartParams": {"dashboard-host": "0.0.0.0", "num-cpus": "0", "num-gpus": "0"},
            "template": {"spec": _head_pod(options)},
        },
        "workerGroupSpecs": [
            {
                "groupName": "workers",
                "replicas": options.workers,
                "minReplicas": options.workers,
                "maxReplicas": options.workers,
                "rayStartParams": {"object-store-memory": str(store)},
                "template": {"spec": _worker_pod(options)},
            }
        ],
    }


def _head_pod(options: ClusterOptions) -> dict[str, Any]:
    ports = {"gcs-server": 6379, "dashboard": 8265, "client": 10001}
    wanted = {"cpu": str(options.head_cpus), "memory": options.head_memory}
    listed = [{"name": name, "containerPort": port} for name, port in ports.items()]
    return {"containers": [_container("ray-head", options, wanted, ports=listed)]}


def _worker_pod(options: ClusterOptions) -> dict[str, Any]:
    wanted = {"cpu": str(options.cpus), "memory": options.memory}
    if options.gpus:
        wanted["nvidia.com/gpu"] = str(options.gpus)
    if options.rdma_resource:
        wanted[options.rdma_resource] = str(options.rdma_count)
    container = _container("ray-worker", options, wanted)
    container["volumeMounts"] = [{"name": _SHM, "mountPath": "/dev/shm"}]
    if options.rdma_resource:
        user = {"runAsUser": 0} if options.root else {}
        container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}, **user}
    network = {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"} if options.host_network else {}
    # KubeRay's default is as large as all memory; with a smaller limit, only a full /dev/shm fails.
    volumes = [{"name": _SHM, "emptyDir": {"medium": "Memory", "sizeLimit": options.shm}}]
    return {**network, "containers": [container], "volumes": volumes}


def _container(name: str, options: ClusterOptions, wanted: dict[str, str], **more: Any) -> dict[str, Any]:
    # The raylet's environment, which every worker inherits before torch loads.
    variables = {**DEFAULTS, "RAY_AUTH_MODE": options.auth, **options.env}
    return {
        "name": name,
        "image": options.image,
        "env": [{"name": variable, "value": value} for variable, value in variables.items()],
        **more,
        # Equal limits and requests: devices require it, and such pods are evicted last.
        "resources": {"limits": dict(wanted), "requests": dict(wanted)},
    }
