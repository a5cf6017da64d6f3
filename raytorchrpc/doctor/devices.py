"""Rules about GPUs, RDMA adapters and NCCL's settings for them. Pure: equal evidence gives equal findings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from raytorchrpc.doctor.report import Evidence, Finding, finding, note, ok, problem, some, warning
from raytorchrpc.topology import nccl_env, rdma
from raytorchrpc.topology.endpoint import Endpoint
from raytorchrpc.topology.rdma import usable_ports

MIB = 1 << 20


# --- GPUs -----------------------------------------------------------------------------------------------------------


def gpus(evidence: Evidence) -> Iterator[Finding]:
    """Which GPUs exist, whether this process can use them, and how they reach each other."""
    seen = evidence.endpoint.gpus
    if not evidence.endpoint.wants_gpu:
        yield note("gpu-none", "the actor requested no GPU from Ray, so none was checked")
        return
    if not seen:
        yield _why_none(evidence)
        return
    yield _present(evidence)
    if evidence.nvml is False:
        yield note(
            "gpu-nvml-missing",
            "nvidia-ml-py is not installed",
            "NVLinks were not counted; CUDA reported peer access",
            "pip install '.[doctor]' in a checkout",
        )
    given, host = len(evidence.gpu_files), len(evidence.pci_gpus)
    if evidence.container and 0 < given < host:
        yield note(
            "gpu-partly-in-container",
            f"this container has {given} of the host's {host} GPUs",
            "members in other containers of this host see other GPUs; TensorPipe would abort when it compares them, so "
            "routing disables its cuda_ipc channel and the cuda_ipc lane between them, and CUDA tensors go through CPU "
            "memory",
            "put members of one host that exchange CUDA tensors into one container with all of their GPUs",
        )
    if any(" MIG " in gpu.name for gpu in seen):
        yield note(
            "gpu-mig",
            "one of the GPUs is a MIG slice",
            "CUDA shares no memory between slices and NCCL does not support them: CUDA tensors use torchrpc, through "
            "CPU memory",
        )
    if evidence.links:
        yield _links(evidence)
    if evidence.endpoint.hcas:  # only RDMA adapters use a GPU's BAR1
        yield from _bar1(evidence)


def _present(evidence: Evidence) -> Finding:
    endpoint = evidence.endpoint
    parts = {
        f"{len(endpoint.gpus)} x {some(dict.fromkeys(gpu.name for gpu in endpoint.gpus))}": True,
        f"driver {evidence.gpu_driver}": evidence.gpu_driver,
        f"supports CUDA {evidence.cuda_driver}": evidence.cuda_driver,
        f"torch with CUDA {endpoint.cuda_version}": endpoint.cuda_version,
    }
    return ok("gpu", ", ".join(part for part, known in parts.items() if known))


def _why_none(evidence: Evidence) -> Finding:
    endpoint, count, given = evidence.endpoint, len(evidence.pci_gpus), evidence.gpu_files
    chosen = evidence.environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None and chosen.strip() in ("", "-1", "NoDevFiles"):
        return note("gpu-none", f"CUDA_VISIBLE_DEVICES={chosen!r} hides every GPU")
    if evidence.cuda_works is False and given:
        return problem(
            "gpu-cuda-fails",
            f"/dev/{given[0]} exists, driver {evidence.gpu_driver or 'unknown'}, but torch {endpoint.torch_version} "
            f"cannot use CUDA {endpoint.cuda_version}",
            "no CUDA tensors",
            "run python -c 'import torch; torch.cuda.init()' to see the cause; usually the driver is older than "
            "torch's CUDA release, or the container lacks the driver's libraries",
        )
    if given and endpoint.torch_version and endpoint.cuda_version is None:
        seen = f"{len(given)} GPU(s), but torch {endpoint.torch_version} has no CUDA"
        return warning("gpu-torch-without-cuda", seen, "no CUDA tensors", "install a torch build with CUDA")
    if count and not given and evidence.container:
        return warning(
            "gpu-not-in-container",
            f"the host has {count} GPU(s), this container ({evidence.container}) has none",
            "no CUDA tensors here, and no cuda_ipc between members here and members with GPUs",
            "give the container GPUs (Kubernetes: resources.limits nvidia.com/gpu, Docker: --gpus), unless this "
            "process needs none",
        )
    if count and not given:
        return finding(
            "warning" if evidence.gpu_driver else "note",
            "gpu-driver-missing",
            f"{count} NVIDIA GPU(s), but no /dev/nvidia0; driver {evidence.gpu_driver or 'not loaded'}",
            "no CUDA tensors",
            "install and load NVIDIA's driver to use the GPUs",
        )
    return note("gpu-none", "no GPU", "CPU tensors only")


def _links(evidence: Evidence) -> Finding:
    apart = [f"{link.a}-{link.b}" for link in evidence.links if link.peer_access is False]
    if apart:
        return warning(
            "gpu-no-peer-access",
            f"no peer access between GPUs {some(apart)}",
            "copies between them go through CPU memory",
            "nvidia-smi topo -p2p r shows why; often an IOMMU or ACS in between: turn it off, or use GPUs behind one "
            "switch",
        )
    how = "all of them have peer access to each other"
    if counts := sorted({link.nvlinks for link in evidence.links if link.nvlinks is not None}):
        nvlinks = " or ".join(map(str, counts))
        how += ", over PCIe" if counts == [0] else f", with {nvlinks} NVLinks between two"
    return ok("gpu-links", how)


def _bar1(evidence: Evidence) -> Iterator[Finding]:
    gpus = evidence.endpoint.gpus
    small = [gpu for gpu in gpus if gpu.bar1_bytes is not None and gpu.bar1_bytes < gpu.memory_bytes]
    without = [gpu.index for gpu in gpus if gpu.resource1_present is False]
    if small:
        yield warning(
            "gpu-bar1-small",
            f"BAR1 of {len(small)} GPU(s) is smaller than the memory: GPU {small[0].index} has "
            f"{(small[0].bar1_bytes or 0) // MIB} of {small[0].memory_bytes // MIB} MiB",
            "TensorPipe's GPUDirect RDMA is off; nccl and nixl can register only part of the memory",
            "turn on above-4G decoding and resizable BAR in the firmware",
        )
    elif without:
        yield note(
            "gpu-resource1-missing",
            f"GPU(s) {some(without)} have no PCI file resource1",
            "TensorPipe would crash on it, so its GPUDirect RDMA is off; CUDA tensors between hosts use nixl or nccl",
        )


# --- RDMA adapters --------------------------------------------------------------------------------------------------


def adapters(evidence: Evidence) -> Iterator[Finding]:
    """Which lanes can use the RDMA adapters, and whether these can access GPU memory."""
    return limit_levels(evidence.endpoint, _findings(evidence.endpoint))


def limit_levels(endpoint: Endpoint, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Reduces warnings and problems to notes where no lane would use the adapters even if they worked.

    In many clouds, a machine's ordinary network card is also a RoCE adapter.
    """
    used = rdma.is_worth_using(endpoint)
    why = "no lane would use RDMA here: there is no GPU for nccl, no NIXL, and no InfiniBand for torchrpc; "
    for each in findings:
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
            "EFA looks like InfiniBand but fails in TensorPipe, so torchrpc uses TCP; nixl uses LIBFABRIC; NCCL needs "
            "a plug-in (aws-ofi-nccl), which the doctor cannot detect, so nccl is used only where it is named",
            "install NIXL, or aws-ofi-nccl and name the lane: "
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
    bare = [h.name for h, port in roce if not any(gid.routed for gid in port.gids)]
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


