"""A checkpoint engine of verl, for trainers and rollouts in other processes. In verl's configuration::

    actor_rollout_ref.rollout.checkpoint_engine.backend=raytorchrpc
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=raytorchrpc.integrations.verl

Trainers and rollout workers become members of a group, beside the groups that they are in. verl makes each tensor whole
in every trainer, one after the other. They publish them in parts, of which each trainer copies its share, so no process
needs memory for the model. Rollout workers pull a part from all trainers at once, while the next one is made.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import zlib
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any

import ray
import torch
from ray.actor import ActorHandle

import raytorchrpc as rtr
from raytorchrpc.integrations.engines import Progress
from raytorchrpc.integrations.team import Team
from raytorchrpc.integrations.versions import adapted_to
from raytorchrpc.process import threads

with adapted_to("verl"):
    from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

#: By the first trainer. Each manager of verl has trainers and rollouts of its own.
_teams: dict[ActorHandle[Any], Team] = {}
_updates = 0
"""How many updates this process has begun. The versions of all stores are numbers of updates."""

#: What each publisher adds to a part: how many tensors it has seen, a checksum of their names and shapes, and whether
#: this part is the last.
_SUMMARY = "raytorchrpc.summary."


@CheckpointEngineRegistry.register("raytorchrpc")
class RayTorchRpcCheckpointEngine(CheckpointEngine):
    """Brings weights from verl's trainers to its rollout workers.

    A trainer keeps a copy of its share of the model, and during an update those of two versions. A rollout worker has
    memory for two parts. If a rollout worker dies in an update, verl raises Ray's error; once it has removed the
    replica, the next update works.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        share: bool = True,
        group: str = "verl",
        timeout: float = 600,
    ) -> None:
        """Options come from ``checkpoint_engine.engine_kwargs.raytorchrpc``.

        Args:
            bucket_size: bytes of a part: verl's ``update_weights_bucket_megabytes``. A larger tensor is one part.
            is_master: whether this is the first trainer; verl sets it.
            share: each trainer publishes a share of the tensors. False: the first one publishes all of them.
            group: the group's name. If the process of verl's manager has formed a group of this name, trainers and
                rollout workers are added to it.
            timeout: seconds that an update may take.
        """
        self._group = group
        self._bucket_size, self._share, self._timeout = bucket_size, share, timeout
        self._place: tuple[str, tuple[str, ...]] | None = None
        self._stores: list[rtr.WeightStore] = []
        """Of the parts that there were so far."""
        self._version = 0
        self._known: dict[str, Any] | None = None
        """The kinds of the tensors of the last update, in a rollout worker."""

    # --- in the process of verl's manager ------------------------------------------------------------------------

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: Sequence[tuple[ActorHandle[Any], str]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Have the group follow the workers that there are now, and number the update. Blocks for those that are new.

        Returns the arguments of ``init_process_group`` for each trainer and each rollout worker.
        """
        global _updates
        _updates += 1
        actors, name = [actor for actor, _ in metadata], metadata[0][1]
        trainers, rollouts = actors[:actor_wg_world_size], actors[actor_wg_world_size:]
        team = _teams.get(trainers[0])
        if team is None:
            is_taken = any(team.group == name for team in _teams.values())
            team = _teams[trainers[0]] = Team(f"{name}_{len(_teams)}" if is_taken else name)
        names = team.hold("verl", {"trainer": trainers, "rollout": rollouts})
        group, publishers = rtr.get_group(team.group), tuple(names[:actor_wg_world_size])
        group.wait_ready()
        lives = [member.incarnation for member in group.members if member.name in publishers]
        place = f"{group.generation} {lives}", publishers  # what a trainer had published ends with its process

        def arguments(own: list[str]) -> dict[str, list[Any]]:
            return {"name": own, "place": [place] * len(own), "version": [_updates] * len(own)}

        return arguments(names[:actor_wg_world_size]), arguments(names[actor_wg_world_size:])

    # --- in each worker ------------------------------------------------------------------------------------------

    def prepare(self) -> tuple[ActorHandle[Any], str]:
        """Return a handle of this worker's actor, and the name of the group."""
        return ray.get_runtime_context().current_actor, self._group

    def init_process_group(self, name: str, place: tuple[str, tuple[str, ...]], version: int) -> None:
        """Find the store of the next update. Never blocks.

        Args:
            name: of this member.
            place: identifies the group and the processes of the trainers, and names these members.
            version: of the next update.
        """
        self._name, self._version = name, version
        if place != self._place:
            trainers = list(place[1]) if self._share else list(place[1][:1])
            self._place, self._publishers, self._stores = place, trainers, []

    def finalize(self) -> None:
        """Do nothing: what an update needs no longer has been freed."""

    def _store(self, part: int) -> rtr.WeightStore:
        if part == len(self._stores):
            group = self._place[0].partition(" ")[0] if self._place is not None else None
            self._stores.append(rtr.WeightStore(f"verl/{part}", publishers=self._publishers, group=group))
        return self._stores[part]

    # --- in a trainer --------------------------------------------------------------------------------------------

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Publish this trainer's share of the tensors. Every trainer has to iterate: making a tensor is collective.

        Returns metrics for verl's log.
        """
        began = time.perf_counter()
        size = await threads.in_thread(self._publish, weights, _device())
        return {"raytorchrpc/publish_s": time.perf_counter() - began, "raytorchrpc/publish_bytes": float(size)}

    def _publish(self, weights: Iterable[tuple[str, torch.Tensor]], device: torch.device) -> int:
        """Returns the bytes that were published here."""
        with torch.no_grad(), torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            if self._name not in self._publishers:
                for _ in weights:
                    pass
                return 0
            parts = Parts(weights, self._bucket_size, self._publishers, self._name)
            for part in itertools.count():
                self._store(part).publish(parts.following(), self._version, timeout=self._timeout)
                if parts.are_done:
                    return parts.nbytes
        raise AssertionError

    # --- in a rollout worker -------------------------------------------------------------------------------------

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield all tensors, part by part: one is pulled while the engine loads the other. They are the engine's.

        Raises ConfigurationError if verl gave the trainers different tensors, or others than in the update before: the
        engine may not have noticed that some are missing.
        """
        device, progress = _device(), Progress(self._timeout)
        part, is_last, kinds = 0, False, dict[str, Any]()
        pulling = asyncio.ensure_future(self._pull(part, device, progress))
        while not is_last:
            tensors, is_last = await pulling
            kinds |= {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
            _check_kinds(self._known or kinds, kinds, is_last)
            if not is_last:
                part += 1
                pulling = asyncio.ensure_future(self._pull(part, device, progress))
            try:
                for pair in tensors.items():
                    yield pair
            except BaseException:
                pulling.cancel()
                raise
        self._known = kinds

    async def _pull(self, part: int, device: torch.device, progress: Progress) -> tuple[dict[str, torch.Tensor], bool]:
        """Returns the tensors of a part, and whether it is the last."""

        def bring() -> tuple[dict[str, torch.Tensor], bool]:
            store = self._store(part)
            store.wait(self._version, progress.left())
            tensors = store.layout(self._version, timeout=progress.left()).empty(device)
            store.pull(tensors, self._version, timeout=progress.left())
            return tensors, _taken_out(tensors)

        return await threads.in_thread(bring)


class Parts:
    """What one of several publishers publishes of tensors that all of them see in the same order.

    A tensor belongs to the publisher that has the fewest bytes so far, and to the first part that has room for it.
    """

    def __init__(
        self, weights: Iterable[tuple[str, torch.Tensor]], size: int, publishers: Sequence[str], own: str
    ) -> None:
        self._weights, self._size, self._own = iter(weights), size, own
        self._sizes = dict.fromkeys(publishers, 0)
        self._count, self._checksum = 0, 0
        self._next = next(self._weights, None)

    @property
    def are_done(self) -> bool:
        """Whether there is no other part."""
        return self._next is None

    @property
    def nbytes(self) -> int:
        """Of the tensors that this publisher had so far."""
        return self._sizes[self._own]

    def following(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this publisher's tensors of the next part, and a summary of what it has seen."""
        filled = 0
        while self._next is not None:
            name, tensor = self._next
            if filled and filled + tensor.nbytes > self._size:
                break
            filled += tensor.nbytes
            self._count += 1
            self._checksum = zlib.crc32(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode(), self._checksum)
            publisher = min(self._sizes, key=self._sizes.__getitem__)
            self._sizes[publisher] += tensor.nbytes
            if publisher == self._own:
                yield name, tensor
            self._next = None
            del tensor  # its memory may be needed for the next one
            self._next = next(self._weights, None)
        yield f"{_SUMMARY}{self._own}", torch.tensor([self._count, self._checksum, self._next is None])


def _taken_out(tensors: dict[str, torch.Tensor]) -> bool:
    """Take the summaries out of a part; returns whether it is the last. Raises ConfigurationError if they differ."""
    names = [name for name in tensors if name.startswith(_SUMMARY)]
    summaries = {name.removeprefix(_SUMMARY): tuple(tensors.pop(name).tolist()) for name in names}
    if len(set(summaries.values())) > 1:
        raise rtr.ConfigurationError(
            f"verl gave its trainers different tensors (number, checksum of names and shapes, end: {summaries}): set "
            f"checkpoint_engine.engine_kwargs.raytorchrpc.share=False, and the first trainer publishes all of them"
        )
    return bool(next(iter(summaries.values()))[2])


def _check_kinds(known: dict[str, Any], kinds: dict[str, Any], are_all: bool) -> None:
    """Raise ConfigurationError for tensors of other kinds than known, and for those that are missing at the end."""
    if others := [name for name in (known | kinds if are_all else kinds) if known.get(name) != kinds.get(name)]:
        more = f" and {len(others) - 5} more" if len(others) > 5 else ""
        raise rtr.ConfigurationError(
            f"verl's trainers gave other tensors than in the update before, or not all, so the model may have parts of "
            f"both: {', '.join(map(repr, others[:5]))}{more}; update it again before it generates"
        )


def _device() -> torch.device:
    """Where an engine of this process has its weights."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
