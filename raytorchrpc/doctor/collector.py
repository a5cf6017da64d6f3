"""Collects ``Evidence`` from this process and its machine, or from a file tree.

A tree (``--sysfs-root``) holds a machine's ``/proc``, ``/sys`` and ``/dev``. It provides the RDMA adapters, the GPUs'
PCI addresses and BAR1 sizes, peer memory, the driver, the kernel, limits and capabilities (``proc/self/limits``,
``status``, ``uid_map``), the environment (``proc/self/environ``), NCCL's files, namespaces, and interfaces
(``sys/class/net``) with the addresses in ``proc/net/if_inet6`` and GIDs. A file ``evidence.json`` at its top may add
what only a running process knows: a JSON object with any fields of ``Evidence``, and under ``endpoint`` any of
``Endpoint``, such as the ``evidence`` of an earlier ``--json``. Its values take precedence.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import ray
import torch
from pydantic import ValidationError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytorchrpc._compat import ray_internals
from raytorchrpc.doctor.report import WATCHED, Evidence, GpuLink
from raytorchrpc.errors import BootstrapError, ConfigurationError
from raytorchrpc.process import threads
from raytorchrpc.topology import nccl_env, probe, sysfs
from raytorchrpc.topology.endpoint import Endpoint, Gpu, Hca, Interface

LIVE = Path("/")
_RESOLVING_S = 5.0
_NVIDIA = "0x10de"
#: PCI classes of displays and 3D controllers, without the programming interface.
_GPU_CLASSES = ("0x0300", "0x0302")
_MAX_NVLINKS = 18


# --- this machine ---------------------------------------------------------------------------------------------------


def gather(*, name: str = "", node_ip: str | None = None, wants_gpu: bool = True, hosts: int = 1) -> Evidence:
    """Examine this process and its machine. ``node_ip``: Ray's address of this node; None asks Ray.

    Blocks as ``topology.probe`` does, and until the host name is resolved (5 s at most). With ``wants_gpu``, CUDA is
    initialised in this process.
    """
    node_ip = node_ip or str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
    endpoint = probe.probe(name=name, node_ip=node_ip, wants_gpu=wants_gpu)
    files = _from_files(LIVE, os.environ)
    cuda, nvml = cuda_works() if wants_gpu else None, ask_nvml()
    return Evidence(
        endpoint=endpoint,
        hosts=hosts,
        cuda_driver=cuda_driver(),
        nvml=nvml.state,
        cuda_works=cuda,
        links=links(endpoint.gpus, nvml),
        own_addresses=_own_addresses(endpoint.hostname),
        **{**files, "gpu_driver": files["gpu_driver"] or nvml.driver},
        shm_total_bytes=shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0,
        ray_version=ray.__version__,
        ray_jobs=all(map(find_spec, ("aiohttp", "aiohttp_cors"))),
        ray_token=ray_internals.ray_token(),
    )


def gather_from(root: Path) -> Evidence:
    """Examine a file tree. Raises ConfigurationError if it is not one, or if its ``evidence.json`` is invalid."""
    if not (root / "sys").is_dir() and not (root / "proc").is_dir():
        raise ConfigurationError(f"{root} has neither sys nor proc; --sysfs-root must be a directory that holds them")
    limit = _number(root / "proc/self/limits", "Max locked memory")
    facts = probe.file_facts(root)
    endpoint = Endpoint(
        **facts,
        hostname=sysfs.read(root / "proc/sys/kernel/hostname") or "",
        pid=0,
        uid=_number(root / "proc/self/status", "Uid:") or 0,
        node_ip="",
        interfaces=_interfaces(root, facts["hcas"]),
        gpus=from_files(root),
        memlock_bytes=None if sysfs.may_lock_all(root) else limit,
        huge_pages="forbidden" if sysfs.huge_pages(root)[0] == "never" else None,
        torch_version="",
        wants_gpu=True,
    )
    evidence = Evidence(endpoint=endpoint, live=False, **_from_files(root, environment_of(root)))
    text = sysfs.read(root / "evidence.json")
    if text is None:
        return evidence
    try:
        more = json.loads(text)
        return evidence.merged({**more, "live": False})
    except (ValueError, TypeError, AttributeError) as error:
        why = error.errors()[0] if isinstance(error, ValidationError) else error
        where = ".".join(map(str, why["loc"])) + f": {why['msg']}" if isinstance(why, dict) else why
        raise ConfigurationError(f"{root / 'evidence.json'}: {where}") from error


def _from_files(root: Path, environ: Mapping[str, str]) -> dict[str, Any]:
    """The fields that are read in the same way from a machine and from a tree."""
    return {
        "kernel": sysfs.read(root / "proc/sys/kernel/osrelease"),
        "container": _container(root, environ),
        "gpu_driver": driver(root),
        "pci_gpus": on_the_bus(root),
        "gpu_files": tuple(n for n in sysfs.listing(root / "dev") if re.fullmatch(r"nvidia\d+", n)),
        "environment": {name: environ[name] for name in WATCHED if name in environ},
        "nccl": nccl_env.chosen_values(environ, root),
        "may_lock_all": sysfs.may_lock_all(root),
    }


def environment_of(root: Path) -> dict[str, str]:
    """The environment that the process started with."""
    text = sysfs.read(root / "proc/self/environ") or ""
    return dict(entry.partition("=")[::2] for entry in text.split("\0") if "=" in entry)


def _number(file: Path, name: str) -> int | None:
    match = re.search(rf"^{name}\s*(\d+)", sysfs.read(file) or "", re.MULTILINE)
    return int(match[1]) if match else None


def _interfaces(root: Path, hcas: Sequence[Hca]) -> tuple[Interface, ...]:
    addresses: dict[str, dict[str, None]] = {}
    for gid in (gid for hca in hcas for port in hca.ports for gid in port.gids):
        if gid.interface and gid.ipv4:
            addresses.setdefault(gid.interface, {})[gid.ipv4] = None
    for name, address in sysfs.ipv6_addresses(root):
        addresses.setdefault(name, {})[address] = None
    names = dict.fromkeys([*sysfs.listing(root / "sys/class/net"), *addresses])
    return tuple(
        Interface(
            name=name,
            addresses=tuple(addresses.get(name, ())),
            up=sysfs.read(root / "sys/class/net" / name / "operstate") != "down",
        )
        for name in names
    )


def _container(root: Path, environ: Mapping[str, str]) -> str | None:
    if environ.get("KUBERNETES_SERVICE_HOST") or (root / "var/run/secrets/kubernetes.io").exists():
        return "kubernetes"
    if (root / ".dockerenv").exists():
        return "docker"
    if (root / "run/.containerenv").exists():
        return "podman"
    match = re.search(r"kubepods|docker|containerd|libpod|lxc", sysfs.read(root / "proc/1/cgroup") or "")
    return {"kubepods": "kubernetes", "libpod": "podman"}.get(match[0], match[0]) if match else None


def _own_addresses(hostname: str) -> tuple[str, ...] | None:
    """Resolves on a thread: an unresponsive name server can take minutes, and the call cannot be interrupted."""
    answers: futures.Future[list[Any]] = futures.Future()
    look_up = partial(socket.getaddrinfo, hostname, None, type=socket.SOCK_STREAM)
    try:
        threads.start(threads.settle, answers, look_up, name="raytorchrpc-doctor-name")
        return tuple(dict.fromkeys(str(answer[4][0]) for answer in answers.result(_RESOLVING_S)))
    except futures.TimeoutError:
        return None
    except OSError:
        return ()


# --- GPUs, by the driver, torch and NVML ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Nvml:
    """NVML's answers."""

    state: Literal["used", "missing", "failed"] | None = None
    driver: str | None = None
    nvlinks: dict[str, dict[str, int]] = field(default_factory=dict)
    """By a GPU's UUID: PCI address of the other end, or ``switch`` -> number of active links."""


