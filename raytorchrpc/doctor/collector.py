"""Collects ``Evidence`` from this process and its machine, or from a file tree.

A tree (``--sysfs-root``) holds a machine's ``/proc``, ``/sys`` and ``/dev``. It provides the RDMA adapters, the GPUs'
PCI addresses and BAR1 sizes, peer memory, the driver, the kernel, limits and capabilities (``proc/self/limits``,
``status``, ``uid_map``), the environment (``proc/self/environ``), NCCL's files, namespaces, and interfaces
(``sys/class/net``) with the addresses of GIDs. A file ``evidence.json`` at its top may add
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
from functools import partial
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Any

import ray
import torch
from pydantic import ValidationError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytorchrpc._compat import ray_internals
from raytorchrpc.doctor.report import WATCHED, Evidence, GpuLink
from raytorchrpc.errors import BootstrapError, ConfigurationError
from raytorchrpc.process import threads
from raytorchrpc.text import explain
from raytorchrpc.topology import nccl_env, probe, sysfs
from raytorchrpc.topology.endpoint import Endpoint, Gpu, Hca, Interface

LIVE = Path("/")
_RESOLVING_S = 5.0
_NVIDIA = "0x10de"
#: PCI classes of displays and 3D controllers, without the programming interface.
_GPU_CLASSES = ("0x0300", "0x0302")


# --- this machine ---------------------------------------------------------------------------------------------------


def gather(*, name: str = "", node_ip: str | None = None, wants_gpu: bool = True, hosts: int = 1) -> Evidence:
    """Examine this process and its machine. ``node_ip``: Ray's address of this node; None asks Ray.

    Blocks as ``topology.probe`` does, and until the host name is resolved (5 s at most). With ``wants_gpu``, CUDA is
    initialised in this process.
    """
    node_ip = node_ip or str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
    endpoint = probe.probe(name=name, node_ip=node_ip, wants_gpu=wants_gpu)
    return Evidence(
        **_from_files(LIVE, os.environ),
        endpoint=endpoint,
        hosts=hosts,
        cuda_driver=cuda_driver(),
        nvml=find_spec("pynvml") is not None,
        # None if this build of torch has no CUDA
        cuda_works=bool(torch.cuda.is_available()) if wants_gpu and torch.version.cuda else None,
        links=links(endpoint.gpus),
        own_addresses=_own_addresses(endpoint.hostname),
        shm_total_bytes=shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0,
        ray_version=ray.__version__,
        ray_jobs=all(map(find_spec, ("aiohttp", "aiohttp_cors"))),
        ray_token=ray_internals.ray_token(),
    )


def gather_from(root: Path) -> Evidence:
    """Examine a file tree. Raises ConfigurationError if it is not one, or if its ``evidence.json`` is invalid."""
    if not (root / "sys").is_dir() and not (root / "proc").is_dir():
        raise ConfigurationError(f"{root} has neither sys nor proc; --sysfs-root must be a directory that holds them")
    facts = probe.file_facts(root)
    endpoint = Endpoint(
        **facts,
        pid=0,
        node_ip="",
        interfaces=_interfaces(root, facts["hcas"]),
        gpus=from_files(root),
        huge_pages="forbidden" if sysfs.huge_pages(root)[0] == "never" else None,
        torch_version="",
        wants_gpu=True,
    )
    evidence = Evidence(**_from_files(root, environment_of(root)), endpoint=endpoint, live=False)
    text = sysfs.read(root / "evidence.json")
    if text is None:
        return evidence
    try:
        return evidence.merged({**json.loads(text), "live": False})
    except (ValueError, TypeError) as error:
        why = explain(error, Evidence.model_fields) if isinstance(error, ValidationError) else error
        raise ConfigurationError(f"{root / 'evidence.json'}: {why}") from error


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
    }


def environment_of(root: Path) -> dict[str, str]:
    """The environment that the process started with."""
    text = sysfs.read(root / "proc/self/environ") or ""
    return dict(entry.partition("=")[::2] for entry in text.split("\0") if "=" in entry)


def _interfaces(root: Path, hcas: Sequence[Hca]) -> tuple[Interface, ...]:
    """The interfaces in a tree. Files have no addresses but those of GIDs."""
    gids = [gid for hca in hcas for port in hca.ports for gid in port.gids if gid.interface and gid.ipv4]
    home = root / "sys/class/net"
    return tuple(
        Interface(
            name=name,
            addresses=tuple(dict.fromkeys(str(gid.ipv4) for gid in gids if gid.interface == name)),
            up=sysfs.read(home / name / "operstate") != "down",
        )
        for name in dict.fromkeys([*sysfs.listing(home), *(str(gid.interface) for gid in gids)])
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
        size = re.search(r"(\d+)GB", facts.get("Model", ""))
        gpus.append(
            Gpu(
                index=index,
                uuid=facts.get("GPU UUID", ""),
                name=facts.get("Model", "NVIDIA GPU"),
                memory_bytes=int(size[1]) * 10**9 if size else 0,
                dma_buf=is_open,
                **probe.pci_facts(root, address),
            )
        )
    return tuple(gpus)


def cuda_driver() -> str | None:
    """The newest CUDA release that the driver supports, or None without a driver. Initialises nothing."""
    version = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) or not version.value:
            return None
    except OSError:
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def links(gpus: tuple[Gpu, ...]) -> tuple[GpuLink, ...]:
    """The link of each pair of this process's GPUs."""
    active = _nvlinks()
    pairs = []
    for a, b in combinations(gpus, 2):
        of_a = active.get(a.uuid.removeprefix("GPU-"))
        count = None if of_a is None else of_a[b.pci_bus_id or ""] + of_a["switch"]
        directions = (a.index, b.index), (b.index, a.index)
        peer = all(torch.cuda.can_device_access_peer(*way) for way in directions)
        pairs.append(GpuLink(a=a.index, b=b.index, nvlinks=count, peer_access=peer))
    return tuple(pairs)


