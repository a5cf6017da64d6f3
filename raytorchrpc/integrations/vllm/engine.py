"""The side of vLLM's workers: each pulls what its part of the model needs from a WeightStore."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import vllm
from vllm.distributed.parallel_state import get_pcp_group, get_pp_group, get_tp_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
    layerwise_groups,
)
from vllm.logger import init_logger
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

import raytorchrpc as rtr
from raytorchrpc.integrations.engines import Progress, become_member, load_whole, updating
from raytorchrpc.integrations.recording import NoPlan
from raytorchrpc.integrations.versions import report

logger = init_logger("vllm.raytorchrpc")

#: What ``into`` may be.
INTO = "auto", "parameters", "layers", "load_weights"


@dataclass
class InitInfo(WeightTransferInitInfo):
    """What ``init_weight_transfer_engine({"init_info": {...}})`` takes, as a dict.

    Attributes:
        store: the name of the ``WeightStore``, in whichever member it is.
        group: the group that a worker joins which is in none; None: the one of the process that started the worker.
            With a name, a worker connects to Ray if no member started it.
        into: ``"parameters"``, ``"layers"`` or ``"load_weights"``; ``"auto"``: the fastest that the model allows.
        timeout: seconds for joining the group, and for each update that does not say otherwise.
        group_bytes: layers that are brought layer by layer are pulled in groups of so many bytes. Two such groups take
            memory beside the model.
    """

    store: str = "policy"
    group: str | None = None
    into: str = "auto"
    timeout: float = 60.0
    group_bytes: int = 32 << 20


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """What ``update_weights({"update_info": {...}})`` takes, as a dict.

    Attributes:
        version: of the store; None: the newest, and if there is none yet, the first.
        timeout: seconds; None: the one of ``InitInfo``.
    """

    version: int | None = None
    timeout: float | None = None


class Update(Protocol):
    """Brings versions of one store into one model."""

    how: str
    """Which ways in the model takes, and why no faster one."""

    def bring(self, version: int, progress: Progress) -> None:
        """Bring a version into the model. Blocks; see ``WeightEngine.update_weights``."""


class WeightEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """vLLM's engine for ``weight_transfer_config={"backend": "raytorchrpc"}``: vLLM makes one in each worker."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    _store: rtr.WeightStore | None = None
    _update: Update | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join the group, find the store and, if it has a version, prepare the updates. Blocks.

        Raises:
            ConfigurationError: ``into`` is unknown or impossible, or the published tensors are not those of the model.
            NotFound: no member has such a store.
        """
        if init_info.into not in INTO:
            raise rtr.ConfigurationError(f"into={init_info.into!r} has to be one of {', '.join(map(repr, INTO))}")
        report("vllm", "0.32", "0.33", logger, vllm.__version__)  # its CPU build has other metadata
        self._info, self._update = init_info, None
        become_member(init_info.group, init_info.timeout)
        self._store = rtr.WeightStore.find(init_info.store, timeout=init_info.timeout)
        if newest := self._store.version():
            self._prepare(newest, init_info.timeout)

    def start_weight_update(self) -> None:
        """Raises ConfigurationError if the engine was not initialised. Changes nothing."""
        self._initialised()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Bring a version into this worker's part of the model. Blocks until kernels can use it.

        If it raises after it has begun to write, the message says so: the model has tensors of two versions then, and
        must be updated again before it generates.
        """
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Like ``update_weights``, but copies to a GPU may still be queued when it returns."""
        store, version = self._initialised(), update_info.version
        timeout = self._info.timeout if update_info.timeout is None else update_info.timeout
        if version is None:
            version = _newest(store, timeout)
        update = self._update or self._prepare(version, timeout)
        try:
            with updating("vLLM", version, timeout) as progress:
                update.bring(version, progress)
        except rtr.ConfigurationError:
            self._update = None  # the trainer publishes other tensors now: prepare again
            raise

    def finish_weight_update(self) -> None:
        """Changes nothing: ``update_weights`` leaves nothing to do."""

    def shutdown(self) -> None:
        """Forget the store. The process stays in its group until it ends."""
        self._store = self._update = None

    def _prepare(self, version: int, timeout: float) -> Update:
        store = self._initialised()
        layout = store.layout(version, timeout=timeout)
        self._update = self._fastest(store, layout)
        logger.info("raytorchrpc updates %s %s", type(self.model).__name__, self._update.how)
        return self._update

    def _fastest(self, store: rtr.WeightStore, layout: Any) -> Update:
        """The fastest update that the model allows, or what ``into`` asks for.

        Raises ConfigurationError if that is impossible, or the published tensors are not those of the model.
        """
        into, why = self._info.into, "as asked"
        if into != "load_weights":
            try:
                from raytorchrpc.integrations.vllm import layers  # needs names of vLLM that it does not promise

                return layers.LayeredUpdate(self, store, layout, into, self._info.group_bytes)
            except ImportError as error:
                why = f"this release of vLLM lacks what a faster way needs ({error})"
            except NoPlan as error:
                why = str(error)
            if into != "auto":
                raise rtr.ConfigurationError(f"into={into!r} is impossible: {why}; into='auto' takes the fastest way")
        return CheckpointUpdate(self, store, layout, why)

    def _initialised(self) -> rtr.WeightStore:
        if self._store is None:
            raise rtr.ConfigurationError(
                "call init_weight_transfer_engine({'init_info': {'store': NAME}}) first, with the name of a WeightStore"
            )
        return self._store


class CheckpointUpdate:
    """Pulls whole tensors, and has the model's ``load_weights`` do the rest: the slowest way, which all models take."""

    def __init__(self, engine: WeightEngine, store: rtr.WeightStore, layout: Any, why: str) -> None:
        self._engine, self._store, self._layout = engine, store, layout
        self.how = f"by load_weights ({layout.nbytes / 1e6:,.1f} MB): {why}"

    def bring(self, version: int, progress: Progress) -> None:
        """See ``Update``."""
        model, groups = self._engine.model, layerwise_groups(list(self._layout))  # so that one layer takes memory
        initialize_layerwise_reload(model)
        try:
            load_whole(model, self._store, self._layout, version, groups, self._engine.device, progress)
        finally:
            finalize_layerwise_reload(model, self._engine.model_config)


def _newest(store: rtr.WeightStore, timeout: float) -> int:
    """The newest version that the first rank finds: all ranks of a model need the same, or the same error.

    Data parallel engines are not asked: a program may update one after the other.
    """
    groups = [get_tp_group(), get_pp_group(), get_pcp_group()]
    found: Any = None
    if all(group.is_first_rank for group in groups):
        try:
            found = store.wait(timeout=timeout)
        except rtr.RayTorchRpcError as error:
            found = error
    for group in groups:
        found = group.broadcast_object(found)
    if isinstance(found, Exception):
        raise found
    return int(found)
