"""The transports that ``objectrefs`` compares, with two actors each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ray
import torch
from ray.exceptions import RayError
from ray.experimental import CommunicatorMetadata, TensorTransportManager, TensorTransportMetadata

import raytorchrpc as rtr
from raytorchrpc.bench.pairs import Failed, Stuck, collective_group, get, one_line

#: Timeout of each sample and of each step of the start, in seconds.
TIMEOUT_S = 60.0


class EmptyTransport(TensorTransportManager):  # type: ignore[misc]
    """Moves nothing: the receiver gets its own tensors of the right shapes."""

    def __init__(self) -> None:
        self._tensors: dict[Any, list[torch.Tensor]] = {}

    def tensor_transport_backend(self) -> str:
        return "EMPTY"

    @staticmethod
    def is_one_sided() -> bool:
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        return True

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[torch.Tensor]) -> TensorTransportMetadata:
        meta = [(tensor.shape, tensor.dtype) for tensor in rdt_object]
        return TensorTransportMetadata(meta, rdt_object[0].device.type if rdt_object else None)

    def get_communicator_metadata(self, src_actor: Any, dst_actor: Any, backend: Any = None) -> CommunicatorMetadata:
        return CommunicatorMetadata()

    def recv_multiple_tensors(
        self, obj_id: str, meta: TensorTransportMetadata, communicator: CommunicatorMetadata, target_buffers: Any = None
    ) -> list[torch.Tensor]:
        key = (meta.tensor_device, *meta.tensor_meta)
        if key not in self._tensors:
            self._tensors.clear()  # those of the last load
            self._tensors[key] = [torch.ones(s, dtype=d, device=meta.tensor_device) for s, d in meta.tensor_meta]
        return list(self._tensors[key])

    def send_multiple_tensors(self, *_: Any) -> None:
        raise NotImplementedError("one-sided")

    def garbage_collect(self, *_: Any) -> None:
        pass

    def abort_transport(self, *_: Any) -> None:
        pass


class Load(NamedTuple):
    """What a sample carries: ``number`` tensors of ``size`` bytes, in a list unless it is one."""

    device: str
    size: int
    number: int = 1

    def __str__(self) -> str:
        size = f"{self.size / 1e6:g} MB" if self.size >= 1_000_000 else f"{self.size / 1e3:g} KB"
        return size if self.number == 1 else f"{self.number} x {size}"

    def make(self) -> Any:
        tensors = []
        for index in range(self.number):
            tensor = torch.full((self.size,), (self.size + index) % 251, dtype=torch.uint8, device=self.device)
            tensor[-1] = 251 + index % 5
            tensors.append(tensor)
        return tensors[0] if self.number == 1 else tensors


class Peer:
    """The actor at either end."""

    def __init__(self) -> None:
        self._load: Load | None = None
        self._value: Any = None

    def ready(self, device: str) -> str:
        """Starts CUDA; returns the GPU's UUID."""
        torch.zeros(1, device=device)
        return str(getattr(torch.cuda.get_device_properties(0), "uuid", "")) if device == "cuda" else ""

    def prepare(self, load: Load) -> None:
        self._value = load.make()
        if load.device == "cuda":
            torch.cuda.synchronize()

    def drop(self) -> None:
        self._value = None
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def produce(self) -> Any:
        return self._value

    def consume(self, value: Any) -> int:
        tensors = value if isinstance(value, list) else [value]
        # Reading GPU memory waits for earlier work on it.
        return int(tensors[0][0]) + int(tensors[-1][-1]) + sum(tensor.nbytes for tensor in tensors)

    def check(self, value: Any, load: Load) -> bool:
        got, sent = ([one] if isinstance(one, torch.Tensor) else one for one in (value, load.make()))
        return len(got) == len(sent) and all(torch.equal(one, other) for one, other in zip(got, sent, strict=True))


@dataclass
class Transport:
    """One row: a transport, its two actors, and why it cannot run."""

    name: str
    transport: str | None
    """Ray's ``tensor_transport``; None: the object store."""
    env: dict[str, str] = field(default_factory=dict)
    moves: bool = True
    """It moves bytes, which can be verified."""
    max_bytes: int | None = None
    """Larger loads are skipped."""
    obstacle: str | None = None
    """Why it does not run, or has stopped."""
    ends: tuple[Any, ...] = ()
    group: rtr.Group | None = None

    def start(self, device: str, gpus: Sequence[str | None], share: float) -> None:
        """Create the two actors. ``gpus``: CUDA_VISIBLE_DEVICES of each; None leaves the choice to Ray."""
        cls = ray.remote(enable_tensor_transport=True)(Peer) if self.transport else ray.remote(Peer)
        for gpu in gpus:
            env = rtr.runtime_env()["env_vars"] | self.env | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})
            options = {"num_cpus": 0, "num_gpus": share if device == "cuda" else 0, "runtime_env": {"env_vars": env}}
            self.ends += (cls.options(**options).remote(),)

    def open(self, device: str, one_gpu: bool) -> None:
        """Wait for the actors, and connect them if the transport needs it; a failure becomes the obstacle."""
        try:
            uuids = get([end.ready.remote(device) for end in self.ends], TIMEOUT_S)
            if device == "cuda" and (uuids[0] == uuids[1]) != one_gpu:
                raise Failed("both actors got the same GPU" if not one_gpu else "the actors got different GPUs")
            if self.transport == "TORCHRPC":
                name = f"objectrefs-{device}-{'same' if one_gpu else 'two'}"
                self.group = rtr.init_group(dict(zip("ab", self.ends, strict=True)), name=name, timeout=TIMEOUT_S)
            elif self.transport in ("GLOO", "NCCL"):
                collective_group(list(self.ends), self.transport.lower(), TIMEOUT_S)
        except (Failed, RayError, rtr.RayTorchRpcError) as error:
            self.obstacle = str(error) if isinstance(error, Failed) else one_line(error)

    def send(self) -> None:
        """Take one sample; a failure becomes the obstacle, and further calls do nothing."""
        if self.obstacle is not None:
            return
        a, b = self.ends
        try:
            ray.get(b.consume.remote(self._produce(a)), timeout=TIMEOUT_S)
        except Exception as error:  # some of these transports are alpha and raise any type
            self.obstacle = one_line(error)

    def prepare(self, load: Load) -> str | None:
        """Create the load, send and verify it once; returns why it cannot be measured, or None."""
        if self.obstacle is not None:
            return self.obstacle
        if self.max_bytes is not None and load.size > self.max_bytes:
            return f"skipped above {self.max_bytes / 1e6:g} MB"
        a, b = self.ends
        try:
            get(a.prepare.remote(load), TIMEOUT_S)
            right = get(b.check.remote(self._produce(a), load), TIMEOUT_S)
        except Stuck as error:
            self.obstacle = str(error)
            return self.obstacle
        except Exception as error:  # as above
            return str(error) if isinstance(error, Failed) else one_line(error)
        return None if right or not self.moves else "the tensors arrived changed"

    def drop(self) -> None:
        """Free the memory of the last load."""
        if self.obstacle is None:
            get([end.drop.remote() for end in self.ends], TIMEOUT_S)

    def end(self) -> None:
        if self.group is not None:
            self.group.shutdown()
        for end in self.ends:
            ray.kill(end)

    def _produce(self, source: Any) -> Any:
        method = source.produce.options(tensor_transport=self.transport) if self.transport else source.produce
        return method.remote()
