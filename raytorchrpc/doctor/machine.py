"""Findings about software, memory and addresses."""

from __future__ import annotations

import re
from collections.abc import Iterator

from raytorchrpc._compat.requirements import OLDEST, Package, is_older, missing
from raytorchrpc.doctor.devices import MIB, limit_levels
from raytorchrpc.doctor.report import Evidence, Finding, Level, finding, note, ok, problem, some, warning
from raytorchrpc.lanes.torchrpc.backends import SMALL_SHM_BYTES
from raytorchrpc.topology.endpoint import is_loopback
from raytorchrpc.topology.rdma import MIN_MEMLOCK_BYTES, usable_ports

GIB = 1 << 30
_FORK_SAFETY = ("IBV_FORK_SAFE", "RDMAV_FORK_SAFE")
#: From this kernel on, a fork copies the pages that adapters use, and libibverbs needs no fork support.
_COPIES_ON_FORK = (5, 13)


def software(evidence: Evidence) -> Iterator[Finding]:
    """Findings about torch, Ray, NIXL and the container. Pure."""
    if evidence.endpoint.torch_version:  # empty for a file tree
        yield _torch(evidence)
    yield from _releases(evidence)
    if evidence.ray_version is not None:
        yield ok("ray", f"Ray {evidence.ray_version}")
        if evidence.ray_jobs is False:
            yield note(
                "ray-without-jobs",
                "Ray is installed without ray[default]",
                "a head that is started here has no job server, dashboard or metrics: submitting a job to it ends with "
                "'connection refused'",
                "on the head node, pip install 'ray[default]' of the same release, and start Ray again",
            )
        yield from _token(evidence)
    if evidence.endpoint.torch_version and usable_ports(evidence.endpoint):
        yield _nixl(evidence.endpoint.nixl)
    if evidence.container:
        yield ok("container", f"runs in a container ({evidence.container})")


def _releases(evidence: Evidence) -> Iterator[Finding]:
    releases: dict[Package, str | None] = {"Ray": evidence.ray_version, "torch": evidence.endpoint.torch_version}
    for package, version in releases.items():
        if not version:
            continue
        if is_older(version, OLDEST[package]):
            yield problem(
                "release-too-old",
                f"{package} {version}",
                "no group can form here",
                f"install {package} {OLDEST[package]} or later",
            )
        for name, _, since, otherwise in missing(package, version):
            yield note(
                "release-lacks",
                f"{package} {version} is too old for {name}",
                f"this needs {package} {since} or later; nothing else does",
                f"upgrade {package}, or {otherwise}",
            )


def _torch(evidence: Evidence) -> Finding:
    endpoint = evidence.endpoint
    if "uv" not in endpoint.tensorpipe_transports:
        return problem(
            "torch-without-rpc",
            f"torch {endpoint.torch_version} was built without torch.distributed.rpc (TensorPipe)",
            "no group can form here",
            "install torch for Linux from PyPI or download.pytorch.org",
        )
    transports, channels = ", ".join(endpoint.tensorpipe_transports), ", ".join(endpoint.tensorpipe_channels)
    cuda = f"CUDA {endpoint.cuda_version}" if endpoint.cuda_version else "no CUDA"
    return ok("torch", f"torch {endpoint.torch_version}, {cuda}; TensorPipe has {transports}; {channels}")


def _token(evidence: Evidence) -> Iterator[Finding]:
    if evidence.ray_token == "missing":
        yield problem(
            "ray-token-missing",
            "Ray's token authentication is on, but this process has no token",
            "this process cannot join a cluster",
            "copy the cluster's token to ~/.ray/auth_token, or set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH",
        )
    elif evidence.ray_token == "on":
        yield ok("ray-token", "Ray's token authentication is on")
    elif evidence.ray_token == "off":
        yield note(
            "ray-token-off",
            "Ray's token authentication is off in this process",
            "whoever reaches the ports of an open cluster can run code on it and obtain the secrets of groups; a local "
            "ray.init() turns authentication on by itself",
            "set RAY_AUTH_MODE=token for ray start, drivers and jobs; `ray get-auth-token --generate` makes the token",
        )


def _nixl(installed: bool) -> Finding:
    if installed:
        return ok("nixl", "NIXL is installed")
    return note(
        "nixl-missing",
        "there are RDMA adapters, but NIXL is not installed",
        "between hosts, CPU tensors use torchrpc (TCP on RoCE) and CUDA tensors nccl or torchrpc",
        "pip install '.[nixl]' in a checkout, on every node",
    )


def memory(evidence: Evidence) -> Iterator[Finding]:
    """Findings about locked memory, forks, shared memory and huge pages. Pure."""
    if evidence.endpoint.hcas:
        yield from limit_levels(evidence.endpoint, [_locked(evidence), _fork(evidence)])
    if evidence.shm_total_bytes is not None:
        yield _shared(evidence.shm_total_bytes, evidence.endpoint.shm_free_bytes)
    if evidence.endpoint.huge_pages is not None:
        yield _huge(evidence.endpoint.huge_pages)


