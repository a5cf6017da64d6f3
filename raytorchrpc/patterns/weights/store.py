"""A model's weights, published by one member and pulled by others into models of their own."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import Any, ClassVar

from raytorchrpc._compat import torch_internals
from raytorchrpc.calls.current import process_member
from raytorchrpc.calls.member import LocalMember
from raytorchrpc.errors import ConfigurationError, Empty, NotFound
from raytorchrpc.patterns.handle import Handle, Steps, begin, checked_count, run
from raytorchrpc.patterns.weights.match import Carry, KnownLayout, Model, ModelMatch, tensors_of
from raytorchrpc.patterns.weights.model_buffers import BuffersByModel
from raytorchrpc.patterns.weights.prefetch import PullOptions, WeightPrefetch
from raytorchrpc.patterns.weights.prefetch import begin as begin_prefetch
from raytorchrpc.patterns.weights.published import KIND, WAIT, PublishedWeights
from raytorchrpc.patterns.weights.pull import Pull
from raytorchrpc.process import threads

#: How many pulled versions a process remembers, the last ones.
_REMEMBERED = 1024


class PulledVersions:
    """The versions that this process has pulled, by the instance of their store. Thread-safe.

    A version number alone does not identify weights: another store of the same name has the same numbers.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._versions: OrderedDict[tuple[int, int], None] = OrderedDict()

    def add(self, instance_id: int, version: int) -> None:
        """Note that a version has been pulled."""
        with self._lock:
            self._versions[instance_id, version] = None
            self._versions.move_to_end((instance_id, version))
            if len(self._versions) > _REMEMBERED:
                self._versions.popitem(last=False)

    def has(self, instance_id: int, version: int) -> bool:
        """Whether a model of this process may have this version."""
        with self._lock:
            return (instance_id, version) in self._versions

    def forget(self, instance_id: int) -> None:
        """Forget a store's versions: a pull has failed and may have left a model with tensors of several versions."""
        with self._lock:
            for pulled in [pulled for pulled in self._versions if pulled[0] == instance_id]:
                del self._versions[pulled]


_pulled = PulledVersions()


