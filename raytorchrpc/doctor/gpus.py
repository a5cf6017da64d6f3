"""What GPUs there are, whether this process may use them, and how they reach each other."""

from __future__ import annotations

from raytorchrpc.doctor.evidence import Evidence
from raytorchrpc.doctor.findings import Finding, some

_LANES = ("cuda_ipc", "nccl", "nixl", "torchrpc")
MIB = 1 << 20


def findings(evidence: Evidence) -> list[Finding]:
    """Pure: the same evidence gives the same findings."""
    gpus = evidence.endpoint.gpus
    if not evidence.endpoint.wants_gpu:
        return [Finding(id="gpu-none", level="note", seen="the actor asked Ray for no GPU, so none was looked at")]
    if not gpus:
        return [_why_none(evidence)]
    found = [_present(evidence)]
    if evidence.nvml == "missing":
        found.append(
            Finding(
                id="gpu-nvml-missing",
                level="note",
                seen="nvidia-ml-py is not installed",
                meaning="NVLinks were not counted; peer access was asked of CUDA",
                remedy="pip install 'raytorchrpc[doctor]'",
            )
        )
    found += _partly(evidence)
    if any(" MIG " in gpu.name for gpu in gpus):
        found.append(
            Finding(
                id="gpu-mig",
                level="note",
                seen="a MIG slice is among the GPUs",
                meaning="CUDA shares no memory between slices and NCCL does not work on them: CUDA tensors go by "
                "torchrpc, through CPU memory",
                lanes=("cuda_ipc", "nccl"),
            )
        )
    return found + _links(evidence) + _windows(evidence)


def _present(evidence: Evidence) -> Finding:
    gpus = evidence.endpoint.gpus
    names = dict.fromkeys(gpu.name for gpu in gpus)
    parts = [f"{len(gpus)} x {some(names)}"]
    if evidence.gpu_driver:
        parts.append(f"driver {evidence.gpu_driver}")
    if evidence.cuda_driver:
        parts.append(f"serves CUDA {evidence.cuda_driver}")
    if evidence.endpoint.cuda_version:
        parts.append(f"torch with CUDA {evidence.endpoint.cuda_version}")
    return Finding(id="gpu", level="ok", seen=", ".join(parts), lanes=_LANES)


def _why_none(evidence: Evidence) -> Finding:
    count, chosen = len(evidence.pci_gpus), evidence.environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None and chosen.strip() in ("", "-1", "NoDevFiles"):
        return Finding(id="gpu-none", level="note", seen=f"CUDA_VISIBLE_DEVICES={chosen!r} hides every GPU")
    if evidence.cuda_works is False and evidence.gpu_files:
        return Finding(
            id="gpu-cuda-fails",
            level="problem",
            seen=f"/dev/{evidence.gpu_files[0]} is there, driver {evidence.gpu_driver or 'unknown'}, and torch "
            f"{evidence.endpoint.torch_version} cannot use CUDA {evidence.endpoint.cuda_version}",
            meaning="no CUDA tensors",
            remedy="python -c 'import torch; torch.cuda.init()' names the cause; mostly the driver is older than "
            "torch's CUDA release, or the container lacks the driver's libraries",
            lanes=_LANES,
        )
    if evidence.gpu_files and evidence.endpoint.torch_version and evidence.endpoint.cuda_version is None:
        return Finding(
            id="gpu-torch-without-cuda",
            level="warning",
            seen=f"{len(evidence.gpu_files)} GPU(s), and torch {evidence.endpoint.torch_version} has no CUDA",
            meaning="no CUDA tensors",
            remedy="install a torch build with CUDA",
            lanes=_LANES,
        )
    if count and not evidence.gpu_files:
        if evidence.container:
            return Finding(
                id="gpu-not-in-container",
                level="warning",
                seen=f"the host has {count} GPU(s) and this container ({evidence.container}) none",
                meaning="no CUDA tensors here, and no cuda_ipc between members here and those that have GPUs",
                remedy="give it GPUs (Kubernetes: resources.limits nvidia.com/gpu, Docker: --gpus); nothing to do if "
                "this process is to have none",
                lanes=_LANES,
            )
        return Finding(
            id="gpu-driver-missing",
            level="warning" if evidence.gpu_driver else "note",
            seen=f"{count} NVIDIA GPU(s) and no /dev/nvidia0, driver {evidence.gpu_driver or 'not loaded'}",
            meaning="no CUDA tensors",
            remedy="install and load NVIDIA's driver, if the GPUs are to be used",
            lanes=_LANES,
        )
    return Finding(id="gpu-none", level="note", seen="no GPU", meaning="CPU tensors only")