def _locked(evidence: Evidence) -> Finding:
    limit, uid = evidence.endpoint.memlock_bytes, evidence.endpoint.uid
    if limit is None or limit >= MIN_MEMLOCK_BYTES:
        return ok("memlock", f"memory that may be locked: {'no limit' if limit is None else f'{limit // MIB} MiB'}")
    who = "this root user, which lacks CAP_IPC_LOCK or is root only in a user namespace,"
    return problem(
        "memlock-small",
        f"{f'a process of uid {uid}' if uid else who} may lock {limit / MIB:g} MiB",
        "RDMA locks its buffers: no lane uses it here",
        "run as root with IPC_LOCK, or raise the limit for all users: LimitMEMLOCK=infinity in the container runtime's "
        "unit, or ulimit -l unlimited; IPC_LOCK alone does nothing for a user other than root"
        if uid
        else "add IPC_LOCK to the container (securityContext.capabilities.add), or run ulimit -l unlimited",
    )


def _fork(evidence: Evidence) -> Finding:
    unset = [name for name in _FORK_SAFETY if evidence.environment.get(name) is None]
    if not unset:
        return ok("fork-safety", f"{' and '.join(_FORK_SAFETY)} are set")
    release = re.match(r"(\d+)\.(\d+)", evidence.kernel or "")
    copies = release is not None and (int(release[1]), int(release[2])) >= _COPIES_ON_FORK
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


def _shared(total: int, free: int) -> Finding:
    if free >= SMALL_SHM_BYTES:
        return ok("shm", f"/dev/shm: {free / GIB:.1f} of {total / GIB:.1f} GiB free")
    return warning(
        "shm-small",
        f"/dev/shm: {free // MIB} of {total // MIB} MiB free" if total else "no /dev/shm",
        "Ray's object store falls back to files, and NCCL and DataLoader workers fail where they need it; the shm lane "
        "does not use it",
        "mount a larger one (Docker: --shm-size, Kubernetes: an emptyDir with medium: Memory)"
        if total < SMALL_SHM_BYTES
        else "find what fills it: ls -l /dev/shm",
    )


def _huge(state: str) -> Finding:
    if state == "used":
        return ok("huge-pages", "large CPU tensors use huge pages")
    seen = "torch does not use huge pages in this process"
    remedy = "start members with runtime_env=raytorchrpc.runtime_env(); for a driver, export THP_MEM_ALLOC_ENABLE=1"
    if state == "forbidden":
        seen = "the kernel does not offer huge pages"
        remedy = "write madvise to /sys/kernel/mm/transparent_hugepage/enabled"
    meaning = "a large CPU tensor that arrives over torchrpc takes two to four times as long"
    return note("huge-pages-unused", seen, meaning, remedy)


def network(evidence: Evidence) -> Iterator[Finding]:
    """Findings about addresses, interfaces and the resolution of the host name. Pure."""
    if evidence.endpoint.node_ip:
        yield from _address(evidence)
    if evidence.own_addresses is not None:
        yield _own_name(evidence, evidence.own_addresses)
    yield from _selected(evidence)


def _address(evidence: Evidence) -> Iterator[Finding]:
    endpoint = evidence.endpoint
    if is_loopback(endpoint.node_ip):
        yield finding(
            "problem" if evidence.hosts > 1 else "note",
            "address-loopback",
            f"Ray's address of this node is {endpoint.node_ip}",
            "other hosts cannot reach its members",
            "pass the address that other hosts use to ray start --node-ip-address" if evidence.hosts > 1 else "",
        )
        return
    name = endpoint.interface_of(endpoint.node_ip)
    if name is not None:
        yield ok("address", f"Ray's address of this node, {endpoint.node_ip}, is on {name}")
    elif evidence.live or any(i.addresses for i in endpoint.interfaces):  # files may list no IPv4 address
        yield warning(
            "address-unknown",
            f"no interface holds Ray's address of this node, {endpoint.node_ip}",
            "torchrpc and NCCL listen on the address of the host name, or on one they choose",
            "set GroupConfig(interface=...) to the interface that other hosts reach",
        )


def _own_name(evidence: Evidence, addresses: tuple[str, ...]) -> Finding:
    name, several = evidence.endpoint.hostname, evidence.hosts > 1
    # On a single host it does no harm, and Debian's installer sets it up like that.
    level: Level = "warning" if several else "note"
    if not addresses:
        return finding(
            level,
            "own-name-unknown",
            f"the host name, {name}, does not resolve",
            "torch.distributed by itself (Gloo) fails to start; members do not look the name up",
            f"add {name} with this machine's address to /etc/hosts, or export GLOO_SOCKET_IFNAME",
        )
    seen = f"the host name, {name}, resolves to {some(addresses)}"
    if not all(is_loopback(address) for address in addresses):
        return ok("own-name", seen)
    return finding(
        level,
        "own-name-loopback",
        seen,
        "torch.distributed by itself (Gloo, TensorPipe, a store on this host) gives other hosts an address that is not "
        "this machine's; members are not affected: they listen on Ray's address of the node",
        f"add {name} with this machine's address to /etc/hosts, or export TP_SOCKET_IFNAME and GLOO_SOCKET_IFNAME on "
        "this node"
        if several
        else "",
    )


def _selected(evidence: Evidence) -> Iterator[Finding]:
    usable = {i.name for i in evidence.endpoint.interfaces if i.up}
    wrong = [
        f"{name}={value}"
        for name in ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
        if (value := evidence.environment.get(name)) and not set(value.split(",")) & usable
    ]
    if usable and wrong:
        yield warning(
            "interface-variable-wrong",
            f"{' and '.join(wrong)}: no interface of that name is up ({some(sorted(usable), 8)})",
            "torch silently falls back to the address of the host name; with GLOO_SOCKET_IFNAME it fails",
            "unset the variable: interface names differ between nodes, and groups find their interface themselves",
        )
