"""Kubernetes manifests for KubeRay: ``RayJob`` and ``RayCluster`` of ``ray.io/v1``, from checked options."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator
from pydantic.functional_validators import AfterValidator

from raytorchrpc._compat import requirements
from raytorchrpc.errors import ConfigurationError
from raytorchrpc.runtime_env import DEFAULTS
from raytorchrpc.text import explain, size_in_bytes

_LABEL = r"[a-z]([-a-z0-9]*[a-z0-9])?"
_RESOURCE = (
    r"(?!nvidia\.com/gpu$|([^/]*\.)?kubernetes\.io/)"
    r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
)
#: Least memory of a container with Ray and torch, in bytes.
_LEAST_MEMORY = 1 << 30
_SHM = "dshm"
#: Share of /dev/shm for Ray's object store; the rest is for NCCL.
_STORE_SHARE = 0.6


# --- options --------------------------------------------------------------------------------------------------------


def bytes_of(quantity: str) -> int:
    """A Kubernetes quantity of memory (``64Gi``, ``500M``) in bytes. Raises ValueError."""
    size = size_in_bytes(quantity) if re.fullmatch(r"\d+(\.\d+)?(|[kMGT]|[KMGT]i)", quantity) else None
    if size is None:
        raise ValueError(f"{quantity!r} is not a size; write it like 64Gi or 500M")
    return size


def _size(quantity: str) -> str:
    bytes_of(quantity)
    return quantity


def _matching(pattern: str, problem: str, longest: int | None = None) -> AfterValidator:
    """Accepts text that matches as a whole; else the message is the text and the problem."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text) or (longest is not None and len(text) > longest):
            raise ValueError(f"{text!r} {problem}")
        return text

    return AfterValidator(check)


def _name(longest: int) -> AfterValidator:
    """``longest``: KubeRay derives longer names from this one."""
    problem = f"is not a valid name; use up to {longest} lower-case letters, digits and '-', a letter first"
    return _matching(_LABEL, problem, longest)


_Size = Annotated[str, AfterValidator(_size)]
_NO_NAMESPACE = "is not a valid namespace; use lower-case letters, digits and '-'"
_Namespace = Annotated[str, _matching(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", _NO_NAMESPACE)]
_NO_IMAGE = "is not an image; write it like registry.example/team/raytorchrpc:1.0"
_Image = Annotated[str, _matching(r"[A-Za-z0-9][\w./:@-]*", _NO_IMAGE)]
_NO_RESOURCE = (
    "is not an RDMA resource; write <domain>/<name>, such as rdma/hca_shared_devices_a or vpc.amazonaws.com/efa "
    "(`kubectl describe node` lists it as allocatable)"
)
_Resource = Annotated[str, _matching(_RESOURCE, _NO_RESOURCE)]


class ClusterOptions(BaseModel, frozen=True, extra="forbid"):
    """Options of a ``RayCluster``, or of the cluster of a ``RayJob``. Sizes are Kubernetes quantities."""

    name: Annotated[str, _name(53)]
    namespace: _Namespace = "default"
    image: _Image
    """Contains raytorchrpc, torch and Ray."""
    ray_version: str
    """Ray's version in the image."""
    workers: Annotated[int, Field(ge=1, le=10_000)] = 2
    """Number of pods, besides the head."""
    gpus: Annotated[int, Field(ge=0, le=64)] = 0
    """Per worker."""
    cpus: Annotated[int, Field(ge=1, le=1024)] = 8
    """Per worker."""
    memory: _Size = "32Gi"
    """Per worker, including /dev/shm."""
    shm: _Size = "8Gi"
    """Size of a worker's /dev/shm, which Ray's object store and NCCL use. It counts as memory of the pod."""
    head_cpus: Annotated[int, Field(ge=1, le=1024)] = 2
    head_memory: _Size = "8Gi"
    rdma_resource: _Resource | None = None
    """The device plugin's name for RDMA adapters: ``rdma/hca_shared_devices_a``, ``rdma/ib``, ..."""
    rdma_count: Annotated[int, Field(ge=1, le=64)] = 1
    """Per worker."""
    host_network: bool = False
    """Workers use the node's network interfaces."""
    root: bool = True
    """With RDMA, workers run as root; see ``docs/kubernetes.md``."""
    auth: Literal["token", "disabled"] = "token"
    env: dict[str, str] = {}
    """Further variables on head and workers; they override this package's own."""

    def __init__(self, **values: Any) -> None:
        # pydantic's error spans several lines.
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigurationError(explain(error, type(self).model_fields)) from error

    @field_validator("ray_version")
    @classmethod
    def _ray_version(cls, version: str) -> str:
        if not re.fullmatch(r"\d+\.\d+\.\d+\w*", version) or requirements.is_older(version, requirements.OLDEST["Ray"]):
            raise ValueError(f"{version!r} is not Ray {requirements.OLDEST['Ray']}.0 or later, which raytorchrpc needs")
        return version

    @field_validator("env")
    @classmethod
    def _env(cls, variables: dict[str, str]) -> dict[str, str]:
        for name in variables:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ValueError(f"{name!r} is not a valid variable name")
        if "RAY_AUTH_MODE" in variables:
            raise ValueError("RAY_AUTH_MODE must match KubeRay's setting: use --auth")
        return variables

    @model_validator(mode="after")
    def _fits(self) -> ClusterOptions:
        if self.auth == "token" and (missed := requirements.obstacle("token", self.ray_version)):
            raise ValueError(f"auth: {missed} and use --auth disabled")
        memory, shm, head = bytes_of(self.memory), bytes_of(self.shm), bytes_of(self.head_memory)
        for option, size in (("memory", memory), ("head_memory", head)):
            if size < _LEAST_MEMORY:
                raise ValueError(f"{option} {getattr(self, option)} is too little: Ray and torch need at least 1Gi")
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

    name: Annotated[str, _name(47)]
    entrypoint: Annotated[str, _matching(r".*\S.*", "is not a command")]
    """The command, as for ``ray job submit``; it runs on the head."""
    ttl_s: Annotated[int, Field(ge=0)] = 600
    """Seconds from the end of the job to the deletion of the cluster."""


# --- objects --------------------------------------------------------------------------------------------------------


def ray_cluster(options: ClusterOptions) -> dict[str, Any]:
    return _object("RayCluster", options, _cluster_spec(options))


def ray_job(options: JobOptions) -> dict[str, Any]:
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
