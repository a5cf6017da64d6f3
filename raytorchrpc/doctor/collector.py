"""Collects ``Evidence`` from this process and its machine, or from a file tree.

A tree (``--sysfs-root``) holds a machine's ``/proc``, ``/sys`` and ``/dev``. It provides the RDMA adapters, the GPUs'
PCI addresses and BAR1 sizes, peer memory, the driver, the kernel, limits and capabilities (``proc/self/limits``,
``status``, ``uid_map``), the environment (``proc/self/environ``), NCCL's files, namespaces, and interfaces
(``sys/class/net``) with the addresses in ``proc/net/if_inet6`` and GIDs. A file ``evidence.json`` at its top may add
what only a running process knows: a JSON object with any fields of ``Evidence``, and under ``endpoint`` any of
``Endpoint``, such as the ``evidence`` of an earlier ``--json``. Its values take precedence.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ray
from pydantic import ValidationError

from raytorchrpc._compat import ray_internals
from raytorchrpc.doctor import gpu_probe
from raytorchrpc.doctor.evidence import WATCHED, Evidence
from raytorchrpc.errors import ConfigurationError
from raytorchrpc.process import threads
from raytorchrpc.topology import nccl_env, probe, sysfs
from raytorchrpc.topology.endpoint import Endpoint, Interface

LIVE = Path("/")
_RESOLVING_S = 5.0


def gather(*, name: str = "", node_ip: str | None = None, wants_gpu: bool = True, hosts: int = 1) -> Evidence:
    """Examine this process and its machine. ``node_ip``: Ray's address of this node; None asks Ray.

    Blocks as ``topology.probe`` does, and until the host name is resolved (5 s at most). With ``wants_gpu``, CUDA is
    initialised in this process.
    """
    node_ip = node_ip or str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
    endpoint = probe.probe(name=name, node_ip=node_ip, wants_gpu=wants_gpu)
    files = _from_files(LIVE, os.environ)
    cuda, nvml = gpu_probe.cuda_works() if wants_gpu else None, gpu_probe.ask_nvml()
    return Evidence(
        endpoint=endpoint,
        hosts=hosts,
        cuda_driver=gpu_probe.cuda_driver(),
        nvml=nvml.state,
        cuda_works=cuda,
        links=gpu_probe.links(endpoint.gpus, nvml),
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
    uid = _number(root / "proc/self/status", "Uid:")
    limit = _number(root / "proc/self/limits", "Max locked memory")
    probed = probe.probe(node_ip="", wants_gpu=False, root=root)
    endpoint = probed.changed(
        {
            "hostname": sysfs.read(root / "proc/sys/kernel/hostname") or "",
            "pid": 0,
            "uid": uid or 0,
            "interfaces": _interfaces(root, probed),
            "gpus": gpu_probe.from_files(root),
            "memlock_bytes": None if sysfs.may_lock_all(root) else limit,
            "huge_pages": "forbidden" if sysfs.huge_pages(root)[0] == "never" else None,
            "torch_version": "",
            "cuda_version": None,
            "python_version": "",
            "tensorpipe_transports": (),
            "tensorpipe_channels": (),
            "nixl": False,
            "wants_gpu": True,
        }
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
        "gpu_driver": gpu_probe.driver(root),
        "pci_gpus": gpu_probe.on_the_bus(root),
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
    found = re.search(rf"^{name}\s*(\d+)", sysfs.read(file) or "", re.MULTILINE)
    return int(found[1]) if found else None


def _interfaces(root: Path, probed: Endpoint) -> tuple[Interface, ...]:
    addresses: dict[str, dict[str, None]] = {}
    for gid in (gid for hca in probed.hcas for port in hca.ports for gid in port.gids):
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
    found = re.search(r"kubepods|docker|containerd|libpod|lxc", sysfs.read(root / "proc/1/cgroup") or "")
    return {"kubepods": "kubernetes", "libpod": "podman"}.get(found[0], found[0]) if found else None


def _own_addresses(hostname: str) -> tuple[str, ...] | None:
    """Resolves on a thread: an unresponsive name server can take minutes, and the call cannot be interrupted."""
    found: list[tuple[str, ...]] = []

    def ask() -> None:
        try:
            answers = socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM)
        except OSError:
            answers = []
        found.append(tuple(dict.fromkeys(str(answer[4][0]) for answer in answers)))

    try:
        threads.start(ask, name="raytorchrpc-doctor-name").join(_RESOLVING_S)
    except threads.ThreadShortage:
        return None
    return found[0] if found else None


if __name__ == "__main__":  # NAME ADDRESS HOSTS: prints this machine's evidence as JSON
    own_name, address, host_count = sys.argv[1:]
    print(gather(name=own_name, node_ip=address, hosts=int(host_count)).model_dump_json())
