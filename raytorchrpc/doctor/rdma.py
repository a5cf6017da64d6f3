"""RDMA adapters: who can use which of them, and whether they reach GPU memory."""

from __future__ import annotations

from raytorchrpc.doctor.evidence import Evidence
from raytorchrpc.doctor.findings import Finding, some
from raytorchrpc.topology import rdma
from raytorchrpc.topology.endpoint import Endpoint, Hca

_RDMA_LANES = ("nixl", "nccl", "torchrpc")


def findings(evidence: Evidence) -> list[Finding]:
    """Pure: the same evidence gives the same findings."""
    return in_proportion(evidence.endpoint, _findings(evidence.endpoint))


def in_proportion(endpoint: Endpoint, found: list[Finding]) -> list[Finding]:
    """Notes at most, where no lane would use the adapters even if all were well with them.

    In many clouds a machine's plain network card is a RoCE adapter too.
    """
    infiniband = any(
        port.link_layer == "InfiniBand" for hca in endpoint.hcas for port in hca.ports if hca.driver != "efa"
    )
    if endpoint.gpus or endpoint.nixl or infiniband:
        return found
    why = "no lane would use RDMA here: there is no GPU for nccl, no NIXL, and no InfiniBand for torchrpc; "
    return [
        f.model_copy(update={"level": "note", "meaning": why + f.meaning}) if f.level in ("warning", "problem") else f
        for f in found
    ]


def _findings(endpoint: Endpoint) -> list[Finding]:
    if not endpoint.hcas:
        seen, meaning = "no RDMA adapter", "tensors between hosts go over TCP"
        return [Finding(id="rdma-none", level="note", seen=seen, meaning=meaning, lanes=_RDMA_LANES)]
    efa = [hca for hca in endpoint.hcas if hca.driver == "efa"]
    if efa and len(efa) == len(endpoint.hcas):
        return [_efa(efa)]
    found = [_efa(efa)] if efa else []
    usable = rdma.usable_ports(endpoint)
    found += _no_verbs(endpoint)
    found += _ports(endpoint, {hca.name for hca, _ in usable})
    found += _roce(endpoint)
    layers = {port.link_layer for _, port in usable}
    if len(layers) > 1:
        found.append(
            Finding(
                id="rdma-link-layers-mixed",
                level="note",
                seen="some adapters are InfiniBand and some RoCE",
                meaning="NCCL cannot join one to the other: NCCL_IB_HCA names those of the greater rate",
                lanes=("nccl",),
            )
        )
    if usable:
        rates = sorted({port.rate_gbps for _, port in usable if port.rate_gbps})
        speed = f", {' or '.join(f'{rate:g}' for rate in rates)} Gb/s" if rates else ""
        seen = f"{len(usable)} usable port(s) on {len(endpoint.hcas)} adapter(s), {' and '.join(sorted(layers))}{speed}"
        found.insert(0, Finding(id="rdma", level="ok", seen=seen, lanes=("nixl", "nccl")))
        found += _gpudirect(endpoint)
    return found


def _efa(adapters: list[Hca]) -> Finding:
    return Finding(
        id="rdma-efa",
        level="warning",
        seen=f"EFA: {some(hca.name for hca in adapters)}",
        meaning="EFA passes for InfiniBand and fails in TensorPipe, so torchrpc goes over TCP; NCCL needs a plug-in "
        "(aws-ofi-nccl), which cannot be seen from here, so the nccl lane is used only where it is asked for",
        remedy="install aws-ofi-nccl and name the lane: GroupConfig(lanes=('socket', 'shm', 'cuda_ipc', 'nccl', "
        "'torchrpc'))",
        lanes=_RDMA_LANES,
    )


def _no_verbs(endpoint: Endpoint) -> list[Finding]:
    closed = [hca.name for hca in endpoint.hcas if hca.verbs_device is False]
    if not closed:
        return []
    every = len(closed) == len(endpoint.hcas)
    return [
        Finding(
            id="rdma-no-verbs-device",
            level="problem" if every else "warning",
            seen=f"no /dev/infiniband/uverbs device that this process may open for {some(closed)}",
            meaning="no RDMA: NCCL and torchrpc go over TCP without a word" if every else "these adapters are not used",
            remedy="Kubernetes: ask for the RDMA device plugin's resource (rdma/hca, rdma/ib, ...); Docker: --device "
            "/dev/infiniband; otherwise check the permissions of /dev/infiniband/uverbs*",
            lanes=_RDMA_LANES,
        )
    ]


