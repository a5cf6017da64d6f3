"""The environment variables that members' processes should start with, as a Ray ``runtime_env``."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

from raytorchrpc._compat import ray_internals
from raytorchrpc.errors import ConfigurationError

#: Variables that are read once, early in a process's life, with their recommended values.
DEFAULTS = {
    "THP_MEM_ALLOC_ENABLE": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
    "IBV_FORK_SAFE": "1",
    "RDMAV_FORK_SAFE": "1",
}


def runtime_env(**extra: Any) -> dict[str, Any]:
    """A ``runtime_env`` with the ``env_vars`` that a member's process should have before torch loads.

    For ``ray.init(runtime_env=...)``, ``Actor.options(runtime_env=...)`` and
    ``JobSubmissionClient.submit_job(runtime_env=...)``. The variables:

    * ``THP_MEM_ALLOC_ENABLE=1``: torch asks the kernel for huge pages for CPU tensors of 2 MiB and more
      (``c10/core/impl/alloc_cpu.cpp``). A large tensor that arrives by torchrpc is written to fresh memory, and page
      faults take most of that time; see ``python -m benchmarks huge_pages``. The receiver needs it. torch reads it
      once, with the first CPU tensor of the process. Where ``/sys/kernel/mm/transparent_hugepage/enabled`` is
      ``never`` it has no effect. A tensor may use up to 2 MiB more than its size.
    * ``MALLOC_MMAP_THRESHOLD_=33554432`` and ``MALLOC_TRIM_THRESHOLD_=67108864``: blocks of up to 32 MiB reuse
      memory of the heap. These are the upper bounds of glibc's dynamic thresholds (``mallopt(3)``). They are set
      explicitly because the first variable keeps the thresholds from growing: torch then aligns blocks to pages, and
      the threshold that glibc derives from one block stays just below the next block of the same size. Tensors of 2 to
      32 MiB would be mapped anew each time, with 400 page faults for 10 MB instead of none, and a call with one would
      take up to twice as long. A heap may keep up to 64 MiB of free memory. Read when a process starts;
      ``GLIBC_TUNABLES`` overrides both.
    * ``IBV_FORK_SAFE=1`` and ``RDMAV_FORK_SAFE=1``: libibverbs keeps the memory that RDMA uses out of forked children,
      so that a ``fork`` or a ``subprocess`` in a member cannot corrupt it (``ibv_fork_init(3)``; TensorPipe does not
      ask for it). Read when verbs load. They cost one system call for each registration, and nothing without RDMA.

    Deliberately not set: ``GLIBC_TUNABLES=glibc.malloc.hugetlb=1``, which asks for huge pages for every allocation of
    the process and showed no gain over torch's own variable; ``RDMAV_HUGEPAGES_SAFE``, which concerns hugetlbfs;
    ``TP_SOCKET_IFNAME``, which differs between nodes: the group finds torchrpc's interface when it forms; variables of
    NCCL and UCX, for the same reason: both libraries read them when they first start, and the group sets those that are
    missing from its evidence of the node. Pass values that are the same on all nodes in ``env_vars``.

    A value that was chosen elsewhere is kept. In this order of precedence:

    1. ``extra["env_vars"]``;
    2. the ``runtime_env`` of the job or of this actor. Ray passes it on, so the variable is left out here:
       ``ray.init`` in a submitted job refuses a variable that the job sets too;
    3. ``os.environ`` of this process. Ray itself would pass it only to workers of a cluster that this process starts;
    4. the values above.

    Workers start with the environment of their node's raylet, and ``env_vars`` override it: a value set for ``ray
    start`` is not visible here and is replaced. To leave a variable out, delete it from the result. Ray does not start
    the driver: export the variables before it starts if the driver is a member.

    Args:
        extra: any field of Ray's ``runtime_env``: ``env_vars``, ``working_dir``, ``pip``, ... Not modified. An imported
            module in ``py_modules`` stands for its folder or file.

    Returns a new dict, which can be pickled and converted to JSON if ``extra`` can. Does not block.

    Raises ConfigurationError, naming the field, for a field that Ray does not know or a value that Ray rejects.

    Examples:
        >>> sorted(rtr.runtime_env()["env_vars"])[:2]
        ['IBV_FORK_SAFE', 'MALLOC_MMAP_THRESHOLD_']
    """
    from ray.runtime_env import RuntimeEnv

    # Ray lists these two under other names.
    fields = (RuntimeEnv.known_fields | {"nsight", "rocprof_sys"}) - {"_nsight", "_rocprof_sys"}
    unknown = sorted(extra.keys() - fields)
    if unknown:
        raise ConfigurationError(
            f"runtime_env has no field {unknown[0]!r}; known: {', '.join(sorted(f for f in fields if f[0] != '_'))}. "
            f"Add the field of a plug-in to the result"
        )
    if isinstance(modules := extra.get("py_modules"), list):
        extra["py_modules"] = [_source_of(module) if isinstance(module, ModuleType) else module for module in modules]
    for part in (*({name: value} for name, value in extra.items()), extra):
        try:
            RuntimeEnv(**part)  # only for its checks
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"runtime_env: {', '.join(part)}: {error}") from error
    given: dict[str, str] = extra.get("env_vars") or {}
    for name, value in given.items():
        if not name or "=" in name or "\0" in name + value:
            raise ConfigurationError(f"runtime_env: env_vars: {name!r}: {value!r} is not a valid environment variable")
    inherited = ray_internals.inherited_env_vars()
    chosen = {name: os.environ.get(name, value) for name, value in DEFAULTS.items() if name not in inherited}
    return {**extra, "env_vars": {**chosen, **given}}


def _source_of(module: ModuleType) -> str:
    """The folder of a package, or the file of a module: ``RuntimeEnv`` takes paths only, jobs too."""
    places = [*getattr(module, "__path__", [])] or [getattr(module, "__file__", None) or ""]
    if len(places) > 1 or not places[0]:
        where = f"{len(places)} folders" if places[0] else "no file"
        raise ConfigurationError(f"runtime_env: py_modules: {module.__name__!r} is in {where}: pass the path to upload")
    return str(places[0])
