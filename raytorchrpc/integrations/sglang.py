"""Brings weights of a ``WeightStore`` into SGLang: ``Engine(..., custom_weight_loader=[LOADER])``, and ``Updates``.

``Updates`` is the side of the process that holds the engine. It sends SGLang a request without tensors, for which each
process that runs a part of the model calls ``load``. That one joins the group, and pulls what its part needs.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch

import raytorchrpc as rtr
from raytorchrpc.integrations.engines import become_member, divide, load_whole, updating
from raytorchrpc.integrations.recording import NoPlan, Parts, check_filled, memory_of, record
from raytorchrpc.integrations.versions import report

logger = logging.getLogger(__name__)

#: For SGLang's option ``--custom-weight-loader``, and its engine's ``custom_weight_loader=[LOADER]``.
LOADER = "raytorchrpc.integrations.sglang.load"
#: The adapter follows the sources of these releases: from the first up to before the second.
FOLLOWS = "0.5.23", "0.5.24"
#: Whole tensors are pulled and loaded in groups of so many bytes.
_GROUP_BYTES = 256 << 20
_MOST_REPORTS = 4096


class Updates:
    """Brings versions of one store into one engine. Made in the process of the engine, which has to be a member.

    Not thread-safe, as ``sglang.Engine`` is not.
    """

    def __init__(
        self, engine: Any, store: str = "policy", *, group: str | None = None, into: str = "auto", timeout: float = 60
    ) -> None:
        """Describe the updates; blocks for nothing.

        Args:
            engine: a ``sglang.Engine``, or what has its methods for updates.
            store: the name of the ``WeightStore``, in whichever member it is.
            group: the group that the engine's processes join; None: the one of the process that started them.
            into: ``"load_weights"`` has the model's own loaders load whole tensors. ``"auto"`` does so only where they
                do more than to copy parts of them.
            timeout: seconds for each update.

        Raises:
            ConfigurationError: ``into`` is unknown.
            NotAMember: this process is in no group.
        """
        if into not in ("auto", "load_weights"):
            raise rtr.ConfigurationError(f"into={into!r} has to be 'auto' or 'load_weights'")
        self._engine, self._store, self._timeout = engine, rtr.WeightStore.find(store, timeout=timeout), timeout
        self._reports = rtr.Queue(f"sglang/{uuid.uuid4().hex}", home=rtr.current_member().name, maxsize=_MOST_REPORTS)
        self._request = {"store": store, "group": group, "into": into, "reports": self._reports.name}
        self._request["home"] = rtr.current_member().name

    def bring(self, version: int | None = None, *, flush_cache: bool = True) -> int:
        """Bring a version (None: the newest) into the engine's model; returns its number. Blocks until it is there.

        SGLang waits for its running requests before, unless ``engine.pause_generation`` was called.

        Args:
            version: of the store.
            flush_cache: drop what the former weights have computed of prefixes. SGLang refuses it while requests run.

        Raises:
            ConfigurationError: the published tensors are not those of the model. Nothing was written.
            NotFound: the version is not there. Nothing was written.
            RayTorchRpcError: SGLang reports a failure, or the update failed midway: the text says so, and the model
                has to be updated again before it generates.
        """
        version = self._store.wait(timeout=self._timeout) if version is None else version
        self._take_reports()  # of an update that was interrupted
        request = json.dumps({**self._request, "version": version, "timeout": self._timeout})
        _check("begin_weight_update", self._engine.begin_weight_update())
        try:
            # A tensor without elements travels by value, so the engine may be on another host.
            answer = self._engine.update_weights_from_tensor(
                [(request, torch.empty(0))], load_format=LOADER, flush_cache=flush_cache
            )
        finally:
            ended = self._engine.end_weight_update()
        self._raise_failures(version)
        _check("update_weights_from_tensor", answer)
        _check("end_weight_update", ended)
        return version

    def _raise_failures(self, version: int) -> None:
        """Raise what the engine's processes report; they have done so before SGLang has answered."""
        reports = self._take_reports()
        failures = [(rank, failure) for rank, _, failure in reports if failure is not None]
        # Where some ranks have written and others have not, what matters is that the model has two versions.
        failures.sort(key=lambda failed: isinstance(failed[1], (rtr.ConfigurationError, rtr.NotFound, rtr.Empty)))
        for rank, failure in failures:
            logger.error("rank %d of SGLang has not taken version %d: %s", rank, version, failure)
        if failures:
            raise failures[0][1]
        ranks, world = {rank for rank, *_ in reports}, max((world for _, world, _ in reports), default=1)
        if len(ranks) < world:
            raise rtr.RayTorchRpcError(
                f"{len(ranks)} of {world} processes of SGLang have reported that they took version {version}: start "
                f"the engine with custom_weight_loader=[{LOADER!r}], in a member of the group; its log has more"
            )

    def _take_reports(self) -> list[tuple[int, int, Exception | None]]:
        """Rank, number of ranks and failure of each."""
        with suppress(rtr.Empty):
            return self._reports.get_many(_MOST_REPORTS, timeout=0)
        return []