def driver(root: Path) -> str | None:
    """The loaded kernel driver's version, or None."""
    text = sysfs.read(root / "proc/driver/nvidia/version") or ""
    match = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return match[1] if match else None


def on_the_bus(root: Path) -> tuple[str, ...]:
    """PCI addresses of NVIDIA GPUs, including those this process may not use."""
    home = root / "sys/bus/pci/devices"
    return tuple(
        address
        for address in sysfs.listing(home)
        if sysfs.read(home / address / "vendor") == _NVIDIA
        and (sysfs.read(home / address / "class") or "").startswith(_GPU_CLASSES)
    )


def from_files(root: Path) -> tuple[Gpu, ...]:
    """The GPUs in the driver's files; their memory size is taken from the model name, else 0."""
    home = root / "proc/driver/nvidia/gpus"
    # Only the open kernel modules share GPU memory as DMA-BUFs.
    is_open = "Open Kernel Module" in (sysfs.read(root / "proc/driver/nvidia/version") or "")
    gpus = []
    for index, address in enumerate(sysfs.listing(home)):
        text = sysfs.read(home / address / "information") or ""
        facts = dict(re.findall(r"^([^:\n]+):\s*(.*?)\s*$", text, re.MULTILINE))
        device = root / "sys/bus/pci/devices" / address
        size = re.search(r"(\d+)GB", facts.get("Model", ""))
        gpus.append(
            Gpu(
                index=index,
                uuid=facts.get("GPU UUID", ""),
                name=facts.get("Model", "NVIDIA GPU"),
                memory_bytes=int(size[1]) * 10**9 if size else 0,
                pci_bus_id=address,
                bar1_bytes=sysfs.bar1_bytes(root, address),
                resource1_present=(device / "resource1").exists() if device.exists() else None,
                dma_buf=is_open,
            )
        )
    return tuple(gpus)