def _nvlinks() -> dict[str, Counter[str]]:
    """By a GPU's UUID: PCI address of the other end, or ``switch`` -> number of active links.

    Empty if NVML is not installed or has no driver here.
    """
    try:
        import pynvml
    except ImportError:
        return {}
    counts: dict[str, Counter[str]] = {}
    with suppress(pynvml.NVMLError):  # no driver, or not in this container
        pynvml.nvmlInit()
        for gpu in map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount())):
            of_gpu = counts[pynvml.nvmlDeviceGetUUID(gpu).removeprefix("GPU-")] = Counter()
            for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
                with suppress(pynvml.NVMLError):  # fewer links than that, or a GPU without any
                    if pynvml.nvmlDeviceGetNvLinkState(gpu, link):
                        of_gpu[_other_end(pynvml, gpu, link)] += 1
        pynvml.nvmlShutdown()
    return counts


def _other_end(pynvml: Any, gpu: Any, link: int) -> str:
    with suppress(pynvml.NVMLError):
        if pynvml.nvmlDeviceGetNvLinkRemoteDeviceType(gpu, link) == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            return "switch"
    # as sysfs spells it: with four digits of the domain
    return str(pynvml.nvmlDeviceGetNvLinkRemotePciInfo(gpu, link).busId).lower()[-len("0000:00:00.0") :]


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
    known = ray.util.list_named_actors(all_namespaces=True)
    same = [a for a in known if name in (a["name"], f"{a['namespace']}/{a['name']}")]
    if len(same) == 1:
        return ray.get_actor(same[0]["name"], namespace=same[0]["namespace"])
    own = name.rpartition("/")[2]
    names = [f"{a['namespace']}/{a['name']}" for a in known if a["name"] == own]
    hint = f"; actors of that name: {', '.join(names)}" if names else " (the actor needs a name: options(name=...))"
    raise ConfigurationError(f"no actor {name!r}{hint}")


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
