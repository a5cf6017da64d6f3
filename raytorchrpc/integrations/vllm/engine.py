"""The side of vLLM's workers: each pulls what its part of the model needs from a WeightStore."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

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
from raytorchrpc.integrations.engines import Progress, become_member, check_fields, load_whole, updating
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

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """What ``update_weights({"update_info": {...}})`` takes, as a dict.

    Attributes:
        version: of the store; None: the newest, and if there is none yet, the first.
        timeout: seconds; None: the one of ``InitInfo``.
    """

    version: int | None = None
    timeout: float | None = None

    def __post_init__(self) -> None:
        check_fields(self)


class WeightEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """vLLM's engine for ``weight_transfer_config={"backend": "raytorchrpc"}``: vLLM makes one in each worker."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    how: str | None = None
    """Which ways versions take into the model, and why no faster ones; None: there is no version yet."""
    _store: rtr.WeightStore | None = None
    _bring: Callable[[int, Progress], None] | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join the group, find the store and, if it has a version, prepare the updates. Blocks.

        Raises:
            ConfigurationError: ``into`` is unknown or impossible, or the published tensors are not those of the model.
            NotFound: no member has such a store.
        """
        if init_info.into not in INTO:
            raise rtr.ConfigurationError(f"into={init_info.into!r} has to be one of {', '.join(map(repr, INTO))}")
        report("vllm", "0.32", "0.33", logger, vllm.__version__)  # its CPU build has other metadata
        self.shutdown()  # if this fails, no update brings versions of an earlier store
        self._info = init_info
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
        bring = self._bring or self._prepare(version, timeout)
        try:
            with updating("vLLM", version, timeout) as progress:
                bring(version, progress)
        except rtr.ConfigurationError:
            self._bring = None  # the trainer publishes other tensors now: prepare again
            raise

    def finish_weight_update(self) -> None:
        """Changes nothing: ``update_weights`` leaves nothing to do."""

    def shutdown(self) -> None:
        """Forget the store. The process stays in its group until it ends."""
        self._store = self._bring = self.how = None

    def _prepare(self, version: int, timeout: float) -> Callable[[int, Progress], None]:
        """Find the fastest way that the model allows, or the one that ``into`` asks for.

        Raises ConfigurationError if that is impossible, or the published tensors are not those of the model.
        """
        store, into, why = self._initialised(), self._info.into, "as asked"
        layout, bring = store.layout(version, timeout=timeout), None
        if into != "load_weights":
            try:
                from raytorchrpc.integrations.vllm import layers  # needs names of vLLM that it does not promise

                update = layers.LayeredUpdate(self, store, layout, into, self._info.group_bytes)
                bring, self.how = update.bring, update.how
            except ImportError as error:
                why = f"this release of vLLM lacks what a faster way needs ({error})"
            except NoPlan as error:
                why = str(error)
        if bring is None:
            if into not in ("auto", "load_weights"):
                raise rtr.ConfigurationError(f"into={into!r} is impossible: {why}; into='auto' takes the fastest way")
            bring = partial(self._load, store, layout)
            self.how = f"by load_weights ({layout.nbytes / 1e6:,.1f} MB): {why}"
        logger.info("raytorchrpc updates %s %s", type(self.model).__name__, self.how)
        self._bring = bring
        return bring

    def _load(self, store: rtr.WeightStore, layout: Any, version: int, progress: Progress) -> None:
        """Pull whole tensors, and have the model's ``load_weights`` do the rest: the way that all models allow."""
        groups = layerwise_groups(list(layout))  # so that one layer at a time takes memory
        initialize_layerwise_reload(self.model)
        try:
            load_whole(self.model, store, layout, version, groups, self.device, progress)
        finally:
            finalize_layerwise_reload(self.model, self.model_config)

    def _initialised(self) -> rtr.WeightStore:
        if self._store is None:
            raise rtr.ConfigurationError(
                "call init_weight_transfer_engine({'init_info': {'store': NAME}}) first, with the name of a WeightStore"
            )
        return self._store


def _newest(store: rtr.WeightStore, timeout: float) -> int:
    """The newest version that the first rank finds: all ranks of a model need the same, or the same error.

    Data parallel engines are not asked: a program may update one after the other.
    """
    groups = [get_tp_group(), get_pp_group(), get_pcp_group()]
    outcome: Any = None
    if all(group.is_first_rank for group in groups):
        try:
            outcome = store.wait(timeout=timeout)
        except rtr.RayTorchRpcError as error:
            outcome = error
    for group in groups:
        outcome = group.broadcast_object(outcome)
    if isinstance(outcome, Exception):
        raise outcome
    return int(outcome)
