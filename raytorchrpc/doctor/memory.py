"""Findings about locked memory, forks, shared memory and huge pages."""

from __future__ import annotations

import re
from collections.abc import Iterator

from raytorchrpc.doctor.evidence import Evidence
from raytorchrpc.doctor.findings import Finding, finding, note, ok, problem, warning
from raytorchrpc.doctor.rdma import limit_levels
from raytorchrpc.lanes.torchrpc.backends import SMALL_SHM_BYTES
from raytorchrpc.topology.rdma import MIN_MEMLOCK_BYTES

MIB = 1 << 20
GIB = 1 << 30
_FORK_SAFETY = ("IBV_FORK_SAFE", "RDMAV_FORK_SAFE")
#: From this kernel on, a fork copies the pages that adapters use, and libibverbs needs no fork support.
_COPIES_ON_FORK = (5, 13)


def findings(evidence: Evidence) -> Iterator[Finding]:
    """Pure: equal evidence gives equal findings."""
    if evidence.endpoint.hcas:
        yield from limit_levels(evidence.endpoint, [_locked(evidence), _fork(evidence)])
    yield from _shared(evidence)
    yield from _huge(evidence)


def _locked(evidence: Evidence) -> Finding:
    limit, uid = evidence.endpoint.memlock_bytes, evidence.endpoint.uid
    if limit is None or limit >= MIN_MEMLOCK_BYTES:
        return ok("memlock", f"memory that may be locked: {'no limit' if limit is None else f'{limit // MIB} MiB'}")
    if uid != 0:
        who = f"a process of uid {uid}"
        remedy = (
            "run as root with IPC_LOCK, or raise the limit for all users: LimitMEMLOCK=infinity in the container "
            "runtime's unit, or ulimit -l unlimited; IPC_LOCK alone does nothing for a user other than root"
        )
    else:
        who = "this root user, which lacks CAP_IPC_LOCK or is root only in a user namespace,"
        remedy = "add IPC_LOCK to the container (securityContext.capabilities.add), or run ulimit -l unlimited"
    seen = f"{who} may lock {limit / MIB:g} MiB"
    return problem("memlock-small", seen, "RDMA locks its buffers: no lane uses it here", remedy)


def _fork(evidence: Evidence) -> Finding:
    unset = [name for name in _FORK_SAFETY if evidence.environment.get(name) is None]
    if not unset:
        return ok("fork-safety", f"{' and '.join(_FORK_SAFETY)} are set")
    copies = _release(evidence.kernel) >= _COPIES_ON_FORK
    return finding(
        "note" if copies else "warning",
        "fork-unsafe",
        f"not set: {' and '.join(unset)}; kernel {evidence.kernel or 'unknown'}",
        "from 5.13 on, the kernel copies the pages that adapters use when a process forks (`rdma system show` confirms "
        "it), so nothing more is needed"
        if copies
        else "a fork or a subprocess of a member can corrupt what its adapters write",
        "start members with runtime_env=raytorchrpc.runtime_env(); for a driver, export the variables before it starts",
    )


def _release(kernel: str | None) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", kernel or "")
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _shared(evidence: Evidence) -> Iterator[Finding]:
    total, free = evidence.shm_total_bytes, evidence.endpoint.shm_free_bytes
    if total is None:
        return
    if free >= SMALL_SHM_BYTES:
        yield ok("shm", f"/dev/shm: {free / GIB:.1f} of {total / GIB:.1f} GiB free")
        return
    yield warning(
        "shm-small",
        f"/dev/shm: {free // MIB} of {total // MIB} MiB free" if total else "no /dev/shm",
        "Ray's object store falls back to files, and NCCL and DataLoader workers fail where they need it; the shm lane "
        "does not use it",
        "mount a larger one (Docker: --shm-size, Kubernetes: an emptyDir with medium: Memory)"
        if total < SMALL_SHM_BYTES
        else "find what fills it: ls -l /dev/shm",
    )


def _huge(evidence: Evidence) -> Iterator[Finding]:
    state = evidence.endpoint.huge_pages
    if state is None:
        return
    if state == "used":
        yield ok("huge-pages", "large CPU tensors use huge pages")
        return
    meaning = "a large CPU tensor that arrives over torchrpc takes two to four times as long"
    if state == "forbidden":
        remedy = "write madvise to /sys/kernel/mm/transparent_hugepage/enabled"
        yield note("huge-pages-unused", "the kernel does not offer huge pages", meaning, remedy)
    else:
        remedy = "start members with runtime_env=raytorchrpc.runtime_env(); for a driver, export THP_MEM_ALLOC_ENABLE=1"
        yield note("huge-pages-unused", "torch does not use huge pages in this process", meaning, remedy)
