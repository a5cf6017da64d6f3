"""The side of the training processes: publishes their weights, and has vLLM's engines bring them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    materialize_full_tensor,
)

import raytorchrpc as rtr
from raytorchrpc.integrations.engines import answered, check_fields
from raytorchrpc.integrations.vllm.engine import InitInfo, UpdateInfo


@dataclass
class TrainerInit(TrainerInitInfo):
    """What ``WeightTransferTrainerFactory.trainer_init`` takes in each training process.

    Attributes:
        rank: of this process among the training processes; rank 0 talks to the engines.
        store: the name of the ``WeightStore``, which the training processes create.
        keep: how many versions engines can pull. An engine that is still bringing one needs it until it is done.
        lend: engines bring the weights out of the model of ``ModelSource`` itself, and the store takes no memory; see
            ``WeightStore.lend``. An engine that starts again has the weights of its checkpoint until the next update.
        into: see ``InitInfo``.
        timeout: seconds for each update.
    """

    backend: ClassVar[str] = "raytorchrpc"

    store: str = "policy"
    keep: int = 2
    lend: bool = False
    into: str = "auto"
    timeout: float = 60.0

    def __post_init__(self) -> None:
        check_fields(self)


#: For members to say whether they have the store: one of them may be suspended (seconds).
_FIND_S = 3.0
#: Since 0.33, sources have iter_full instead of __iter__, and metadata is a property, which says who has a tensor.
HAS_MODES = hasattr(WeightSource, "iter_full")


class ModelSource(WeightSource):
    """The tensors of a module or a state_dict, under their names there. DTensors stay shards: nothing is gathered."""

    def __init__(self, model: torch.nn.Module | Mapping[str, Any]) -> None:
        if not isinstance(model, (torch.nn.Module, Mapping)):
            raise rtr.ConfigurationError(
                f"ModelSource takes a module or its tensors by name, such as dict(model.named_parameters()), not a "
                f"{type(model).__name__}"
            )
        self._model = model

    def tensors(self) -> Mapping[str, Any]:
        """The tensors as they are now."""
        return self._model.state_dict() if isinstance(self._model, torch.nn.Module) else self._model

    def _metadata(self) -> list[ParamMeta]:
        """Names, dtypes and global shapes."""
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors().items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors, one after the other; gathers DTensors, for engines of others."""
        for name, tensor in self.tensors().items():
            yield name, materialize_full_tensor(tensor)

    iter_full = __iter__
    metadata: Any = cached_property(_metadata) if HAS_MODES else _metadata


