"""Brings weights of a ``WeightStore`` into SGLang: ``Engine(..., custom_weight_loader=[LOADER])``, and ``Updates``.

``Updates`` is the side of the process that holds the engine. It sends SGLang a request without tensors, for which each
process that runs a part of the model calls ``load``. That one joins the group, and pulls what its part needs.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

import raytorchrpc as rtr
from raytorchrpc.integrations.engines import (
    Progress,
    answered,
    become_member,
    brought_layouts,
    check_layout,
    divide,
    load_whole,
)
from raytorchrpc.integrations.follower import Follower, may_be_torn
from raytorchrpc.integrations.recording import NoPlan, Parts, check_filled, memory_of, record
from raytorchrpc.integrations.versions import report
from raytorchrpc.process import threads

logger = logging.getLogger(__name__)

#: For SGLang's option ``--custom-weight-loader``, and its engine's ``custom_weight_loader=[LOADER]``.
LOADER = "raytorchrpc.integrations.sglang.load"
#: Whole tensors are pulled and loaded in groups of so many bytes.
_GROUP_BYTES = 256 << 20
_MOST_REPORTS = 4096
#: How long SGLang may refuse to drop its prefixes, and the pause before it is asked again (seconds).
_FLUSH_S, _PAUSE_S = 5.0, 0.01


class Updates:
    """Brings versions of one store into one engine. Made in the process of the engine, which has to be a member.

    Not thread-safe, as ``sglang.Engine`` is not.
    """

    def __init__(
        self, engine: Any, store: str = "policy", *, group: str | None = None, into: str = "auto", timeout: float = 60
    ) -> None:
        """Describe the updates; blocks for nothing, also before this process is a member.

        Until an update has succeeded, ``engine.generate`` makes one first, and raises what it raises. It generates with
        the weights that were loaded as long as the store has no version.

        Args:
            engine: a ``sglang.Engine``, or what has its methods for updates.
            store: the name of the ``WeightStore``, in whichever member it is.
            group: the group that the engine's processes join; None: the one of the process that started them.
            into: ``"load_weights"`` has the model's own loaders load whole tensors. ``"auto"`` does so only where they
                do more than to copy parts of them.
            timeout: seconds for each update.

        Raises ConfigurationError if ``into`` is unknown.
        """
        if into not in ("auto", "load_weights"):
            raise rtr.ConfigurationError(f"into={into!r} has to be 'auto' or 'load_weights'")
        self._engine, self._flush_cache = engine, True
        self._request = {"store": store, "group": group, "into": into}
        self._follower = Follower("SGLang", store, self._send, timeout=timeout)
        if (generate := getattr(engine, "generate", None)) is not None:

            def generate_with_newest(*args: Any, **options: Any) -> Any:
                self._follower.ensure()
                return generate(*args, **options)

            engine.generate = generate_with_newest

    def bring(self, version: int | None = None, *, flush_cache: bool = True) -> int:
        """Bring a version (None: the newest) into the engine's model; returns its number. Blocks until it is there.

        SGLang waits for its running requests before, unless ``engine.pause_generation`` was called. An update that
        fails midway is repeated with the newest version, until the timeout.

        Args:
            version: of the store.
            flush_cache: drop what the former weights have computed of prefixes, after the update. SGLang refuses it
                while requests run, of which a paused engine has some.

        Raises:
            ConfigurationError: the published tensors are not those of the model. Nothing was written.
            NotFound: the version is not there. Nothing was written.
            RayTorchRpcError: SGLang reports a failure, or the update failed midway: the text says so, and
                ``engine.generate`` repeats it before it generates.
        """
        self._flush_cache = flush_cache
        return self._follower.update(version)

    def _send(self, store: rtr.WeightStore, version: int, progress: Progress) -> None:
        """Have all processes of the engine bring a version."""
        reports = rtr.Queue(f"sglang/{uuid.uuid4().hex}", maxsize=_MOST_REPORTS)
        request = {**self._request, "version": version, "instance": store.instance, "timeout": progress.left()}
        request |= {"reports": reports.name, "home": reports.home}
        ask = partial(answered, "SGLang", timeout=progress.left())
        try:
            begin, end = self._step("begin_weight_update"), self._step("end_weight_update")
            begun = ask(begin)
            if not begun[0]:  # one that was not answered in time has begun later
                ask(end)
                begun = ask(begin)
            _check("begin_weight_update", begun)
            try:
                # A tensor without elements travels by value, so the engine may be on another host.
                sent = [(json.dumps(request), torch.empty(0))]
                # A flush in this request ends an SGLang without sessions if a request has just been answered.
                answer = ask(self._engine.update_weights_from_tensor, sent, load_format=LOADER, flush_cache=False)
            finally:
                ended = answered("SGLang", end, timeout=0.0)
            given: list[Any] = []
            with suppress(rtr.Empty):
                given = reports.get_many(_MOST_REPORTS, timeout=0)
            self._raise_failures(version, given, progress)
        finally:
            reports.delete()
        _check("update_weights_from_tensor", answer)
        _check("end_weight_update", ended)
        if self._flush_cache:
            self._flush()

    def _flush(self) -> None:
        """SGLang refuses it for some milliseconds after its last answer, too. Blocks."""
        flushing = Progress(_FLUSH_S)
        while not answered("SGLang", self._engine.flush_cache, timeout=flushing.left()).success:
            if not flushing.left():
                raise rtr.RayTorchRpcError(
                    f"SGLang has the new weights, and has not dropped what the former ones computed of prefixes within "
                    f"{_FLUSH_S:g} s, because requests run: finish them, or update it with flush_cache=False"
                )
            threads.pause(_PAUSE_S)

    def _step(self, name: str) -> Callable[[], tuple[bool, str]]:
        """A method of the engine; older releases have no sessions of updates."""
        return getattr(self._engine, name, None) or (lambda: (True, ""))

    def _raise_failures(
        self, version: int, reports: Sequence[tuple[int, int, Exception | None, bool]], progress: Progress
    ) -> None:
        """Raise what the engine's processes report; they have done so before SGLang has answered.

        ``reports``: of each its rank, the number of ranks, its failure, and whether its model may be torn.
        """
        failures = [(rank, failure) for rank, _, failure, _ in reports if failure is not None]
        progress.has_written |= any(failure is None or is_torn for *_, failure, is_torn in reports)
        # One that is no loss of the trainer would come again.
        failures.sort(key=lambda failed: isinstance(failed[1], (rtr.NotFound, rtr.PeerLost, rtr.RpcTimeout)))
        for rank, failure in failures:
            logger.error("rank %d of SGLang has not taken version %d: %s", rank, version, failure)
        if failures:
            raise failures[0][1]
        ranks, world = {rank for rank, *_ in reports}, max((world for _, world, *_ in reports), default=1)
        if len(ranks) < world:
            raise rtr.RayTorchRpcError(
                f"{len(ranks)} of {world} processes of SGLang have reported that they took version {version}: start "
                f"the engine with custom_weight_loader=[{LOADER!r}], in a member of the group; its log has more"
            )


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
    progress, is_torn = Progress(0), False
    try:
        request = json.loads(named_tensors[0][0])
        progress = Progress(request["timeout"])
        become_member(request["group"], request["timeout"])
        _bring(model, request, progress)
    except Exception as error:
        logger.exception("raytorchrpc could not update the model of SGLang")
        failure = error if isinstance(error, rtr.RayTorchRpcError) else rtr.RayTorchRpcError(f"{error!r}")
        is_torn = may_be_torn(error, progress)
    try:
        ranks = torch.distributed.is_initialized()
        rank = torch.distributed.get_rank() if ranks else 0
        world = torch.distributed.get_world_size() if ranks else 1
        reports = rtr.Queue(request["reports"], home=request["home"], maxsize=_MOST_REPORTS)
        reports.put((rank, world, failure, is_torn), timeout=request["timeout"])
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


def _bring(model: Any, request: Mapping[str, Any], progress: Progress) -> None:
    version, into = request["version"], request["into"]
    store = rtr.WeightStore.find(request["store"], timeout=progress.left())
    if store.instance != request["instance"]:
        raise rtr.NotFound(f"version {version} of store {store.name!r} is not there: its home was restarted meanwhile")
    layout = store.layout(version, timeout=progress.left())
    plan = _plans.get(model)
    if plan is None:
        report("sglang", logger)
    if plan is None or plan.key != _key(model, layout, into):
        plan = _plans[model] = _Plan(model, layout, into)
    device = next(iter(model.parameters())).device
    if plan.shards is None:
        check_layout("SGLang", model, layout)
        groups = divide(layout, lambda name: layout[name].nbytes, _GROUP_BYTES)
        load_whole(model, store, layout, groups, device, progress)
    else:
        plan.parts.pull(store, plan.shards, version, progress.left())
        progress.has_written = True
        if hasattr(model, "post_load_weights"):  # computes others of them, as load_weights would have had it do
            model.post_load_weights()
    brought_layouts[model] = layout
    if device.type != "cpu":
        torch.accelerator.synchronize()  # a version that is reported is there
