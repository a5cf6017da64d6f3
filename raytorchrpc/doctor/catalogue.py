"""Every finding there is, with the levels that it can have; docs/doctor.md is checked against this."""

from __future__ import annotations

#: id -> (levels, when it is said)
FINDINGS: dict[str, tuple[str, str]] = {
    # software
    "torch": ("ok", "torch's release, its CUDA, TensorPipe's transports and channels"),
    "torch-without-rpc": ("problem", "this build of torch has no TensorPipe"),
    "ray": ("ok", "Ray's release"),
    "ray-token": ("ok", "Ray's token authentication is on in this process"),
    "ray-token-off": ("note", "it is off in this process"),
    "ray-token-missing": ("problem", "it is on, and there is no token"),
    "nixl": ("ok", "NIXL is installed, and there are adapters for it"),
    "nixl-missing": ("note", "there are adapters for it, and it is not installed"),
    "container": ("ok", "the process is inside a container"),
    # gpus
    "gpu": ("ok", "the GPUs that torch sees, the driver, the CUDA release that it serves"),
    "gpu-none": ("note", "no GPU, or none asked for"),
    "gpu-cuda-fails": ("problem", "GPUs were given to this container, and torch cannot use CUDA"),
    "gpu-torch-without-cuda": ("warning", "GPUs are there, and torch has no CUDA"),
    "gpu-not-in-container": ("warning", "the host has GPUs, and this container was given none"),
    "gpu-partly-in-container": ("note", "the container was given some of the host's GPUs"),
    "gpu-driver-missing": ("note, warning", "GPUs on the bus, and no driver that serves them"),
    "gpu-nvml-missing": ("note", "nvidia-ml-py is not installed, so NVLinks are not counted"),
    "gpu-mig": ("note", "a MIG slice is among the GPUs"),
    "gpu-links": ("ok", "each GPU of this process may map the memory of each other one"),
    "gpu-no-peer-access": ("warning", "some may not"),
    "gpu-bar1-small": ("warning", "with RDMA adapters: BAR1 is smaller than the GPU's memory"),
    "gpu-resource1-missing": (
        "note",
        "with RDMA adapters: the file on which TensorPipe's cuda_gdr would crash is missing",
    ),
    # rdma
    "rdma": ("ok", "the ports that NCCL and UCX can use"),
    "rdma-none": ("note", "no RDMA adapter"),
    "rdma-efa": ("note, warning", "EFA adapters"),
    "rdma-no-verbs-device": (
        "warning, problem",
        "the process may not open the verbs device of some, or of any adapter",
    ),
    "rdma-first-unusable": ("note, warning, problem", "the only adapter that TensorPipe opens has no active port 1"),
    "rdma-port-down": ("note, warning", "another adapter has no active port"),
    "rdma-no-routed-gid": ("note, warning, problem", "RoCE with link-local addresses only, on some or all adapters"),
    "rdma-roce": ("note", "RoCE that needs another GID index than the one TensorPipe uses"),
    "rdma-link-layers-mixed": ("note", "InfiniBand and RoCE on one machine"),
    "rdma-gpudirect": ("ok", "adapters reach GPU memory by a peer-memory client"),
    "rdma-dma-buf-only": ("note", "they reach it by DMA-BUF only, which TensorPipe cannot use"),
    "rdma-no-gpudirect": ("warning", "they cannot reach it"),
    # NCCL
    "nccl-values": ("ok", "what NCCL should be told here"),
    "nccl-value-unfit": ("warning", "a value of NCCL's that was set does not fit this machine"),
    # memory
    "memlock": ("ok", "with RDMA adapters: how much memory may be locked"),
    "memlock-small": ("note, problem", "with RDMA adapters: less than 64 MiB may be locked"),
    "fork-safety": ("ok", "with RDMA adapters: libibverbs is told to expect forks"),
    "fork-unsafe": ("note, warning", "with RDMA adapters: it is not; a note from Linux 5.13 on"),
    "shm": ("ok", "free space of /dev/shm"),
    "shm-small": ("warning", "less than 256 MiB free in /dev/shm"),
    "huge-pages": ("ok", "large CPU tensors lie in huge pages, as tried"),
    "huge-pages-unused": ("note", "they do not"),
    # network
    "address": ("ok", "the interface that holds Ray's address of this node"),
    "address-unknown": ("warning", "no interface holds it"),
    "address-loopback": ("note, problem", "it is a loopback address; a problem in a cluster of several hosts"),
    "own-name": ("ok", "what the machine's own name resolves to"),
    "own-name-loopback": ("note, warning", "it resolves to 127.0.x.x; a warning in a cluster of several hosts"),
    "own-name-unknown": ("note, warning", "it resolves to nothing; likewise"),
    "interface-variable-wrong": (
        "warning",
        "TP_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names no interface of this machine",
    ),
    # several processes
    "together-routes": ("ok", "which lanes members on these nodes, or these actors, would take to each other"),
    "together-no-group": ("problem", "they could form no group; why"),
    "together-containers-apart": ("warning", "two with GPUs are on one host in different containers"),
    "together-rdma-uneven": ("warning", "some have usable RDMA adapters and some have not"),
    "together-no-common-fabric": ("warning", "two have RDMA adapters that do not reach each other"),
    "together-gid-index-differs": ("note", "one GID index for the whole job would be wrong"),
    "together-token-uneven": ("warning", "Ray's token authentication is on for some only"),
}
