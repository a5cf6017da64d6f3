"""Kubernetes manifests for KubeRay: ``RayJob`` and ``RayCluster`` of ``ray.io/v1``, from checked options."""

from __future__ import annotations

import re
from functools import partial
from importlib.metadata import version
from typing import Annotated, Any, ClassVar, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from raytorchrpc._compat import requirements
from raytorchrpc.errors import ConfigurationError
from raytorchrpc.runtime_env import DEFAULTS
from raytorchrpc.text import explain, size_in_bytes

_LABEL = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
_SIZE = r"^\d+(\.\d+)?([kMGT]|[KMGT]i)?$"
_GPU = "nvidia.com/gpu"
#: Least memory of a container with Ray and torch, in bytes.
_LEAST_MEMORY = 1 << 30
_SHM = "dshm"
#: Share of /dev/shm for Ray's object store; the rest is for NCCL.
_STORE_SHARE = 0.6
#: What the head, which runs no actors, may use.
_HEAD = {"cpu": "2", "memory": "8Gi"}
#: Seconds from the end of a job to the deletion of its cluster.
_TTL_S = 600


# --- options --------------------------------------------------------------------------------------------------------


def _about(placeholder: str, text: str, **limits: Any) -> Any:
    """Describes a field and limits its values. ``placeholder`` stands for the value in the help of the command line."""
    return Field(title=placeholder, description=text, **limits)