class TrainerEngine(TrainerWeightTransferEngine[TrainerInit]):
    """Publishes the weights of a trainer to a ``WeightStore``, and drives the engines of vLLM to bring them.

    Every training process makes one. With shards (``ModelSource`` of DTensors) each publishes its own, and the members
    are found by a collective in torch's default process group; otherwise rank 0 publishes whole tensors.
    """

    init_info_cls = TrainerInit

    def __init__(self, init: TrainerInit, client: VLLMWeightSyncClient, source: Any) -> None:
        super().__init__(client=client, source=source, is_sender=init.is_sender)
        self._init, self._store = init, _store_of(init, source)
        self._info = asdict(InitInfo(store=init.store, into=init.into, timeout=init.timeout))

    @classmethod
    def trainer_init(
        cls, init_info: TrainerInit, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> TrainerEngine:
        """Publish the present weights, and have the engines find them. Blocks; every training process calls it.

        Raises:
            ConfigurationError: there is no source, or its tensors are not those of vLLM's model.
            NotAMember: this process is in no group.
        """
        if source is None:
            raise rtr.ConfigurationError("source= is missing: pass ModelSource(model), or another WeightSource")
        if not _yields_all(source, init_info.rank):
            raise rtr.ConfigurationError(
                f"{type(source).__name__} yields a part of the model in each process: pass ModelSource with its shards"
            )
        engine = cls(init_info, client, source)
        if init_info.lend and not isinstance(source, ModelSource):
            raise rtr.ConfigurationError(f"lend=True takes ModelSource(model), not a {type(source).__name__}")
        with engine._offered():  # also when lent: an engine that a lost trainer left with parts of two versions waits
            if engine.is_sender:
                engine.connect()
        return engine

    def connect(self) -> None:
        """Have the engines find the store. Only rank 0; blocks."""
        self._ask("init_weight_transfer_engine", self._info)

    def send_weights(self) -> None:
        """Publish the present weights, and have the engines bring them. Every training process calls it.

        Blocks at rank 0 until all engines have the weights, and elsewhere only while they are copied; with ``lend``
        everywhere until the engines have them. If an engine fails, the error is its own, and the next ``send_weights``
        works once it is there again, also as a new process. RpcTimeout names a call that an engine does not answer.
        """
        with self._offered() as version:
            if self.is_sender:
                self._bring(version)

    def _bring(self, version: int) -> None:
        """Have the engines bring a version. Only rank 0."""
        try:
            self._ask("start_weight_update")
        except rtr.RpcTimeout:
            raise
        except Exception:  # a trainer that was lost in an update has left it open
            self._ask("finish_weight_update")
            self._ask("start_weight_update")
        self._ask("update_weights", asdict(UpdateInfo(version, self._init.timeout, self._info)))
        self._ask("finish_weight_update", weight_version=str(version))

    def _ask(self, method: str, *args: Any, **options: Any) -> None:
        """Call a method of the client, which may never return."""
        answered("vLLM", getattr(self.client, method), *args, timeout=self._init.timeout, **options)

    @contextmanager
    def _offered(self) -> Iterator[int]:
        """Make the present weights a version, and yield its number; what is lent is taken back at the end."""
        if not self._init.lend or self._store is None:
            yield self._publish()
            return
        with self._store.lend(self.source.tensors(), timeout=self._init.timeout) as version:
            yield self._store.wait(version, self._init.timeout) if self.is_sender else version

    def _publish(self) -> int:
        """Publish the present weights; returns the version. Rank 0 waits until all processes have published it."""
        source, store = self.source, self._store
        if store is None:
            for _ in _pairs(source):
                pass  # takes part in gathering what rank 0 publishes
            return 0
        # Others yield whole tensors, one after the other, and may gather each of them.
        tensors: Any = source.tensors() if isinstance(source, ModelSource) else _pairs(source)
        version = store.publish(tensors, timeout=self._init.timeout)
        return store.wait(version, self._init.timeout) if self.is_sender else version


def _pairs(source: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The names and whole tensors of a source."""
    return source.iter_full() if HAS_MODES else iter(source)


def _yields_all(source: Any, rank: int) -> bool:
    """Whether a source yields all tensors in this process. Before 0.29, each one did."""
    if HAS_MODES:
        return len(source.owned_names(rank)) == len(source.metadata)
    return getattr(source, "held_names", lambda: None)() is None


def _store_of(init: TrainerInit, source: WeightSource) -> rtr.WeightStore | None:
    """The store that this process publishes to; None if it only takes part in gathering tensors."""
    tensors = source.tensors().values() if isinstance(source, ModelSource) else ()
    are_shards = any(hasattr(tensor, "device_mesh") for tensor in tensors)
    if not are_shards and not init.is_sender:
        return None
    names: list[Any] = [rtr.current_member().name]
    if are_shards:
        names *= torch.distributed.get_world_size()
        torch.distributed.all_gather_object(names, names[0])
    with suppress(rtr.NotFound):
        there = rtr.WeightStore.find(init.store, timeout=_FIND_S)
        if there.home != min(names):  # engines would take an earlier trainer's versions for these
            raise rtr.ConfigurationError(
                f"store {init.store!r} is published by {', '.join(there.publishers)}, and here by "
                f"{', '.join(sorted(names))}: call WeightStore.find({init.store!r}).delete() before"
            )
    return rtr.WeightStore(init.store, publishers=names if are_shards else None, keep=init.keep)
