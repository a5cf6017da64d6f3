"""A weight sync scheme of torchrl: importing this registers ``WeightSyncScheme.from_backend("raytorchrpc")``.

The process of a ``RayCollector`` and its remote collectors become members of one group. An update publishes the weights
once, and every collector pulls them straight into its policy.
"""

from __future__ import annotations

import traceback
import uuid
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import ray
import torch
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

import raytorchrpc as rtr
from raytorchrpc.integrations.engines import Progress
from raytorchrpc.integrations.follower import Follower
from raytorchrpc.integrations.team import Team
from raytorchrpc.integrations.versions import adapted_to

with adapted_to("torchrl"):
    from tensordict import TensorDict, TensorDictBase
    from torchrl.weight_update import WeightSyncScheme
    from torchrl.weight_update.utils import _resolve_model
    from torchrl.weight_update.weight_sync_schemes import register_weight_sync_backend

#: By the name of their group. A process is in one group at a time, however many collectors and models it has.
_teams: dict[str, Team] = {}


@register_weight_sync_backend("raytorchrpc")
class RayTorchRpcWeightSyncScheme(WeightSyncScheme):
    """Brings the weights of one model from the process of a ``RayCollector`` to its remote collectors.

    ``update_policy_weights_`` blocks until all of them have the weights. It raises ``raytorchrpc.PeerLost``, which
    names the collector, if one died; the others have the weights then, and later updates work with ``worker_ids`` of
    those that are left. It raises ``raytorchrpc.ConfigurationError``, which names the tensors, if a policy has others.
    """

    def __init__(
        self,
        strategy: Literal["tensordict", "state_dict"] = "tensordict",
        *,
        convert: bool = False,
        group: str = "torchrl",
        config: rtr.GroupConfig | None = None,
        timeout: float = 600,
    ) -> None:
        """Describe a scheme; ``RayCollector`` forms the group.

        Args:
            strategy: of torchrl: which tensors of a module are its weights, and their names.
            convert: convert floating tensors to the dtypes of the collectors' policies.
            group: the group's name. If this process has formed a group of this name, with ``include_driver=True``, the
                collectors are added to it.
            config: settings of the group, if it is formed here. None: from the environment.
            timeout: seconds for an update, and for forming the group. A collector in a rollout takes weights after it.
        """
        super().__init__(strategy)
        self._convert, self._group_name, self._config, self._timeout = convert, group, config, timeout
        self._token = uuid.uuid4().hex
        """Identifies this scheme where several have the same collectors, or models of the same name."""
        self._model_ref: weakref.ref[Any] | None = None
        self._actors: list[ActorHandle[Any]] = []
        self._names: list[str] = []
        self._store: rtr.WeightStore | None = None
        self._follower: Follower | None = None
        """Of a receiver."""

    # --- in the process of the RayCollector ----------------------------------------------------------------------

    def _init_on_sender_impl(
        self,
        *,
        model_id: str,
        context: Any = None,
        model: Any = None,
        remote_collectors: Sequence[ActorHandle[Any]] | None = None,
        **_: Any,
    ) -> None:
        actors = getattr(context, "remote_collectors", None) if remote_collectors is None else remote_collectors
        if not actors or not all(isinstance(actor, ActorHandle) for actor in actors):
            raise rtr.ConfigurationError(
                f"backend 'raytorchrpc' brings weights to Ray actors: use it with RayCollector, not with "
                f"{type(context).__name__}"
            )
        self.model_id, self.context, self.model = model_id, context, model
        team = _teams.setdefault(self._group_name, Team(self._group_name, include_driver=True))
        names = team.hold(self._token, {"collector": actors}, self._config, self._timeout)
        self._actors, self._names = list(actors), names
        self._store = rtr.WeightStore(f"{model_id}/{self._token}", home=rtr.current_member().name)

    def _setup_connection_and_weights_on_sender_impl(
        self, *, worker_idx: int | None = None, weights: Any | None = None
    ) -> None:
        """The first ``send`` brings the first weights, unless they are given here."""
        if weights is not None:
            self.send(weights, worker_idx)

    def send(self, weights: Any = None, worker_ids: int | list[int] | None = None) -> None:
        """Bring weights to all remote collectors, or to some; see the class for what it raises."""
        if self._store is None or not self.synchronized_on_sender:
            raise RuntimeError("connect() comes before send(), in the process that init_on_sender() was called in")
        prepared = self.prepare_weights(weights, self._model_id, self._strategy, self.context)
        if prepared is None:
            raise rtr.ConfigurationError(
                f"there are no weights of {self._model_id!r}: pass them to update_policy_weights_"
            )
        self._store.publish(_by_name(prepared))
        if worker_ids is None:
            self._deliver(range(len(self._actors)))
        else:
            self._deliver([worker_ids] if isinstance(worker_ids, int) else worker_ids)

    def _deliver(self, workers: Sequence[int]) -> None:
        names = {self._actors[worker].__ray_call__.remote(_take, self): self._names[worker] for worker in workers}
        done, waiting = ray.wait(list(names), num_returns=len(names), timeout=self._timeout)
        failures: list[Exception] = []
        for answer in done:
            try:
                if (failure := ray.get(answer)) is not None:
                    failures.append(failure)
            except RayActorError as error:
                failures.insert(0, rtr.PeerLost(names[answer], f"its actor died in an update of weights: {error}"))
        if failures:
            raise failures[0]
        if waiting:
            raise rtr.RpcTimeout(
                f"{', '.join(names[answer] for answer in waiting)} took no weights within {self._timeout:g} s: a "
                f"collector in a rollout takes them after it, so pass a longer timeout= to the scheme"
            )

    def shutdown(self) -> None:
        """Free the published weights, and end the group unless others need it. Idempotent."""
        super().shutdown()
        if self._actors:
            with suppress(rtr.RayTorchRpcError):  # the program has ended the group
                if self._store is not None:
                    self._store.clear()
            self._actors, self._names, self._store = [], [], None
            _teams[self._group_name].release(self._token)

    def __del__(self) -> None:
        """Do nothing: ending a group takes locks, and a finalizer must not. A ``RayCollector`` calls ``shutdown``."""

    # --- in a remote collector -----------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_actors": [], "_names": [], "_receiver_transport": None, "_follower": None}

    def _init_on_receiver_impl(
        self, *, model_id: str, context: Any = None, worker_idx: int | None = None, model: Any = None, **_: Any
    ) -> None:
        self.model_id, self.context, self._worker_idx = model_id, context, worker_idx
        self.model = model
        assert self._store is not None
        self._follower = Follower("a collector", self._store.name, self._write, timeout=self._timeout)
        self._register_transport_receiver()

    @property
    def model(self) -> Any:
        """The module whose weights these are."""
        if self._model_ref is not None:
            return self._model_ref()
        if self._model_id is None:
            return None
        model = _resolve_model(self.context, self._model_id)
        if model is None and self._model_id == "policy":  # of a collector whose processes make their own
            model = self.context.policy = self.context.policy_factory[0]()
        self._model_ref = None if model is None else weakref.ref(model)
        return model

    @model.setter
    def model(self, model: Any) -> None:
        if model is not None:
            self._model_ref = weakref.ref(model)

    def create_transport(self, **_: Any) -> RayTorchRpcWeightSyncScheme:
        """Return what torchrl's ``receive`` asks for weights: this scheme."""
        return self

    def _setup_connection_and_weights_on_receiver_impl(self, *, worker_idx: int | None = None) -> None:
        pass

    def take(self) -> Exception | None:
        """Receive the newest weights; returns the error if it fails. In torchrl 0.14 an actor that raises one dies."""
        try:
            self.receive()
        except rtr.RayTorchRpcError as error:
            return error
        except Exception as error:
            kind = type(error).__qualname__
            return rtr.RemoteError(f"{kind}: {error}", kind, traceback.format_exc())
        return None

    def receive_weights(
        self, timeout: float | None = None, *, weights: Any = None, model: Any = None, strategy: Any = None
    ) -> Any | None:
        """Bring the newest weights into ``weights``, which are the model's; None if it has them, or there are none."""
        follower = self._follower
        assert follower is not None
        before = follower.held
        # None is published yet of another model of this collector, whose sender has something to send.
        if not follower.update(timeout=timeout, least=0) or follower.held == before:
            return None
        self._strategy.apply_weights(model, weights)  # what is not in the model's own memory, such as extra state
        return weights if isinstance(weights, TensorDictBase) else TensorDict.from_module(model)

    def _write(self, store: rtr.WeightStore, version: int, progress: Progress) -> None:
        weights = _by_name(self.weights)
        store.pull(weights, version, since=progress.held, convert=self._convert, timeout=progress.left())


def _take(collector: Any, scheme: RayTorchRpcWeightSyncScheme) -> Exception | None:
    """In a remote collector, take the newest weights. One that Ray has restarted gets a receiver before."""
    if scheme.model_id not in getattr(collector, "_receiver_schemes", {}):
        collector.register_scheme_receiver({scheme.model_id: scheme})
    failure: Exception | None = collector._receiver_schemes[scheme.model_id].take()
    return failure


def _by_name(weights: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """The tensors of a TensorDict or a dict, by their dotted names."""
    tensors: dict[str, torch.Tensor] = {}
    for name, value in weights.items():
        if isinstance(value, (TensorDictBase, Mapping)):
            tensors |= _by_name(value, f"{prefix}{name}.")
        else:
            tensors[f"{prefix}{name}"] = value
    return tensors
