"""Collects evidence on every node of a Ray cluster, or inside actors. Ray must be initialised."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from pydantic import ValidationError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytorchrpc.doctor.collector import environment_of, gather
from raytorchrpc.doctor.evidence import Evidence
from raytorchrpc.errors import BootstrapError, ConfigurationError


def collect_from_nodes(timeout_s: float) -> list[Evidence]:
    """Evidence of a new process on each live node. Raises BootstrapError naming nodes that did not answer in time."""
    nodes = _live_nodes()
    hosts = len({node["NodeManagerAddress"] for node in nodes.values()})
    asked = {}
    for name, node in nodes.items():
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        task = ray.remote(_run_in_new_process).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
        asked[name] = task.remote(name, node["NodeManagerAddress"], hosts, timeout_s)
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
    found, failed = [], []
    for name, ref in asked.items():
        if ref not in done:
            failed.append(f"{kind} {name!r}: no answer within {timeout_s:g} s ({hint})")
            continue
        try:
            found.append(Evidence.model_validate_json(ray.get(ref)))
        except ray.exceptions.RayError as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            failed.append(f"{kind} {name!r}: {lines[-1].strip()}")
        except ValidationError:
            failed.append(f"{kind} {name!r}: it runs another release of raytorchrpc")
    if failed:
        raise BootstrapError("; ".join(failed))
    return found


def _run_in_new_process(name: str, node_ip: str, hosts: int, timeout_s: float) -> str:
    """Runs as a Ray task; the new process keeps CUDA out of the memory of Ray's worker."""
    answer = subprocess.run(
        [sys.executable, "-m", "raytorchrpc.doctor.collector", name, node_ip, str(hosts)],
        env={**_as_started(), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    if answer.returncode:
        raise RuntimeError((answer.stderr.strip().splitlines() or ["it exited without an error message"])[-1])
    return answer.stdout


def _as_started() -> dict[str, str]:
    """The environment with the node's GPUs visible: Ray hides them from a task that requests none."""
    now = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    started = environment_of(Path("/"))
    return {**now, **{name: value for name, value in started.items() if name == "CUDA_VISIBLE_DEVICES"}}


def _run_in_actor(instance: Any, name: str, hosts: int) -> str:
    """Runs in the actor's process."""
    granted: dict[str, list[str]] = ray.get_runtime_context().get_accelerator_ids()
    return gather(name=name, wants_gpu=bool(granted.get("GPU")), hosts=hosts).model_dump_json()