class WeightStore(Handle):
    """The weights of one model under ascending version numbers, in the member that publishes them: their home.

    ``publish`` copies the tensors into memory of the store, so training can continue at once. ``pull`` brings a version
    into the caller's tensors, in place. Within a host it reads CPU weights where they were published: one copy for each
    pull.

    A pull never brings tensors of two versions: a version that is being read does not change, and the next version goes
    to memory that no reader uses. The store has memory for two versions, and for as many more as are being read or
    kept.

    If several members of another host pull the same version, one of them pulls it from the home into memory that it
    keeps, and the others pull it from there.

    Members serve weights on threads of their own, beside their actor's methods. Operations raise PeerLost if the home
    is lost. They raise NotFound if this store has ended: the home was restarted, or the group formed again, since this
    handle was first used. The handle can be pickled, and is thread-safe.
    """

    kind: ClassVar[str] = KIND

    def __init__(self, name: str, *, home: Any = None, keep: int = 1, track: bool = False) -> None:
        """Refer to the store of this name, and create it if its home has none; see ``Queue``. Only the home publishes.

        Args:
            name: identifies the store in its home.
            home: a member's name, rank or handle, or a Member. None: this member.
            keep: how many versions, the newest ones, can be pulled.
            track: find out which tensors change between versions, so that ``pull(since=...)`` brings only those.
                ``publish`` then compares each tensor bit for bit with the version before, and copies only those that
                differ. It sees every change, however the tensor was written.
        """
        super().__init__(name, home, (checked_count("keep", keep), bool(track)))

    def _set_state(self, *state: Any) -> None:
        super()._set_state(*state)
        self._known_layout: KnownLayout | None = None
        self._prefetch_buffers = BuffersByModel()

    # --- publishing ----------------------------------------------------------------------------------------------

    def publish(self, model: Model, version: int | None = None) -> int:
        """Copy the model's tensors and make them the newest version; returns its number.

        Only at the home. Blocks while CPU tensors are copied. Copies on a GPU are queued on this thread's current
        stream; with ``track`` it waits for the comparison. Never waits for readers.

        Args:
            model: a module, or tensors by name.
            version: a number higher than the last. None: the next number.

        Raises:
            ConfigurationError: this member is not the home, or something in the model is not a dense tensor.
        """
        local = process_member()
        return self._at_home(local).publish(tensors_of(model, self._name), version)

    def broadcast(self, carry: Carry, version: int | None = None) -> int:
        """Pass a version to ``carry``, while the members that pull it call theirs; returns its number.

        Only at the home. Blocks as ``carry`` does.

        Args:
            carry: ``carry(version, tensors)`` gets the published copy in the order of publishing, for instance to
                broadcast it in a process group. The tensors must have been sent when it returns.
            version: None: the newest.
        """
        local = process_member()
        weights = self._at_home(local)
        lease = weights.lease(local.me.rank, version, None, 0, None)
        if lease is None:
            raise NotFound(f"nothing has been published to {self.kind} {self._name!r} yet")
        try:
            snapshot = weights.pool.leased(lease.lease)
            carry(lease.version, snapshot.tensors([(place, None) for place in range(len(snapshot.specs))]))
        finally:
            weights.pool.release(lease.lease)
        return lease.version

    def _at_home(self, local: LocalMember) -> PublishedWeights:
        if not run(self._bind(local)):
            raise ConfigurationError(
                f"{self.kind} {self._name!r} lives in member {self._home!r}: publish there, or make one here"
            )
        weights: PublishedWeights = self._object(local)
        return weights

    # --- pulling -------------------------------------------------------------------------------------------------

    def version(self) -> int:
        """Return the newest version; 0 if nothing is published yet. Blocks for an answer of the home."""
        return run(self._wait(0, None))

    def wait(self, version: int = 1, timeout: float | None = None) -> int:
        """Block until this version or a newer one is published; returns the newest.

        Raises Empty after ``timeout`` seconds (None: ``rpc_timeout_s``).
        """
        newest = run(self._wait(version, timeout))
        if newest < version:
            raise Empty(f"version {version} was not published to {self.kind} {self._name!r} in time")
        return newest

    async def await_version(self, version: int = 1, timeout: float | None = None) -> int:
        """Like ``wait``, for coroutines; a thread waits."""
        return await threads.in_thread(self.wait, version, timeout)

    def _wait(self, version: int, timeout: float | None) -> Steps[int]:
        local, wait_s = yield from begin(timeout)
        until = time.monotonic() + wait_s
        yield from self._bind(local, wait_s)
        left = max(0.0, until - time.monotonic())
        return (yield from self._request(local, WAIT, (*self._address, version, left), left))  # type: ignore[no-any-return]

    def pull(
        self,
        model: Model,
        version: int | None = None,
        *,
        since: int | None = None,
        convert: bool = False,
        strict: bool = True,
        timeout: float | None = None,
        carry: Carry | None = None,
    ) -> int:
        """Bring a version into the model's tensors, in place; returns its number.

        Blocks until tensors on the CPU are filled. Copies to a GPU are queued on this thread's current stream.

        Args:
            model: a module, or tensors by name, on any device. Their memory is written as by ``rpc_sync(into=...)``.
            version: None: the newest; if nothing is published yet, waits for the first version.
            since: the version that the model has, as an earlier pull of this process from this store returned it. If it
                is still the newest, nothing is brought. In a store with ``track``, only tensors that have changed since
                are brought. Any other number has no effect: everything is brought.
            convert: convert tensors whose floating dtype differs from the published one. The home does so once for each
                version and dtype; bfloat16 needs half the bytes of float32. Without it, another dtype is an error.
            strict: the model must have exactly the published names. Otherwise the names that both have are pulled.
            timeout: seconds for the whole pull; None: ``rpc_timeout_s``.
            carry: moves the tensors instead of the lanes, while the home calls ``broadcast``. ``since`` has no effect.

        Raises:
            ConfigurationError: the model does not match; names up to ten tensors. Nothing is written.
            NotFound: the version is not there, or no longer. Nothing is written.
            Empty: nothing was published in time. Nothing is written.
            PeerLost, RpcTimeout: the model may have tensors of two versions; pull again before you use it.
        """
        local, wait_s = run(begin(timeout))
        until = time.monotonic() + wait_s
        run(self._bind(local, wait_s))
        instance_id = self._instance_id or 0
        if carry is not None or (since is not None and not _pulled.has(instance_id, since)):
            since = None
        match = ModelMatch(self._name, model, self._known_layout, convert, strict)
        pull = Pull(self, local, match, until)
        try:
            # Weights have no history, whatever autograd context asks for them.
            with torch_internals.autograd_context(torch_internals.NO_CONTEXT):
                lease = pull.lease(version, since, carry is None, self.wait)
                if lease.lease:
                    selection = match.selection()
                    self._known_layout = match.layout_for_next()
                    if carry is None:
                        pull.bring(selection)
            if carry is not None:
                match.carry_by(carry)
        except BaseException:
            if match.lease is not None:
                _pulled.forget(instance_id)
            raise
        finally:
            pull.release()
        _pulled.add(instance_id, lease.version)
        return lease.version

    async def apull(self, model: Model, version: int | None = None, **options: Any) -> int:
        """Like ``pull``, for coroutines: on a thread, and there on the default stream of a GPU."""
        return await threads.in_thread(self.pull, model, version, **options)

    def prefetch(
        self,
        model: Model,
        version: int | None = None,
        *,
        since: int | None = None,
        convert: bool = False,
        strict: bool = True,
        timeout: float | None = None,
    ) -> WeightPrefetch:
        """Pull a version into buffers beside the model, on a thread; ``swap`` of the result has the model take it.

        Returns at once, and leaves the model as it is. Copies to a GPU use a stream of their own. The buffers take as
        much memory as the model. This handle keeps them for the next prefetches of the model, as long as the model
        lives: use one handle for all of them. A model has one prefetch at a time.

        Args:
            model: a module, or tensors by name. The buffers are like its tensors.
            version: see ``pull``.
            since: the version that the model has, and holds until ``swap``; see ``pull``. If it is still the newest,
                nothing is brought, and ``swap`` has no effect. In a store with ``track``, brings what differs from the
                version in the buffers: the one that the model had before the last ``swap``, if that prefetch had
                ``since``, or the one that ``swap(in_place=True)`` copied.
            convert: see ``pull``.
            strict: see ``pull``.
            timeout: seconds for the whole pull; None: ``rpc_timeout_s``. The deadline of the call that this thread
                serves does not count.

        Raises:
            ConfigurationError: this is not a model, or the model has a prefetch that was neither swapped nor cancelled.
                Errors of the pull are raised by ``wait`` and ``swap`` of the result.
        """
        options = PullOptions(version, since, convert, strict, timeout)
        return begin_prefetch(
            self, self._prefetch_buffers, lambda known: _pulled.has(self._instance_id or 0, known), model, options
        )