def _partly(evidence: Evidence) -> list[Finding]:
    given, host = len(evidence.gpu_files), len(evidence.pci_gpus)
    if not evidence.container or not 0 < given < host:
        return []
    return [
        Finding(
            id="gpu-partly-in-container",
            level="note",
            seen=f"this container has {given} of the host's {host} GPUs",
            meaning="a member in another container of this host sees other GPUs; TensorPipe would abort where it "
            "compares them, so routing takes its cuda_ipc channel and the cuda_ipc lane away between the two, and CUDA "
            "tensors go through CPU memory",
            remedy="members that exchange CUDA tensors on one host belong into one container with all of their GPUs",
            lanes=("cuda_ipc", "torchrpc"),
        )
    ]


def _links(evidence: Evidence) -> list[Finding]:
    if not evidence.links:
        return []
    apart = [f"{link.a}-{link.b}" for link in evidence.links if link.peer_access is False]
    if apart:
        return [
            Finding(
                id="gpu-no-peer-access",
                level="warning",
                seen=f"no peer access between GPUs {some(apart)}",
                meaning="copies between them go through CPU memory",
                remedy="nvidia-smi topo -p2p r shows why; often an IOMMU or ACS on the way: turn it off, or use GPUs "
                "behind one switch",
                lanes=("cuda_ipc", "nccl"),
            )
        ]
    counts = sorted({link.nvlinks for link in evidence.links if link.nvlinks is not None})
    if not counts:
        how = "peer access between all of them"
    elif counts == [0]:
        how = "peer access between all of them, over PCIe"
    else:
        how = f"peer access between all of them, {' or '.join(map(str, counts))} NVLinks from one to another"
    return [Finding(id="gpu-links", level="ok", seen=how, lanes=("cuda_ipc", "nccl"))]


def _windows(evidence: Evidence) -> list[Finding]:
    """Only with RDMA adapters: nobody else looks through a GPU's window."""
    endpoint = evidence.endpoint
    if not endpoint.hcas:
        return []
    small = [g for g in endpoint.gpus if g.bar1_bytes is not None and g.bar1_bytes < g.memory_bytes]
    if small:
        gpu = small[0]
        return [
            Finding(
                id="gpu-bar1-small",
                level="warning",
                seen=f"BAR1 of {len(small)} GPU(s) is smaller than the memory: GPU {gpu.index} has "
                f"{(gpu.bar1_bytes or 0) // MIB} of {gpu.memory_bytes // MIB} MiB",
                meaning="TensorPipe's GPUDirect RDMA is off; nccl and nixl can register only part of the memory",
                remedy="turn on above-4G decoding and resizable BAR in the firmware",
                lanes=("torchrpc", "nccl", "nixl"),
            )
        ]
    without = [gpu.index for gpu in endpoint.gpus if gpu.resource1_present is False]
    if without:
        return [
            Finding(
                id="gpu-resource1-missing",
                level="note",
                seen=f"GPU(s) {some(without)} have no PCI file resource1",
                meaning="TensorPipe would crash on it, so its GPUDirect RDMA is off; CUDA tensors between hosts go by "
                "nixl or nccl",
                lanes=("torchrpc",),
            )
        ]
    return []
