"""The side of vLLM's workers: each pulls what its part of the model needs from a WeightStore."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
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
)
from vllm.logger import init_logger
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

import raytorchrpc as rtr
from raytorchrpc.integrations.adapters import SCHEME
from raytorchrpc.integrations.engines import (
    Progress,
    brought_layouts,
    check_fields,
    check_layout,
    divide,
    load_whole,
)
from raytorchrpc.integrations.follower import Follower, alone
from raytorchrpc.integrations.recording import NoPlan, check_filled
from raytorchrpc.integrations.versions import report
from raytorchrpc.integrations.vllm import adapters, steps

logger = init_logger("vllm.raytorchrpc")

#: Whole tensors are pulled and loaded in groups of so many bytes.
_LOADED_BYTES = 256 << 20
#: What ``into`` may be.
INTO = "auto", "parameters", "layers", "load_weights"


@dataclass
class InitInfo(WeightTransferInitInfo):
    """What ``init_weight_transfer_engine({"init_info": {...}})`` takes, as a dict.

    An engine that has it as ``additional_config={"raytorchrpc": {...}}`` needs no such call, also if it is restarted.

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
    group_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """What ``update_weights({"update_info": {...}})`` takes, as a dict.

    Attributes:
        version: of the store; None: the newest, and if there is none yet, the first.
        timeout: seconds; None: the one of ``InitInfo``.
        init_info: for an engine that was not initialised, or follows another store or group; see ``InitInfo``.
    """

    version: int | None = None
    timeout: float | None = None
    init_info: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        check_fields(self)


class WeightEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """vLLM's engine for ``weight_transfer_config={"backend": "raytorchrpc"}``: vLLM makes one in each worker."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    how: str | None = None
    """Which ways versions take into the model, and why no faster ones; None: there is no version yet."""
    _follower: Follower | None = None
    _bring: Callable[[int, Progress], None] | None = None
    _planned_for: int | None = None
    """The instance of the store that ``_bring`` pulls from."""
    _layout: Any = None
    """What ``_bring`` was made for."""

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join the group, find the store and, if it has a version, prepare the updates. Blocks.

        The engine brings the newest version before its next step, if none was brought until then.

        Raises:
            ConfigurationError: ``into`` is unknown or impossible, or the published tensors are not those of the model.
            NotFound: no member has such a store.
        """
        follower = self._make_follower(init_info)
        self.shutdown()  # if this fails, no update brings versions of an earlier store
        progress = Progress(init_info.timeout)
        follower.together(partial(self._find, follower, progress), progress)  # else workers differ in their next step
        self._follower = follower

    def _find(self, follower: Follower, progress: Progress) -> None:
        store = follower.store(progress)
        if newest := store.version():
            with suppress(rtr.NotFound):  # it was replaced just now: the first update prepares itself
                self._prepare(store, newest, progress.left())

    def start_weight_update(self) -> None:
        """Changes nothing."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Bring a version into this worker's part of the model. Blocks until kernels can use it.

        An update that fails midway is repeated with the newest version. If it raises nevertheless, the message says
        so: the model has tensors of two versions then, and the next step of the engine repeats the update first.
        """
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Like ``update_weights``, but copies to a GPU may still be queued when it returns."""
        follower, given = self._initialised(), update_info.init_info
        if given is not None and (follower is None or self._is_another(given)):
            self._follower = self._make_follower(self.parse_init_info(given))
        if self._follower is None:
            raise rtr.ConfigurationError(
                "call init_weight_transfer_engine({'init_info': {'store': NAME}}) first, with the name of a "
                "WeightStore, or give the engine additional_config={'raytorchrpc': {'store': NAME}}"
            )
        self._follower.update(update_info.version, update_info.timeout)

    def before_step(self) -> None:
        """Bring the newest version if the model has none, or parts of two. Raises if that fails.

        As long as there is no group, the model computes as it was loaded.
        """
        if (follower := self._initialised()) is not None:
            with suppress(rtr.NotAMember):
                follower.ensure()

    def finish_weight_update(self) -> None:
        """Changes nothing: ``update_weights`` leaves nothing to do."""

    def shutdown(self) -> None:
        """Forget the store, unless the model has to be updated. The process stays in its group until it ends."""
        self._bring = self.how = None
        if self._follower is not None and not self._follower.is_torn:
            self._follower = None

    def _initialised(self) -> Follower | None:
        """What follows the store; None: nobody has named one."""
        if self._follower is None and (given := self._given()) is not None:
            self._follower = self._make_follower(self.parse_init_info(given))
        return self._follower

    def _given(self) -> dict[str, Any] | None:
        """What the engine was started with, in the form of ``InitInfo``."""
        given = getattr(self.vllm_config, "additional_config", None)
        return given.get("raytorchrpc") if isinstance(given, dict) else None

    def _is_another(self, given: dict[str, Any]) -> bool:
        """Whether a trainer names another store, or another group, than the one that the engine follows."""
        info = self.parse_init_info(given)
        return info.store != self._info.store or info.group not in (None, self._info.group)

    def _make_follower(self, info: InitInfo) -> Follower:
        if info.into not in INTO:
            raise rtr.ConfigurationError(f"into={info.into!r} has to be one of {', '.join(map(repr, INTO))}")
        report("vllm", logger, vllm.__version__)  # its CPU build has other metadata
        self._info = info
        gather = _gather if self.parallel_config.world_size > 1 else alone
        group = info.group or (self._given() or {}).get("group")  # a trainer may not say which it has formed
        follower = Follower("vLLM", info.store, self._write, group=group, timeout=info.timeout, gather=gather)
        follower.is_torn = self._follower is not None and self._follower.is_torn
        return follower

    def _write(self, store: rtr.WeightStore, version: int, progress: Progress) -> None:
        bring = self._bring
        if bring is None or self._planned_for != store.instance:
            bring = self._prepare(store, version, progress.left())
        try:
            bring(version, progress)
        except rtr.ConfigurationError:
            self._bring = None  # the trainer publishes other tensors now: prepare again
            raise
        brought_layouts[self.model] = self._layout

    def _prepare(self, store: rtr.WeightStore, version: int, timeout: float) -> Callable[[int, Progress], None]:
        """Find the fastest way that the model allows, or the one that ``into`` asks for.

        Raises ConfigurationError if that is impossible, or the published tensors are not those of the model.
        """
        into, why = self._info.into, "as asked"
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
            bring = partial(self._load, store)
            self.how = f"by load_weights ({layout.nbytes / 1e6:,.1f} MB): {why}"
        logger.info("raytorchrpc updates %s %s", type(self.model).__name__, self.how)
        self._bring, self._planned_for, self._layout = bring, store.instance, layout
        return bring

    def _load(self, store: rtr.WeightStore, version: int, progress: Progress) -> None:
        """Pull whole tensors, and have the model's ``load_weights`` do the rest: the way that all models allow."""
        layout = store.layout(version, timeout=progress.left())
        check_layout("vLLM", self.model, layout)
        groups = divide(layout, lambda name: layout[name].nbytes, _LOADED_BYTES)
        initialize_layerwise_reload(self.model)
        try:
            filled = load_whole(self.model, store, layout, groups, self.device, progress)
        finally:
            finalize_layerwise_reload(self.model, self.model_config)
        if filled and getattr(self.model_config, "quantization", None) is None:  # as vLLM does with a checkpoint
            lacking = [name for name, _ in self.model.named_parameters() if name not in filled]
            check_filled("vLLM", self.model, layout, lacking)


def _gather(own: Any) -> list[Any]:
    """The values of all ranks of one model, in the same order at each of them.

    Data parallel engines are not asked: a program may update one after the other.
    """
    values = [own]
    for group in (get_tp_group(), get_pp_group(), get_pcp_group()):
        if group.world_size > 1:
            parts: list[Any] = [None] * group.world_size
            torch.distributed.all_gather_object(parts, values, group=group.cpu_group)
            values = [value for part in parts for value in part]
    return values


steps.watch(WeightEngine)
steps.load_adapters(SCHEME, adapters.pulled)