def _check(step: str, answer: tuple[bool, str]) -> None:
    if not answer[0]:
        raise rtr.RayTorchRpcError(f"{step} of SGLang failed: {answer[1]}")


# --- in each process that runs a part of the model ----------------------------------------------------------------


def load(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Bring a version into this process's part of the model: SGLang calls this as its custom weight loader. Blocks.

    Never raises, because SGLang ends the engine if a loader does: ``Updates.bring`` raises what is reported here.
    """
    failure: Exception | None = None
    request: dict[str, Any] = {}
    try:
        request = json.loads(named_tensors[0][0])
        become_member(request["group"], request["timeout"])
        _bring(model, request)
    except Exception as error:
        logger.exception("raytorchrpc could not update the model of SGLang")
        failure = error if isinstance(error, rtr.RayTorchRpcError) else rtr.RayTorchRpcError(f"{error!r}")
    try:
        ranks = torch.distributed.is_initialized()
        rank = torch.distributed.get_rank() if ranks else 0
        world = torch.distributed.get_world_size() if ranks else 1
        reports = rtr.Queue(request["reports"], home=request["home"], maxsize=_MOST_REPORTS)
        reports.put((rank, world, failure), timeout=request["timeout"])
    except Exception:
        logger.exception("raytorchrpc could not report how an update of SGLang's model went")


class _Plan:
    """How versions of one layout get into one model, as long as its tensors stay where they are."""

    def __init__(self, model: Any, layout: Any, into: str) -> None:
        self.key = _key(model, layout, into)
        self.shards: list[rtr.Shard] | None = None
        why = "as asked"
        if into != "load_weights":
            try:
                self._place(model, layout)
                return
            except NoPlan as error:
                why = str(error)
        logger.info("SGLang's %s is updated by load_weights: %s", type(model).__name__, why)

    def _place(self, model: Any, layout: Any) -> None:
        """Have the model's loaders load tensors without memory, and note where they would have copied them."""
        recorded = record("SGLang", model, layout, [tensor for _, tensor in _tensors_of(model)])
        lacking = [
            name for name, tensor in model.named_parameters() if recorded.filled[memory_of(tensor)] < tensor.numel()
        ]
        check_filled("SGLang", model, layout, lacking)
        self.parts = Parts(copied.source for _, copied in recorded.copies)
        views = [
            to.detach().as_strided(copied.to.shape, copied.to.strides, copied.to.offset)
            for to, copied in recorded.copies
        ]
        pairs = zip(views, recorded.copies, strict=True)
        self.shards = [rtr.Shard(view, copied.global_shape, copied.offset) for view, (_, copied) in pairs]


_plans: WeakKeyDictionary[Any, _Plan] = WeakKeyDictionary()


def _tensors_of(model: Any) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _key(model: Any, layout: Any, into: str) -> Any:
    """Changes where the published tensors, or those of the model, are others or have moved."""
    there = [
        (name, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) for name, tensor in _tensors_of(model)
    ]
    return into, [(name, tensor.dtype, tensor.shape) for name, tensor in layout.items()], there


def _bring(model: Any, request: Mapping[str, Any]) -> None:
    version, into = request["version"], request["into"]
    with updating("SGLang", version, request["timeout"]) as progress:
        store = rtr.WeightStore.find(request["store"], timeout=progress.left())
        layout = store.layout(version, timeout=progress.left())
        plan = _plans.get(model)
        if plan is None:
            report("sglang", *FOLLOWS, logger)
        if plan is None or plan.key != _key(model, layout, into):
            plan = _plans[model] = _Plan(model, layout, into)
        device = next(iter(model.parameters())).device
        if plan.shards is None:
            groups = divide(layout, lambda name: layout[name].nbytes, _GROUP_BYTES)
            load_whole(model, store, layout, version, groups, device, progress)
        else:
            plan.parts.pull(store, plan.shards, version, progress.left())
            progress.has_written = True
            if hasattr(model, "post_load_weights"):  # computes others of them, as load_weights would have had it do
                model.post_load_weights()
        if device.type != "cpu":
            torch.accelerator.synchronize()  # a version that is reported is there
