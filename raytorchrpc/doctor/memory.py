"""Locked memory, shared memory and huge pages; and what a fork does to memory that adapters use."""

from __future__ import annotations

import re

from raytorchrpc.doctor import rdma
from raytorchrpc.doctor.evidence import Evidence
from raytorchrpc.doctor.findings import Finding
from raytorchrpc.lanes.torchrpc.backends import SMALL_SHM_BYTES
from raytorchrpc.topology import rdma as _rdma

MIB = 1 << 20
GIB = 1 << 30
_FORK_SAFETY = ("IBV_FORK_SAFE", "RDMAV_FORK_SAFE")
#: From this kernel on, a fork copies the pages that adapters use, and libibverbs is told so.
_COPIES_ON_FORK = (5, 13)


def findings(evidence: Evidence) -> list[Finding]:
    """Pure: the same evidence gives the same findings."""
    of_rdma = rdma.in_proportion(evidence.endpoint, [*_locked(evidence), *_fork(evidence)])
    return [*of_rdma, *_shared(evidence), *_huge(evidence)]


def _locked(evidence: Evidence) -> list[Finding]:
    endpoint = evidence.endpoint
    if not endpoint.hcas:
        return []
    limit = endpoint.memlock_bytes
    if limit is None or limit >= _rdma.MIN_MEMLOCK_BYTES:
        text = "without limit" if limit is None else f"{limit // MIB} MiB"
        return [Finding(id="memlock", level="ok", seen=f"memory that may be locked: {text}", lanes=("nixl", "nccl"))]
    if endpoint.uid != 0:
        who = f"a process of uid {endpoint.uid}"
        remedy = (
            "run as root with IPC_LOCK, or raise the limit for everybody: LimitMEMLOCK=infinity in the container "
            "runtime's unit, ulimit -l unlimited; IPC_LOCK alone does nothing for a user other than root"
        )
    else:
        who = "this root, which lacks CAP_IPC_LOCK or is root of a user namespace only,"
        remedy = (
            "add IPC_LOCK to the container's capabilities (securityContext.capabilities.add), or ulimit -l unlimited"
        )
    return [
        Finding(
            id="memlock-small",
            level="problem",
            seen=f"{who} may lock {limit / MIB:g} MiB",
            meaning="RDMA locks its buffers: no lane uses it here",
            remedy=remedy,
            lanes=("nixl", "nccl", "torchrpc"),
        )
    ]


def _fork(evidence: Evidence) -> list[Finding]:
    if not evidence.endpoint.hcas:
        return []
    unset = [name for name in _FORK_SAFETY if evidence.environment.get(name) is None]
    if not unset:
        return [Finding(id="fork-safety", level="ok", seen=f"{' and '.join(_FORK_SAFETY)} are set")]
    copies = _release(evidence.kernel) >= _COPIES_ON_FORK
    return [
        Finding(
            id="fork-unsafe",
            level="note" if copies else "warning",
            seen=f"not set: {' and '.join(unset)}; kernel {evidence.kernel or 'unknown'}",
            meaning="kernels from 5.13 on copy the pages that adapters use when a process forks (rdma system show "
            "says so), and nothing more is needed"
            if copies
            else "a fork or a subprocess of a member can corrupt what its adapters write",
            remedy="start members with runtime_env=raytorchrpc.runtime_env(); a driver: export them before it starts",
            lanes=("torchrpc", "nixl"),
        )
    ]


def _release(kernel: str | None) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", kernel or "")
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _shared(evidence: Evidence) -> list[Finding]:
    total, free = evidence.shm_total_bytes, evidence.endpoint.shm_free_bytes
    if total is None:
        return []
    if free >= SMALL_SHM_BYTES:
        return [Finding(id="shm", level="ok", seen=f"/dev/shm: {free / GIB:.1f} of {total / GIB:.1f} GiB free")]
    seen = f"/dev/shm: {free // MIB} of {total // MIB} MiB free" if total else "no /dev/shm"
    return [
        Finding(
            id="shm-small",
            level="warning",
            seen=seen,
            meaning="Ray's object store falls back to files, and NCCL and DataLoader workers fail where they need it; "
            "the shm lane itself does not live there",
            remedy="mount a larger one (Docker: --shm-size, Kubernetes: an emptyDir with medium: Memory)"
            if total < SMALL_SHM_BYTES
            else "something fills it: ls -l /dev/shm",
            lanes=("nccl",),
        )
    ]


def _huge(evidence: Evidence) -> list[Finding]:
    state = evidence.endpoint.huge_pages
    if state is None:
        return []
    if state == "used":
        return [Finding(id="huge-pages", level="ok", seen="large CPU tensors lie in huge pages", lanes=("torchrpc",))]
    if state == "forbidden":
        seen, remedy = "the kernel gives no huge pages", "write madvise to /sys/kernel/mm/transparent_hugepage/enabled"
    else:
        seen = "torch does not use huge pages in this process"
        remedy = "start members with runtime_env=raytorchrpc.runtime_env(); a driver: export THP_MEM_ALLOC_ENABLE=1"
    return [
        Finding(
            id="huge-pages-unused",
            level="note",
            seen=seen,
            meaning="a large CPU tensor that arrives by torchrpc takes two to four times as long",
            remedy=remedy,
            lanes=("torchrpc",),
        )
    ]
