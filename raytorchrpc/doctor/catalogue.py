"""Every finding that exists, with its levels, its trigger and its lanes; a test compares docs/doctor.md with this."""

from __future__ import annotations

from typing import NamedTuple

_RDMA = ("nixl", "nccl", "torchrpc")
_CUDA = ("cuda_ipc", "nccl", "nixl", "torchrpc")


class Entry(NamedTuple):
    """One kind of finding."""

    levels: str
    when: str
    lanes: tuple[str, ...] = ()
    """The lanes it affects; empty means all."""


#: By id, grouped by subject.
# fmt: off
FINDINGS: dict[str, Entry] = {
    # software
    "torch": Entry("ok", "torch's release, its CUDA release, TensorPipe's transports and channels"),
    "torch-without-rpc": Entry("problem", "this torch build lacks TensorPipe"),
    "ray": Entry("ok", "Ray's release"),
    "ray-token": Entry("ok", "Ray's token authentication is on in this process"),
    "ray-token-off": Entry("note", "Ray's token authentication is off in this process"),
    "ray-token-missing": Entry("problem", "Ray's token authentication is on, but there is no token"),
    "nixl": Entry("ok", "there are RDMA adapters, and NIXL is installed", ("nixl",)),
    "nixl-missing": Entry("note", "there are RDMA adapters, but NIXL is not installed", ("nixl",)),
    "container": Entry("ok", "the process runs in a container"),
    # gpus
    "gpu": Entry("ok", "the GPUs that torch sees, the driver, the newest CUDA release it supports", _CUDA),
    "gpu-none": Entry("note", "no GPU, or the actor requested none"),
    "gpu-cuda-fails": Entry("problem", "the container has GPUs, but torch cannot use CUDA", _CUDA),
    "gpu-torch-without-cuda": Entry("warning", "there are GPUs, but torch has no CUDA", _CUDA),
    "gpu-not-in-container": Entry("warning", "the host has GPUs, but this container has none", _CUDA),
    "gpu-partly-in-container": Entry("note",
        "the container has only some of the host's GPUs", ("cuda_ipc", "torchrpc")),
    "gpu-driver-missing": Entry("note, warning", "GPUs are on the PCI bus, but no driver serves them", _CUDA),
    "gpu-nvml-missing": Entry("note", "nvidia-ml-py is not installed, so NVLinks are not counted"),
    "gpu-mig": Entry("note", "one of the GPUs is a MIG slice", ("cuda_ipc", "nccl")),
    "gpu-links": Entry("ok", "all GPUs of this process can map each other's memory", ("cuda_ipc", "nccl")),
    "gpu-no-peer-access": Entry("warning", "some GPUs cannot map each other's memory", ("cuda_ipc", "nccl")),
    "gpu-bar1-small": Entry("warning", "with RDMA adapters: BAR1 is smaller than the GPU's memory", _RDMA),
    "gpu-resource1-missing": Entry("note",
        "with RDMA adapters: the PCI file is missing without which TensorPipe's cuda_gdr crashes", ("torchrpc",)),
    # rdma
    "rdma": Entry("ok", "the ports that NCCL and UCX can use", ("nixl", "nccl")),
    "rdma-none": Entry("note", "no RDMA adapter", _RDMA),
    "rdma-efa": Entry("note, warning", "there are EFA adapters", _RDMA),
    "rdma-no-verbs-device": Entry("warning, problem",
        "the process may not open the verbs device of some or all adapters", _RDMA),
    "rdma-first-unusable": Entry("note, warning, problem",
        "port 1 of the first adapter, the only one TensorPipe opens, is not active", _RDMA),
    "rdma-port-down": Entry("note, warning", "another adapter has no active port", ("torchrpc",)),
    "rdma-no-routed-gid": Entry("note, warning, problem",
        "some or all RoCE adapters have only link-local addresses", _RDMA),
    "rdma-roce": Entry("note", "RoCE needs another GID index than the one TensorPipe uses", ("torchrpc",)),
    "rdma-link-layers-mixed": Entry("note", "the machine has both InfiniBand and RoCE", ("nccl",)),
    "rdma-gpudirect": Entry("ok", "adapters access GPU memory through a peer-memory client", _RDMA),
    "rdma-dma-buf-only": Entry("note",
        "adapters access GPU memory through DMA-BUF only, which TensorPipe cannot use", ("torchrpc",)),
    "rdma-no-gpudirect": Entry("warning", "adapters cannot access GPU memory", _RDMA),
    # NCCL
    "nccl-values": Entry("ok", "the NCCL settings that suit this machine", ("nccl",)),
    "nccl-value-unfit": Entry("warning", "an NCCL variable has a value that does not suit this machine", ("nccl",)),
    # memory
    "memlock": Entry("ok", "with RDMA adapters: how much memory may be locked", ("nixl", "nccl")),
    "memlock-small": Entry("note, problem", "with RDMA adapters: less than 64 MiB may be locked", _RDMA),
    "fork-safety": Entry("ok", "with RDMA adapters: libibverbs' fork support is on"),
    "fork-unsafe": Entry("note, warning",
        "with RDMA adapters: libibverbs' fork support is off; a note from Linux 5.13 on", ("torchrpc", "nixl")),
    "shm": Entry("ok", "free space in /dev/shm"),
    "shm-small": Entry("warning", "less than 256 MiB free in /dev/shm", ("nccl",)),
    "huge-pages": Entry("ok", "large CPU tensors use huge pages (tested)", ("torchrpc",)),
    "huge-pages-unused": Entry("note", "large CPU tensors do not use huge pages", ("torchrpc",)),
    # network
    "address": Entry("ok", "the interface that holds Ray's address of this node"),
    "address-unknown": Entry("warning", "no interface holds Ray's address of this node", ("torchrpc", "nccl")),
    "address-loopback": Entry("note, problem",
        "Ray's address of this node is a loopback address; a problem in a cluster of several hosts"),
    "own-name": Entry("ok", "the address that the host name resolves to"),
    "own-name-loopback": Entry("note, warning",
        "the host name resolves to 127.0.x.x; a warning in a cluster of several hosts", ("torchrpc",)),
    "own-name-unknown": Entry("note, warning",
        "the host name does not resolve; a warning in a cluster of several hosts", ("torchrpc",)),
    "interface-variable-wrong": Entry("warning",
        "TP_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names no interface of this machine", ("torchrpc",)),
    # several processes
    "together-routes": Entry("ok", "the lanes that members on these nodes, or these actors, would use"),
    "together-no-group": Entry("problem", "members there could not form a group, and why"),
    "together-containers-apart": Entry("warning",
        "two processes with GPUs share a host but not a container", ("cuda_ipc", "torchrpc", "shm")),
    "together-rdma-uneven": Entry("warning", "only some processes have usable RDMA adapters", _RDMA),
    "together-no-common-fabric": Entry("warning", "two have RDMA adapters that cannot reach each other", _RDMA),
    "together-gid-index-differs": Entry("note", "no single GID index suits the whole job", ("nccl",)),
    "together-token-uneven": Entry("warning", "Ray's token authentication is on in only some processes"),
}
# fmt: on
