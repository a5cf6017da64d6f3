"""Findings about GPUs: which exist, whether this process can use them, and how they reach each other."""

from __future__ import annotations

from collections.abc import Iterator

from raytorchrpc.doctor.evidence import Evidence
from raytorchrpc.doctor.findings import Finding, finding, note, ok, problem, some, warning

MIB = 1 << 20


def findings(evidence: Evidence) -> Iterator[Finding]:
    """Pure: equal evidence gives equal findings."""
    gpus = evidence.endpoint.gpus
    if not evidence.endpoint.wants_gpu:
        yield note("gpu-none", "the actor requested no GPU from Ray, so none was checked")
        return
    if not gpus:
        yield _why_none(evidence)
        return
    yield _present(evidence)
    if evidence.nvml == "missing":
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
    if any(" MIG " in gpu.name for gpu in gpus):
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