def cuda_works() -> bool | None:
    """``torch.cuda.is_available()``; None if this build has no CUDA."""
    return bool(torch.cuda.is_available()) if torch.version.cuda else None


def cuda_driver() -> str | None:
    """The newest CUDA release that the driver supports, or None without a driver. Initialises nothing."""
    version = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) or not version.value:
            return None
    except OSError:
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def links(gpus: tuple[Gpu, ...], nvml: Nvml) -> tuple[GpuLink, ...]:
    """The link of each pair of this process's GPUs."""
    pairs = []
    for a, b in combinations(gpus, 2):
        active = nvml.nvlinks.get(a.uuid.removeprefix("GPU-"))
        count = None if active is None else active.get(b.pci_bus_id or "", 0) + active.get("switch", 0)
        directions = (a.index, b.index), (b.index, a.index)
        peer = all(torch.cuda.can_device_access_peer(*way) for way in directions)
        pairs.append(GpuLink(a=a.index, b=b.index, nvlinks=count, peer_access=peer))
    return tuple(pairs)


def ask_nvml() -> Nvml:
    """Query NVML through nvidia-ml-py, and shut it down again."""
    try:
        import pynvml
    except ImportError:
        return Nvml("missing")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver, or not in this container
        return Nvml("failed")
    try:
        version = _text(pynvml.nvmlSystemGetDriverVersion())
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        nvlinks = {_text(pynvml.nvmlDeviceGetUUID(h)).removeprefix("GPU-"): _nvlinks(pynvml, h) for h in handles}
        return Nvml("used", version, nvlinks)
    except pynvml.NVMLError:
        return Nvml("failed")
    finally:
        pynvml.nvmlShutdown()


def _nvlinks(pynvml: Any, handle: Any) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for link in range(_MAX_NVLINKS):
        try:
            if not pynvml.nvmlDeviceGetNvLinkState(handle, link):
                continue
            remote = _text(pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId).lower()
        except pynvml.NVMLError:  # fewer links than that, or a GPU without any
            continue
        domain, _, rest = remote.partition(":")
        try:
            kind = pynvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link)
            switch = kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
        except (pynvml.NVMLError, AttributeError):
            switch = False
        counts["switch" if switch else f"{domain[-4:]}:{rest}"] += 1
    return counts


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