class ClusterOptions(BaseModel, frozen=True, extra="forbid"):
    """Options of a ``RayCluster``, or of the cluster of a ``RayJob``. Sizes are Kubernetes quantities."""

    kind: ClassVar[str] = "RayCluster"

    image: Annotated[
        str, _about("IMAGE", "Container image with raytorchrpc, torch and Ray.", pattern=r"^\w[\w./:@-]*$")
    ]
    # KubeRay derives longer names from this one.
    name: Annotated[str, _about("NAME", "Name of the job or cluster.", pattern=_LABEL, max_length=53)] = "raytorchrpc"
    namespace: Annotated[str, _about("NAME", "Kubernetes namespace.", pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")] = (
        "default"
    )
    ray_version: Annotated[
        str,
        _about("VERSION", "Ray's version in the image; default: the installed one.", pattern=r"^\d+\.\d+\.\d+\w*$"),
    ] = Field(default_factory=partial(version, "ray"))
    workers: Annotated[int, _about("N", "Number of worker pods, besides the head.", ge=1, le=10_000)] = 2
    gpus: Annotated[int, _about("N", "GPUs per worker.", ge=0, le=64)] = 0
    cpus: Annotated[int, _about("N", "CPUs per worker.", ge=1, le=1024)] = 8
    memory: Annotated[str, _about("SIZE", "Memory per worker, including /dev/shm.", pattern=_SIZE)] = "32Gi"
    shm: Annotated[str, _about("SIZE", "Size of /dev/shm per worker; counts as its memory.", pattern=_SIZE)] = "8Gi"
    rdma_resource: Annotated[
        str | None,
        _about(
            "NAME", "The cluster's RDMA resource, such as rdma/hca_shared_devices_a.", pattern=r"^[-a-z0-9.]+/[-\w.]+$"
        ),
    ] = None
    rdma_count: Annotated[int, _about("N", "RDMA resources per worker.", ge=1, le=64)] = 1
    host_network: Annotated[bool, _about("", "Workers use the node's network.")] = False
    non_root: Annotated[bool, _about("", "With RDMA: keep the image's user; see docs/kubernetes.md.")] = False
    auth: Annotated[Literal["token", "disabled"], _about("NAME", "Ray's authentication: token or disabled.")] = "token"
    env: Annotated[list[str], _about("NAME=VALUE", "Variable for every pod; repeatable.")] = Field(default_factory=list)

    def __init__(self, **values: Any) -> None:
        # pydantic's error spans several lines.
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigurationError(explain(error, type(self).model_fields)) from error

    @model_validator(mode="after")
    def _fits(self) -> ClusterOptions:
        oldest = requirements.OLDEST["Ray"]
        if requirements.is_older(self.ray_version, oldest):
            raise ValueError(f"ray_version {self.ray_version} is not Ray {oldest}.0 or later, which raytorchrpc needs")
        if self.auth == "token" and (missed := requirements.obstacle("token", self.ray_version)):
            raise ValueError(f"auth: {missed} and use --auth disabled")
        for variable in self.env:
            if not re.match(r"[A-Za-z_]\w*=", variable):
                raise ValueError(f"env: {variable!r} is not NAME=VALUE")
            if variable.startswith("RAY_AUTH_MODE="):
                raise ValueError("env: RAY_AUTH_MODE must match KubeRay's setting: use --auth")
        if self.rdma_resource == _GPU:
            raise ValueError(f"rdma_resource: {_GPU} is no RDMA adapter; `kubectl describe node` lists the resources")
        memory, shm = _bytes(self.memory), _bytes(self.shm)
        if memory < _LEAST_MEMORY:
            raise ValueError(f"memory {self.memory} is too little: Ray and torch need at least 1Gi")
        if shm < 64 << 20:
            raise ValueError(f"shm {self.shm} is too little: use at least 64Mi")
        if shm > memory - _LEAST_MEMORY // 2:
            raise ValueError(
                f"shm {self.shm} does not fit into memory {self.memory}: /dev/shm counts as memory of the pod, and "
                f"its processes need at least 512Mi"
            )
        return self


class JobOptions(ClusterOptions, frozen=True):
    """Options of a ``RayJob``."""

    kind: ClassVar[str] = "RayJob"

    name: Annotated[str, _about("NAME", "Name of the job or cluster.", pattern=_LABEL, max_length=47)] = "raytorchrpc"
    entrypoint: Annotated[str, _about("COMMAND", "The command, as for `ray job submit`.", pattern=r"\S")]
    """It runs on the head."""


def _bytes(size: str) -> int:
    return size_in_bytes(size) or 0


# --- objects --------------------------------------------------------------------------------------------------------


def build(options: ClusterOptions) -> dict[str, Any]:
    """The manifest of the kind that the options are for."""
    spec = _cluster_spec(options)
    if isinstance(options, JobOptions):
        spec = {
            "entrypoint": options.entrypoint,
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": _TTL_S,
            "rayClusterSpec": spec,
        }
    metadata = {"name": options.name, "namespace": options.namespace}
    return {"apiVersion": "ray.io/v1", "kind": options.kind, "metadata": metadata, "spec": spec}


def to_yaml(options: ClusterOptions) -> str:
    """The manifest as YAML, with a comment at the top for what the fields cannot express."""
    notes = "".join(f"# {line}\n" for line in _notes(options))
    text: str = yaml.safe_dump(build(options), sort_keys=False, default_flow_style=False, width=110)
    return notes + text


def _notes(options: ClusterOptions) -> list[str]:
    notes = [
        f"Made by `raytorchrpc manifest`. The image has raytorchrpc, torch and Ray {options.ray_version}.",
        f"/dev/shm takes up to {options.shm} of the {options.memory} of each worker; so does shared memory of the",
        "group's members, which does not show there. See docs/kubernetes.md.",
    ]
    if options.rdma_resource and options.non_root:
        notes += [
            "Workers do not run as root, and IPC_LOCK does nothing for them: the container runtime of every node needs",
            "LimitMEMLOCK=infinity, or RDMA fails or is not used.",
        ]
    if options.host_network:
        notes += ["Workers use the nodes' network: at most one of them fits on a node, and not beside the head."]
    return notes


def _cluster_spec(options: ClusterOptions) -> dict[str, Any]:
    store = int(_bytes(options.shm) * _STORE_SHARE)
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
    listed = [{"name": name, "containerPort": port} for name, port in ports.items()]
    return {"containers": [_container("ray-head", options, _HEAD, ports=listed)]}


def _worker_pod(options: ClusterOptions) -> dict[str, Any]:
    wanted = {"cpu": str(options.cpus), "memory": options.memory}
    if options.gpus:
        wanted[_GPU] = str(options.gpus)
    if options.rdma_resource:
        wanted[options.rdma_resource] = str(options.rdma_count)
    container = _container("ray-worker", options, wanted)
    container["volumeMounts"] = [{"name": _SHM, "mountPath": "/dev/shm"}]
    if options.rdma_resource:
        user = {} if options.non_root else {"runAsUser": 0}
        container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}, **user}
    network = {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"} if options.host_network else {}
    # KubeRay's default is as large as all memory; with a smaller limit, only a full /dev/shm fails.
    volumes = [{"name": _SHM, "emptyDir": {"medium": "Memory", "sizeLimit": options.shm}}]
    return {**network, "containers": [container], "volumes": volumes}


def _container(name: str, options: ClusterOptions, wanted: dict[str, str], **more: Any) -> dict[str, Any]:
    # The raylet's environment, which every worker inherits before torch loads.
    own = dict(each.split("=", 1) for each in options.env)
    variables = {**DEFAULTS, "RAY_AUTH_MODE": options.auth, **own}
    return {
        "name": name,
        "image": options.image,
        "env": [{"name": variable, "value": value} for variable, value in variables.items()],
        **more,
        # Equal limits and requests: devices require it, and such pods are evicted last.
        "resources": {"limits": dict(wanted), "requests": dict(wanted)},
    }