# --- NCCL -----------------------------------------------------------------------------------------------------------


def nccl_values(evidence: Evidence) -> dict[str, nccl_env.Advice]:
    """Advice on each of the five variables; empty for machines without GPUs and RDMA adapters."""
    endpoint = evidence.endpoint
    return nccl_env.advise(endpoint, own=evidence.nccl) if endpoint.gpus or endpoint.hcas else {}


def nccl(evidence: Evidence) -> Iterator[Finding]:
    """NCCL's variables: advised values, and chosen ones that do not suit this machine."""
    advised = nccl_values(evidence)
    if advised and (wrong := list(_unfit(evidence.endpoint, evidence.nccl))):
        yield warning(
            "nccl-value-unfit",
            "; ".join(wrong),
            "NCCL uses the value as it is: it fails, or uses TCP",
            "unset it: a suitable value is set when a group forms; one value for the whole job suits only one kind of "
            "node",
        )
    elif advised:
        texts = [f"{name}={advice.value}" for name, advice in advised.items() if advice.value is not None]
        yield ok("nccl-values", " ".join(texts) or "NCCL needs no settings here")


def _unfit(endpoint: Endpoint, chosen: dict[str, str]) -> Iterator[str]:
    """What is wrong with the chosen values."""
    ports = usable_ports(endpoint)
    names = [interface.name for interface in endpoint.interfaces if interface.up and interface.addresses]
    ifname = chosen.get(nccl_env.IFNAME, "")
    exact, wanted = ifname.startswith("="), ifname.removeprefix("=").split(",")
    exists = any(name == want if exact else name.startswith(want) for name in names for want in wanted if want)
    if ifname and not ifname.startswith("^") and names and not exists:
        yield f"NCCL_SOCKET_IFNAME={ifname} names no interface that is up"
    hca = chosen.get(nccl_env.HCA, "")
    if hca and ports and not any(nccl_env.matches(hca, *port) for port in ports):
        yield f"NCCL_IB_HCA={hca} matches no usable port"
    if (index := chosen.get(nccl_env.GID, "")).isdigit():  # -1: NCCL chooses
        yield from _gid(endpoint, int(index), hca)
    if ports and (off := chosen.get("NCCL_IB_DISABLE", "")) not in ("", "0"):
        yield f"NCCL_IB_DISABLE={off} stops NCCL from using {len(endpoint.hcas)} RDMA adapter(s)"


def _gid(endpoint: Endpoint, index: int, filter_text: str) -> Iterator[str]:
    for hca, port in usable_ports(endpoint):
        if port.link_layer != "Ethernet" or not nccl_env.matches(filter_text, hca, port):
            continue
        gid = next((gid for gid in port.gids if gid.index == index), None)
        if gid is None or not gid.routed:
            kind = "empty" if gid is None else "a link-local address" if gid.link_local else gid.kind
            right = nccl_env.gid_index(endpoint, port)
            yield f"NCCL_IB_GID_INDEX={index}: on {hca.name} that GID is {kind}; {right} is the routed one"
            return
