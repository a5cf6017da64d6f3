"""Findings about RDMA adapters: which lanes can use them, and whether they can access GPU memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from raytorchrpc.doctor.evidence import Evidence
from raytorchrpc.doctor.findings import Finding, finding, note, ok, some, warning
from raytorchrpc.topology.endpoint import Endpoint
from raytorchrpc.topology.rdma import usable_ports


def findings(evidence: Evidence) -> Iterator[Finding]:
    """Pure: equal evidence gives equal findings."""
    return limit_levels(evidence.endpoint, _findings(evidence.endpoint))


def limit_levels(endpoint: Endpoint, found: Iterable[Finding]) -> Iterator[Finding]:
    """Reduces warnings and problems to notes where no lane would use the adapters even if they worked.

    In many clouds, a machine's ordinary network card is also a RoCE adapter.
    """
    ports = [port for hca in endpoint.hcas if hca.driver != "efa" for port in hca.ports]
    used = endpoint.gpus or endpoint.nixl or any(port.link_layer == "InfiniBand" for port in ports)
    why = "no lane would use RDMA here: there is no GPU for nccl, no NIXL, and no InfiniBand for torchrpc; "
    for each in found:
        if not used and each.level not in ("ok", "note"):
            each = each.model_copy(update={"level": "note", "meaning": why + each.meaning})
        yield each


def _findings(endpoint: Endpoint) -> Iterator[Finding]:
    if not endpoint.hcas:
        yield note("rdma-none", "no RDMA adapter", "tensors between hosts use TCP")
        return
    efa = [hca for hca in endpoint.hcas if hca.driver == "efa"]
    usable = usable_ports(endpoint) if len(efa) < len(endpoint.hcas) else []
    layers = {port.link_layer for _, port in usable}
    if usable:
        rates = sorted({port.rate_gbps for _, port in usable if port.rate_gbps})
        speed = f", {' or '.join(f'{rate:g}' for rate in rates)} Gb/s" if rates else ""
        ports = f"{len(usable)} usable port(s) on {len(endpoint.hcas)} adapter(s)"
        yield ok("rdma", f"{ports}, {' and '.join(sorted(layers))}{speed}")
    if efa:
        yield warning(
            "rdma-efa",
            f"EFA: {some(hca.name for hca in efa)}",
            "EFA looks like InfiniBand but fails in TensorPipe, so torchrpc uses TCP; NCCL needs a plug-in "
            "(aws-ofi-nccl), which the doctor cannot detect, so the nccl lane is used only where it is named",
            "install aws-ofi-nccl and name the lane: "
            "GroupConfig(lanes=('socket', 'shm', 'cuda_ipc', 'nccl', 'torchrpc'))",
        )
    if len(efa) == len(endpoint.hcas):
        return
    yield from _no_verbs(endpoint)
    yield from _ports(endpoint, bool(usable))
    yield from _roce(endpoint)
    if len(layers) > 1:
        yield note(
            "rdma-link-layers-mixed",
            "some adapters are InfiniBand and some RoCE",
            "NCCL cannot connect one to the other: NCCL_IB_HCA names the faster kind",
        )
    if usable and endpoint.gpus:
        yield _gpudirect(endpoint)


def _no_verbs(endpoint: Endpoint) -> Iterator[Finding]:
    closed = [hca.name for hca in endpoint.hcas if hca.verbs_device is False]
    every = len(closed) == len(endpoint.hcas)
    if closed:
        yield finding(
            "problem" if every else "warning",
            "rdma-no-verbs-device",
            f"this process may not open a /dev/infiniband/uverbs device for {some(closed)}",
            "no RDMA: NCCL and torchrpc silently use TCP" if every else "these adapters are not used",
            "Kubernetes: request the RDMA device plugin's resource (rdma/hca, rdma/ib, ...); Docker: --device "
            "/dev/infiniband; otherwise check the permissions of /dev/infiniband/uverbs*",
        )


def _ports(endpoint: Endpoint, usable: bool) -> Iterator[Finding]:
    """Adapters without an active port. The first adapter has its own finding: TensorPipe opens no other."""
    first = endpoint.hcas[0]
    port = first.port(1)
    if port is not None and port.state != "ACTIVE" and first.driver != "efa":
        rest = "nixl and nccl use the others" if usable else "nixl and nccl have no other either"
        nixl = "; with nixl installed, CPU tensors use RDMA too" if usable and not endpoint.nixl else ""
        yield finding(
            "warning" if usable else "problem",
            "rdma-first-unusable",
            f"port 1 of the first adapter, {first.name}, is {port.state}",
            f"TensorPipe opens only the first adapter, so torchrpc uses TCP; {rest}",
            f"bring the link up, or expose only working adapters to the container{nixl}",
            lanes=("torchrpc",) if usable else None,
        )
    others = [hca for hca in endpoint.hcas[1:] if hca.ports and hca.driver != "efa"]
    down = [hca.name for hca in others if all(port.state != "ACTIVE" for port in hca.ports)]
    if down and usable:
        yield warning(
            "rdma-port-down",
            f"no active port on {some(down)}",
            "nixl and nccl use the others; TensorPipe takes the adapter nearest to each GPU without checking its port, "
            "so its GPUDirect RDMA is off",
            "bring the links up, or expose only working adapters to the container",
        )


def _roce(endpoint: Endpoint) -> Iterator[Finding]:
    ports = [(hca, port) for hca in endpoint.hcas if hca.driver != "efa" for port in hca.ports]
    roce = [(hca, port) for hca, port in ports if port.link_layer == "Ethernet" and port.state == "ACTIVE"]
    bare = [h.name for h, port in roce if not any("v2" in gid.kind and not gid.link_local for gid in port.gids)]
    every = len(bare) == len(roce)
    if bare:
        yield finding(
            "problem" if every else "warning",
            "rdma-no-routed-gid",
            f"RoCE without a routed RoCE v2 GID (only link-local ones) on {some(bare)}",
            "no RDMA to other hosts" if every else "these adapters are not used",
            "give the adapter's network interface an IPv4 address; for a container, move the interface into it (SR-IOV "
            "or macvlan) or use the host's network",
        )
    if not every and roce[0][0] is endpoint.hcas[0]:
        install = "pip install '.[nixl]' in a checkout sends CPU tensors between hosts over RDMA too"
        yield note(
            "rdma-roce",
            "RoCE: the routed address is not at GID index 0, or packets from that index have hop limit 1",
            "TensorPipe uses only index 0, so torchrpc uses TCP; nixl and nccl choose the right index",
            "" if endpoint.nixl or not endpoint.torch_version else install,
        )


def _gpudirect(endpoint: Endpoint) -> Finding:
    shared = all(gpu.dma_buf for gpu in endpoint.gpus)
    if endpoint.peer_memory:
        how = "a peer-memory client" + (" and DMA-BUF" if shared else "")
        return ok("rdma-gpudirect", f"adapters access GPU memory through {how}")
    if shared:
        return note(
            "rdma-dma-buf-only",
            "adapters access GPU memory through DMA-BUF; no peer-memory client (nvidia-peermem) is loaded",
            "nixl and nccl use DMA-BUF; TensorPipe cannot, so CUDA tensors between hosts use nixl or nccl",
        )
    return warning(
        "rdma-no-gpudirect",
        "no peer-memory client (nvidia-peermem) is loaded, and the driver offers no DMA-BUF",
        "adapters cannot access GPU memory: CUDA tensors between hosts go through CPU memory",
        "modprobe nvidia-peermem on the host, or use the driver's open kernel modules (DMA-BUF)",
    )