# --- other nodes and actors -----------------------------------------------------------------------------------------


def collect_from_nodes(timeout_s: float) -> list[Evidence]:
    """Evidence of each live node, from a process that ends with it. Raises BootstrapError naming nodes that did not
    answer in time.
    """
    nodes = _live_nodes()
    hosts = len({node["NodeManagerAddress"] for node in nodes.values()})
    asked = {}
    for name, node in nodes.items():
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        task = ray.remote(max_calls=1)(_run_in_task).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
        asked[name] = task.remote(name, node["NodeManagerAddress"], hosts)
    return _answers(asked, "node", timeout_s, "is raytorchrpc installed there?")


def collect_from_actors(names: Sequence[str], timeout_s: float) -> list[Evidence]:
    """Evidence of each actor's own process: its environment, limits and GPUs. ``names``: NAME or NAMESPACE/NAME.

    A sync actor answers between its methods. Raises ConfigurationError for an unknown name, BootstrapError for actors
    that did not answer in time.
    """
    hosts = len({node["NodeManagerAddress"] for node in _live_nodes().values()})
    handles = {name: _actor(name) for name in names}
    asked = {name: handle.__ray_call__.remote(_run_in_actor, name, hosts) for name, handle in handles.items()}
    return _answers(asked, "actor", timeout_s, "a sync actor answers between its methods")


def _live_nodes() -> dict[str, dict[str, Any]]:
    """Live nodes by host name, with part of Ray's node id where two share a name."""
    alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    names = [node["NodeManagerHostname"] for node in alive]
    return {
        name if names.count(name) == 1 else f"{name}-{node['NodeID'][:6]}": node
        for name, node in zip(names, alive, strict=True)
    }


def _actor(name: str) -> Any:
    namespace, _, own = name.rpartition("/")
    with suppress(ValueError):
        return ray.get_actor(own, namespace=namespace or None)
    known = [a for a in ray.util.list_named_actors(all_namespaces=True) if a["name"] == own]
    if not namespace and len(known) == 1:
        return ray.get_actor(own, namespace=known[0]["namespace"])
    if known:
        names = ", ".join(f"{a['namespace']}/{a['name']}" for a in known)
        raise ConfigurationError(f"no actor {name!r}; actors of that name: {names}")
    raise ConfigurationError(f"no actor {name!r} (the actor needs a name: options(name=...))")


def _answers(asked: dict[str, Any], kind: str, timeout_s: float, hint: str) -> list[Evidence]:
    done, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=timeout_s)
    evidence, failed = [], []
    for name, ref in asked.items():
        if ref not in done:
            failed.append(f"{kind} {name!r}: no answer within {timeout_s:g} s ({hint})")
            continue
        try:
            evidence.append(Evidence.model_validate_json(ray.get(ref)))
        except ray.exceptions.RayError as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            failed.append(f"{kind} {name!r}: {lines[-1].strip()}")
        except ValidationError:
            failed.append(f"{kind} {name!r}: it runs another release of raytorchrpc")
    if failed:
        raise BootstrapError("; ".join(failed))
    return evidence


def _run_in_task(name: str, node_ip: str, hosts: int) -> str:
    """Runs as a Ray task, whose process sees all GPUs of the node: Ray hides them from a task that requests none."""
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    os.environ.update({k: v for k, v in environment_of(LIVE).items() if k == "CUDA_VISIBLE_DEVICES"})
    return gather(name=name, node_ip=node_ip, hosts=hosts).model_dump_json()


def _run_in_actor(instance: Any, name: str, hosts: int) -> str:
    """Runs in the actor's process."""
    granted: dict[str, list[str]] = ray.get_runtime_context().get_accelerator_ids()
    return gather(name=name, wants_gpu=bool(granted.get("GPU")), hosts=hosts).model_dump_json()