def _ports(endpoint: Endpoint, usable: set[str]) -> list[Finding]:
    """Adapters without any active port. The first of the list has a finding of its own: TensorPipe opens no other."""
    down = [h for h in endpoint.hcas if h.ports and all(p.state != "ACTIVE" for p in h.ports) and h.driver != "efa"]
    found = []
    first = endpoint.hcas[0]
    port = first.port(1)
    if port is not None and port.state != "ACTIVE" and first.driver != "efa":
        found.append(
            Finding(
                id="rdma-first-unusable",
                level="warning" if usable else "problem",
                seen=f"port 1 of the first adapter, {first.name}, is {port.state}",
                meaning="TensorPipe opens the first adapter only, so torchrpc goes over TCP; "
                + ("nixl and nccl use the others" if usable else "nor can nixl and nccl use another"),
                remedy="bring the link up, or let the container see only adapters that work"
                + ("; with nixl installed, CPU tensors go by RDMA too" if usable and not endpoint.nixl else ""),
                lanes=("torchrpc",) if usable else _RDMA_LANES,
            )
        )
    others = [hca.name for hca in down if hca is not first]
    if others and usable:
        found.append(
            Finding(
                id="rdma-port-down",
                level="warning",
                seen=f"no active port on {some(others)}",
                meaning="nixl and nccl use the others; TensorPipe takes the adapter nearest to each GPU without a "
                "look, so its GPUDirect RDMA is off",
                remedy="bring the links up, or let the container see only adapters that work",
                lanes=("torchrpc",),
            )
        )
    return found


def _roce(endpoint: Endpoint) -> list[Finding]:
    roce = [
        (hca, port)
        for hca in endpoint.hcas
        if hca.driver != "efa"
        for port in hca.ports
        if port.link_layer == "Ethernet" and port.state == "ACTIVE"
    ]
    if not roce:
        return []
    found = []
    bare = [h.name for h, port in roce if not any("v2" in gid.kind and not gid.link_local for gid in port.gids)]
    if bare:
        every = len(bare) == len(roce)
        found.append(
            Finding(
                id="rdma-no-routed-gid",
                level="problem" if every else "warning",
                seen=f"RoCE without a RoCE v2 GID that is routed (link-local ones only) on {some(bare)}",
                meaning="no RDMA to other hosts" if every else "these adapters are not used",
                remedy="give the adapter's network interface an IPv4 address; in a container the interface has to be "
                "moved into it (SR-IOV or macvlan), or the host's network be used",
                lanes=_RDMA_LANES,
            )
        )
    if len(bare) < len(roce) and roce[0][0] is endpoint.hcas[0]:
        found.append(
            Finding(
                id="rdma-roce",
                level="note",
                seen="RoCE: the routed address is not at GID index 0, or is sent with hop limit 1 from there",
                meaning="TensorPipe uses index 0 only, so torchrpc goes over TCP; nixl and nccl choose the right one",
                remedy=""
                if endpoint.nixl or not endpoint.torch_version
                else "pip install 'raytorchrpc[nixl]' takes CPU tensors between hosts over RDMA too",
                lanes=("torchrpc",),
            )
        )
    return found


def _gpudirect(endpoint: Endpoint) -> list[Finding]:
    if not endpoint.gpus:
        return []
    shared = all(gpu.dma_buf for gpu in endpoint.gpus)
    if endpoint.peer_memory:
        road = "a peer-memory client" + (" and DMA-BUF" if shared else "")
        return [
            Finding(id="rdma-gpudirect", level="ok", seen=f"adapters reach GPU memory by {road}", lanes=_RDMA_LANES)
        ]
    if shared:
        return [
            Finding(
                id="rdma-dma-buf-only",
                level="note",
                seen="adapters reach GPU memory by DMA-BUF; no peer-memory client (nvidia-peermem) is loaded",
                meaning="nixl and nccl use that; TensorPipe cannot, so CUDA tensors go by nixl or nccl between hosts",
                lanes=("torchrpc",),
            )
        ]
    return [
        Finding(
            id="rdma-no-gpudirect",
            level="warning",
            seen="no peer-memory client (nvidia-peermem) is loaded, and the driver offers no DMA-BUF",
            meaning="adapters cannot reach GPU memory: CUDA tensors between hosts are staged through CPU memory",
            remedy="modprobe nvidia-peermem on the host, or use the driver's open kernel modules (DMA-BUF)",
            lanes=_RDMA_LANES,
        )
    ]
