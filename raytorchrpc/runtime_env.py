"""The environment that the processes of members should start with, as a Ray ``runtime_env``."""

from __future__ import annotations

import os
from typing import Any

from ray.runtime_env import RuntimeEnv

from raytorchrpc._compat import ray_internals
from raytorchrpc.errors import ConfigurationError

#: Variables that are read once, early in a process's life, with the values that serve members best.
DEFAULTS = {
    "THP_MEM_ALLOC_ENABLE": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
    "IBV_FORK_SAFE": "1",
    "RDMAV_FORK_SAFE": "1",
}

# Ray files these two under names of its own.
_FIELDS = (RuntimeEnv.known_fields | {"nsight", "rocprof_sys"}) - {"_nsight", "_rocprof_sys"}


def runtime_env(**extra: Any) -> dict[str, Any]:
    """A ``runtime_env`` whose ``env_vars`` hold what a member's process should have before torch loads.

    For ``ray.init(runtime_env=...)``, ``Actor.options(runtime_env=...)`` and
    ``JobSubmissionClient.submit_job(runtime_env=...)``. The variables:

    * ``THP_MEM_ALLOC_ENABLE=1``: torch asks the kernel for huge pages for CPU tensors of 2 MiB and more
      (``c10/core/impl/alloc_cpu.cpp``). A large tensor that arrives by torchrpc lands in fresh memory, and most of
      its time goes into page faults; see ``python -m benchmarks huge_pages``. It is the receiver that needs it. torch
      reads it with the first CPU tensor of the process and never again. Where
      ``/sys/kernel/mm/transparent_hugepage/enabled`` is ``never`` it does nothing. A tensor may take up to 2 MiB
      more than its size.
    * ``MALLOC_MMAP_THRESHOLD_=33554432`` and ``MALLOC_TRIM_THRESHOLD_=67108864``: blocks of up to 32 MiB come from
      memory that was in use before. These are the bounds that glibc's own adjusting climbs to (``mallopt(3)``), set at
      once, because with the first variable it does not climb: torch then aligns its blocks to pages, and the threshold
      that glibc learns from one stays a little below the next of the same size. Tensors of 2 to 32 MiB would be mapped
      anew each time, 400 page faults for 10 MB instead of none, and a call with one would take up to twice as long. A
      heap may keep up to 64 MiB that is free. Read when a process starts; ``GLIBC_TUNABLES`` wins over both.
    * ``IBV_FORK_SAFE=1`` and ``RDMAV_FORK_SAFE=1``: libibverbs keeps the memory that RDMA uses out of forked children,
      so that a ``fork`` or a ``subprocess`` in a member cannot corrupt it (``ibv_fork_init(3)``; TensorPipe does not
      ask for it). Read when verbs load. They cost one system call for each registration, and nothing without RDMA.

    Not among them: ``GLIBC_TUNABLES=glibc.malloc.hugetlb=1``, which asks for huge pages for every allocation of the
    process and gained nothing over torch's own variable; ``RDMAV_HUGEPAGES_SAFE``, which is about hugetlbfs;
    ``TP_SOCKET_IFNAME``, which differs from node to node: torchrpc's interface is found when a group forms; NCCL's and
    UCX's variables, likewise: both libraries read theirs when they first start, after torch has loaded, and where they
    find nothing the group sets what it knows of the node. Give those that are the same everywhere in ``env_vars``.

    A variable keeps the value that somebody chose for it. In this order:

    1. what ``extra["env_vars"]`` says;
    2. what the job's or this actor's own ``runtime_env`` says. Ray hands it down, so the variable is left out here:
       ``ray.init`` in a submitted job refuses one that the job has too;
    3. what this process has in ``os.environ``. Ray itself would pass it on only to workers of a Ray that this process
       starts; here it goes along to any cluster;
    4. the value above.

    Workers start with the environment of their node's raylet, and ``env_vars`` go on top of it: a value set for
    ``ray start`` does not show here and gives way. To leave a variable out, delete it from the result. A driver is not
    started by Ray: to take part itself, it needs the variables exported before it starts.

    Args:
        extra: any field of Ray's ``runtime_env``: ``env_vars``, ``working_dir``, ``pip``, ... Never changed.

    Returns a new plain dict; it pickles, and is JSON, as far as what is in ``extra`` does. Does not block.

    Raises ConfigurationError, naming the field, for one that Ray does not know or a value that it refuses.
    """
    unknown = sorted(extra.keys() - _FIELDS)
    if unknown:
        raise ConfigurationError(
            f"runtime_env has no field {unknown[0]!r}; known: {', '.join(sorted(f for f in _FIELDS if f[0] != '_'))}. "
            f"A plug-in's field can be added to the result"
        )
    try:
        RuntimeEnv(**extra)  # its checks alone: Ray makes one again of whatever it is given
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"runtime_env: {error}") from error
    given: dict[str, str] = extra.get("env_vars") or {}
    for name, value in given.items():
        if not name or "=" in name or "\0" in name + value:
            raise ConfigurationError(f"runtime_env: env_vars: {name!r}: {value!r} cannot be in an environment")
    inherited = ray_internals.inherited_env_vars()
    chosen = {name: os.environ.get(name, value) for name, value in DEFAULTS.items() if name not in inherited}
    return {**extra, "env_vars": {**chosen, **given}}
