"""A model's weights, published by one member and pulled by others into models of their own."""

from __future__ import annotations

import operator
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

from raytorchrpc._compat import torch_internals
from raytorchrpc.calls.client.future import Future
from raytorchrpc.calls.counters import PullCounter, StoreKey, WeightStats
from raytorchrpc.calls.member import LocalMember
from raytorchrpc.calls.options import OFTEN, CallOptions
from raytorchrpc.calls.scope import keep_admission, refuse_on_loop
from raytorchrpc.errors import ConfigurationError, Empty, NotFound, PeerLost, RayTorchRpcError, RpcTimeout
from raytorchrpc.patterns.handle import Handle, Steps, checked_count, run
from raytorchrpc.patterns.home import FIND, OPEN
from raytorchrpc.patterns.weights.conversions import Convert
from raytorchrpc.patterns.weights.drafts import Draft, Pairs, are_pairs
from raytorchrpc.patterns.weights.loans import lent
from raytorchrpc.patterns.weights.model_pull import ModelPull
from raytorchrpc.patterns.weights.model_tensors import Model
from raytorchrpc.patterns.weights.names import Only, Renamed, globs_of, selected
from raytorchrpc.patterns.weights.prefetch import Twins, WeightPrefetch
from raytorchrpc.patterns.weights.prefetch import begin as begin_prefetch
from raytorchrpc.patterns.weights.published import KIND, WAIT, PublishedWeights
from raytorchrpc.patterns.weights.publishers import Publisher, forget_everywhere, names_of, publishers_of, stage
from raytorchrpc.patterns.weights.pull_memory import PulledVersions, PullMemory, memory_of
from raytorchrpc.patterns.weights.slices import Options
from raytorchrpc.patterns.weights.snapshots import Snapshot
from raytorchrpc.patterns.weights.source_lease import Requests
from raytorchrpc.patterns.weights.store_layout import StoreLayout, describe
from raytorchrpc.patterns.weights.views import WeightView, view_in_place
from raytorchrpc.process import threads


def checked_version(name: str, value: Any) -> Any:
    """Return an argument that has to be None or a whole number, as an int. Raises ConfigurationError."""
    if value is None or type(value) is int:
        return value
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ConfigurationError(f"{name}= has to be the number of a version, not {value!r}") from None


@contextmanager
def _spanning(local: LocalMember, kind: str, store: StoreKey) -> Iterator[dict[str, Any]]:
    """Record a pull or a publish as a span of a trace. The caller fills in what is told of it."""
    began, about, error = time.monotonic(), {"version": 0, "bytes": 0, "home": store[1]}, None
    try:
        yield about
    except BaseException as raised:
        error = type(raised).__name__  # the error itself would hold this frame, which would hold it
        raise
    finally:
        if local.tracer is not None:
            local.tracer.span(kind, f"{kind} {store[0]}", began, about, error)


@contextmanager
def pulling(local: LocalMember, store: StoreKey) -> Iterator[PullCounter]:
    """Count one pull. The caller sets the counter's ``version`` to what the pull returns."""
    pull, has_failed = local.weights.begin_pull(store), True
    with _spanning(local, "pull", store) as about:
        try:
            yield pull
            has_failed = False
        finally:
            local.weights.end_pull(pull, has_failed)
            about.update(version=pull.version, bytes=pull.total)


_pulled = PulledVersions()


class WeightStore(Handle):
    """The weights of one model under ascending version numbers, in the members that publish them.

    One member publishes whole tensors: the store's home. Or several ``publishers`` publish shards, as DTensors or
    ``Shard``, and a version exists once all of them have published it. Readers pull whole tensors or any other shards;
    exactly the bytes that they need cross.

    ``publish`` copies the tensors into memory of the store, so training can continue at once. ``pull`` brings a version
    into the caller's tensors, in place. Within a host it reads CPU weights where they were published: one copy for each
    pull.

    A pull never brings tensors of two versions: a version that is being read does not change, and the next version goes
    to memory that no reader uses. A home has memory for each version that it keeps, and for those that are being read;
    one of several publishers, and a home that tracks changes, for one more. What is not used for two seconds is freed;
    ``stats`` shows it. ``lend`` takes no memory, for a program that waits for its readers.

    Members that pull the same feed one another: one member of each other host pulls into memory that it keeps for its
    host, and these, like readers on several GPUs of the home's host, stand in a line. The home sends each
    byte of whole tensors once.

    Members serve weights on threads of their own, beside their actor's methods. Operations raise PeerLost if the home
    is lost. They raise NotFound if this store has ended: the home was restarted, or the group formed again, since this
    handle was first used. The handle can be pickled, and is thread-safe.

    Examples:
        >>> store = rtr.WeightStore("policy", home="driver")
        >>> store.publish({"w": torch.ones(2)})
        1
        >>> model = {"w": torch.zeros(2)}
        >>> store.pull(model), model["w"]  # in any member
        (1, tensor([1., 1.]))
    """

    kind: ClassVar[str] = KIND

    def __init__(
        self,
        name: str,
        *,
        home: Any = None,
        publishers: Any = None,
        keep: int = 1,
        track: bool = False,
        group: str | None = None,
    ) -> None:
        """Refer to the store of this name, and create it if its home has none; see ``Queue``. Only the home publishes.

        Args:
            name: identifies the store in its home.
            home: a member's name, rank or handle, or a Member. None: this member.
            publishers: several such members, or a ``ProcessGroupInfo`` for its members, instead of ``home``. The first
                one by name is the home. Each has to publish every version. The same members everywhere, in any order.
            keep: how many versions, the newest ones, can be pulled.
            track: find out which tensors change between versions, so that ``pull(since=...)`` brings only those.
                ``publish`` then compares each tensor bit for bit with the version before, and copies only those that
                differ. It sees every change, however the tensor was written. If few elements of a tensor differ, and
                readers profit, it keeps these as a delta, which readers of the version before pull instead.
            group: see ``Queue``.
        """
        settings: tuple[Any, ...] = (checked_count("keep", keep), bool(track))
        if publishers is not None:
            names = names_of(publishers, home, group)
            home, settings = names[0], (*settings, names)
        super().__init__(name, home, settings, group)

    def _set_state(self, *state: Any) -> None:
        super()._set_state(*state)
        self._memory: PullMemory | None = None  # None: the member's
        self._twins = Twins()
        self._publishers = publishers_of(self)

    def __copy__(self) -> WeightStore:
        """A handle that remembers its own pulls alone, for a part of a model, or another model."""
        restore, state = self.__reduce__()
        handle: WeightStore = restore(*state)
        handle._memory = PullMemory()
        return handle

    @property
    def publishers(self) -> tuple[str, ...]:
        """The names of the members that publish, sorted."""
        return self._publishers or (self._home,)

    @property
    def _key(self) -> StoreKey:
        return self._name, self._home

    def _delete(self) -> Steps[None]:
        local, _ = yield from self._begin()
        yield from self._bind(local)
        yield from forget_everywhere(self, local)
        yield from super()._delete()

    # --- publishing ----------------------------------------------------------------------------------------------

    def publish(
        self,
        model: Model | Pairs,
        version: int | None = None,
        *,
        timeout: float | None = None,
    ) -> int:
        """Copy the model's tensors and make them the newest version; returns its number.

        Only at the home, or at each publisher. Blocks while CPU tensors are copied. Copies on a GPU are queued on this
        thread's current stream; with ``track`` it waits for the comparison. Never waits for readers. A publisher that
        is more than two versions ahead of another waits for it.

        Args:
            model: a module, or tensors by name: tensors, DTensors or Shards. Of a DTensor, its local shard. Or an
                iterable of pairs (name, tensor), such as a generator that makes each tensor when it is asked for the
                pair. Each one is copied, and dropped before the next is asked for. If the iterable raises, the version
                does not exist, and the next takes its number.
            version: a number higher than the last. None: the next number. If a publisher is restarted, the versions
                that it had not published yet never exist, and the next number is higher than theirs.
            timeout: seconds to wait for other publishers, without the time that an iterable takes; None:
                ``rpc_timeout_s``. Less if the call that this thread serves ends before: nine tenths of what it has
                left, or all but 0.5 s.

        Raises:
            ConfigurationError: this member does not publish to the store, something in the model is not a dense
                tensor, or an iterable has a name twice or no tensors.
            RpcTimeout: another publisher has not published earlier versions. This one may never exist.

        A home retires the version that it keeps no longer before it copies, for its memory. Meanwhile ``version`` still
        returns its number, and a pull without a version waits. If the copy fails, as without memory, it is gone.
        """
        local = self._membership()
        if self._publishers is not None:
            instead = "`await asyncio.to_thread(store.publish, model)`"
            refuse_on_loop(f"waiting for the other publishers of {self.kind} {self._name!r}", instead)
        return self._put(local, model, version, timeout, lends=False)[1].version

    def _put(
        self, local: LocalMember, model: Model | Pairs, version: int | None, timeout: float | None, *, lends: bool
    ) -> tuple[PublishedWeights, Snapshot, Publisher | None]:
        """Publish a model, or lend it; returns what this member has of the store, the new version there, and this
        process as one of several publishers.
        """
        version, publisher = checked_version("version", version), None
        draft = Draft(self._name, self._publishers is not None)
        draft.take(model)
        with _spanning(local, "publish", self._key) as about:
            if self._publishers is not None:
                weights: PublishedWeights
                weights, snapshot, publisher = run(stage(self, self.publishers, draft, version, timeout, lends))
            else:
                weights = self._at_home(local)
                weights.copy(draft, version)
                snapshot = (weights.lend if lends else weights.publish)(draft, version)
            about.update(version=snapshot.version, bytes=(size := draft.nbytes))
            local.weights.published(self._key, snapshot.version, size)
        return weights, snapshot, publisher

    @contextmanager
    def lend(self, model: Model, version: int | None = None, *, timeout: float | None = None) -> Iterator[int]:
        """Make the model's tensors themselves the newest version while the ``with`` block runs; yields its number.

        Nothing is copied here, and the store takes no memory: readers pull out of the model, and may begin to until the
        block ends. Do not change the tensors within it. Its end waits for those that have begun, at most ``timeout``,
        and then takes the tensors back: a pull that is slower raises RpcTimeout, and never returns with tensors that
        were changed meanwhile. On a GPU, what this thread queues on its current stream afterwards follows the copies of
        the readers. If the block raises, the tensors are taken back at once.

        Only at the home, or at each publisher: then the loan ends for all of them together, once every block has ended.
        So it is enough that one of them has its readers pull, and waits for them, within its block.

        The version ends with the loan, and so do all before it. Until the next one is lent or published, ``version``
        returns 0, and a pull waits for it. A member that restarts meanwhile finds no weights: publish for those.

        Args:
            model: a module, or tensors by name: tensors, DTensors or Shards, as for ``publish``. A tensor that is not
                contiguous is copied.
            version: see ``publish``.
            timeout: seconds for the end of the block; with several publishers, also for its beginning, as
                ``publish`` has it. None: ``rpc_timeout_s``. Less if the call that this thread serves ends before.

        Raises:
            ConfigurationError: as ``publish``.
            RpcTimeout: at the end: another publisher did not lend the version, or its block went on.
            PeerLost: another publisher, the first by name, is lost.

        Examples:
            >>> with store.lend(model) as version:
            ...     ray.get([engine.update.remote(version) for engine in engines])  # each one pulls it
        """
        local = self._membership()
        run(self._begin(timeout))  # which checks it
        refuse_on_loop(f"lending weights by {self.kind} {self._name!r}", "`await asyncio.to_thread(...)`")
        if are_pairs(model):
            raise ConfigurationError(
                f"lend takes a module, or tensors by name, for {self._name!r}: what an iterable yields is not there "
                f"until readers pull it; publish it"
            )
        with lent(self, local, *self._put(local, model, version, timeout, lends=True), timeout) as number:
            yield number

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
        newest = run(self._wait(checked_version("version", version), timeout))
        if newest < version:
            raise Empty(f"{self.kind} {self._name!r} had no version from {version} on in time")
        return newest

    async def await_version(self, version: int = 1, timeout: float | None = None) -> int:
        """Like ``wait``, for coroutines; a thread waits."""
        return await threads.in_thread(self.wait, version, timeout)

    def _wait(self, version: int, timeout: float | None) -> Steps[int]:
        local, wait_s = yield from self._begin(timeout)
        until = time.monotonic() + wait_s
        yield from self._bind(local, wait_s)
        wait_s = max(0.0, until - time.monotonic())
        return (yield from self._request(local, WAIT, (*self._address, version, wait_s), wait_s))  # type: ignore[no-any-return]

    def layout(self, version: int | None = None, *, timeout: float | None = None) -> StoreLayout:
        """Return names, dtypes, global shapes and shards of a version, without its tensors.

        Blocks for one answer of each publisher. ``layout.empty()`` has tensors to pull into, so that a reader needs no
        model: ``store.pull(layout.empty(), layout.version)``. The layout is a value, and does not keep its version.

        Args:
            version: None: the newest; if nothing is published yet, waits for the first version.
            timeout: seconds; None: ``rpc_timeout_s``.

        Raises:
            NotFound: the version is not there, or no longer.
            Empty: nothing was published in time.
            PeerLost, RpcTimeout: a publisher is lost, or does not answer.
            ConfigurationError: publishers disagree on a tensor's dtype or global shape.
        """
        version = checked_version("version", version)
        local, wait_s = run(self._begin(timeout))
        until = time.monotonic() + wait_s
        run(self._bind(local, wait_s))
        return describe(self, local, version, until, self.wait)

    def pull(
        self,
        model: Model,
        version: int | None = None,
        *,
        since: int | None = None,
        convert: Convert = False,
        strict: bool = True,
        mapping: Renamed | None = None,
        only: Only | None = None,
        timeout: float | None = None,
        through_restarts: bool = False,
    ) -> int:
        """Bring a version into the model's tensors, in place; returns its number.

        Blocks until tensors on the CPU are filled. Copies to a GPU are queued on this thread's current stream.

        Args:
            model: a module, or tensors by name, on any device: tensors, DTensors or Shards. Their memory is written as
                by ``rpc_sync(into=...)``. A tensor wants all of its global tensor, a DTensor its local shard.
            version: None: the newest; if nothing is published yet, waits for the first version.
            since: the version that the model has, as an earlier pull of this process from this store returned it. If it
                is still the newest, nothing is brought. In a store with ``track``, only tensors that have changed since
                are brought, or only the elements that have. The model must hold exactly that version, as a pull with
                the same ``mapping`` and ``convert`` left it. Any other number has no effect: everything is brought.
            convert: convert tensors whose floating dtype differs from the published one. The home does so once for each
                version and dtype; bfloat16 needs half the bytes of float32. Without it, another dtype is an error.
                ``BlockFp8()`` converts matrices to fp8, with a scale for each block.
            strict: the model must have exactly the published names. Otherwise the names that both have are pulled, even
                if there are none.
            mapping: other names, by name in the model: the published name, or the names of the parts that a fused
                parameter has along its first dimension, in order. A shard of it has the same share of every part.
            only: a name or glob of the model's names, or several. Brings these tensors; ``strict`` applies to them, and
                each has to match. The version that it returns is a ``since`` for the same ``only``.
            timeout: seconds for the whole pull; None: ``rpc_timeout_s``.
            through_restarts: until ``timeout``, wait for publishers that are lost and restarted by Ray, and for the
                versions that they publish then, instead of raising PeerLost, NotFound or Empty. If the home was
                restarted, this handle refers to its new store from then on, whose versions count from 1 again.
                While it waits, the model may have tensors of two versions.

        Raises:
            ConfigurationError: the model does not match; names up to ten tensors. Nothing is written.
            NotFound: the version is not there, or no longer. Nothing is written.
            Empty: nothing was published in time. Nothing is written.
            PeerLost, RpcTimeout: the model may have tensors of two versions; pull again before you use it.
        """
        version, since = checked_version("version", version), checked_version("since", since)
        refuse_on_loop(f"a pull from {self.kind} {self._name!r}", "`await store.apull(model)`")
        local, wait_s = run(self._begin(timeout))
        until = time.monotonic() + wait_s
        while True:
            try:
                run(self._bind(local, max(0.0, until - time.monotonic())))
                options = Options.of(mapping, convert, strict, only)
                return self._pull(local, model, version, since, until, options)
            except (PeerLost, NotFound, Empty, RpcTimeout) as error:
                if not through_restarts or not self._follows(local, error, version, until):
                    raise

    def _follows(self, local: LocalMember, error: RayTorchRpcError, version: int | None, until: float) -> bool:
        """After a pull has failed, wait for the publishers and follow the home to its present store.

        Returns False if the pull cannot succeed until the deadline. Raises PeerLost if a publisher is lost for good.
        """
        known, lost = self._instance_id, self._home
        if isinstance(error, PeerLost) and error.peer in self.publishers:
            lost = error.peer
        with suppress(RpcTimeout):
            self._outlast(local, lost, FIND, (self.kind, self._name), until)  # any request would do
            opened = self._outlast(local, self._home, OPEN, (self.kind, self._name, self._settings), until)
            self._instance_id = opened
            if isinstance(error, NotFound) and opened == known and version is not None:
                with suppress(PeerLost, NotFound):  # lost once more
                    return self.version() < version <= self.wait(version, max(0.0, until - time.monotonic()))
        return until > time.monotonic()

    @staticmethod
    def _outlast(local: LocalMember, member: str, service: str, args: tuple[Any, ...], until: float) -> Any:
        """Send a request that waits for the member to come back. Raises RpcTimeout at ``until``."""
        if member == local.me.name:
            return local.incoming.services[service].function(local, local.me.rank, *args)
        options = CallOptions(max(0.001, until - time.monotonic()), retry=OFTEN)
        return Future(local.outgoing.call(member, service, args, {}, options)).wait()

    def _pull(
        self,
        local: LocalMember,
        model: Model,
        version: int | None,
        since: int | None,
        until: float,
        options: Options,
    ) -> int:
        instance_id, failures = self._instance_id or 0, _pulled.failures
        memory = self._memory or memory_of(local, (self._name, self._home, self._settings))
        if since is not None and not self._has_pulled(since, options):
            since = None
        # Weights have no history, whatever autograd context asks for them.
        # No other method of the actor is to see a model that is filled in part.
        no_history = torch_internals.autograd_context(torch_internals.NO_CONTEXT)
        with no_history, pulling(local, self._key) as counter, keep_admission() as lending:
            requests = Requests(local, until, counter)
            pull = ModelPull(requests, self, memory, model, options, lending, self.wait)
            try:
                counter.version = pulled = pull.bring(version, since)
            except BaseException:
                if pull.has_begun:
                    _pulled.forget(instance_id)
                raise
        _pulled.add(instance_id, pulled, options, failures)
        return pulled

    def _has_pulled(self, version: int, options: Options) -> bool:
        """Whether a model of this process may have a version, as a pull with these options brings it."""
        return _pulled.has(self._instance_id or 0, version, options)

    def view(self, version: int | None = None, *, only: Only | None = None, timeout: float | None = None) -> WeightView:
        """Return the tensors of a version for reading, without a copy where that is possible.

        That is the case for CPU tensors of one home, in the home and in members on its host that the ``shm`` lane
        connects. All other readers get a pulled copy on the CPU: ``copied_because`` of the result says why.

        The tensors have the names and dtypes of publishing. Their memory is read-only: a write to them ends this
        process with SIGSEGV, so ``clone()`` what has to change. The publisher keeps the version, in memory that no
        other version uses, until this process has dropped the last tensor of the view, or has ended. If the publisher
        ends first, the tensors stay as they are.

        Blocks for two answers of the home, or for the pull.

        Args:
            version: None: the newest; if nothing is published yet, waits for the first version.
            only: a name or glob, or several: these tensors. Each has to match.
            timeout: seconds; None: ``rpc_timeout_s``. The view itself has no time limit.

        Raises:
            ConfigurationError: ``only`` names a tensor that was not published.
            NotFound, Empty, PeerLost, RpcTimeout: as ``pull``.
        """
        version, globs = checked_version("version", version), globs_of(only)
        refuse_on_loop(f"a view of {self.kind} {self._name!r}", "`await asyncio.to_thread(store.view)`")
        local, wait_s = run(self._begin(timeout))
        until = time.monotonic() + wait_s
        run(self._bind(local, wait_s))
        view = view_in_place(self, local, version, globs, until, self.wait)
        while isinstance(view, str):
            layout = describe(self, local, version, until, self.wait)
            names = selected(globs, layout, self._name)
            tensors = {name: tensor for name, tensor in layout.empty("cpu").items() if name in names}
            seconds = max(0.0, until - time.monotonic())
            try:
                self.pull(tensors, layout.version, only=names if globs else None, timeout=seconds)
                view = WeightView(self._name, layout.version, tensors, view)
            except NotFound:  # there is a newer one
                if version is not None or not seconds:
                    raise
        return view

    async def apull(self, model: Model, version: int | None = None, **options: Any) -> int:
        """Like ``pull``, for coroutines: on a thread, and there on the default stream of a GPU."""
        return await threads.in_thread(self.pull, model, version, **options)

    def _names_pulled(self) -> set[str]:
        """The names of the model's tensors that the last pull of this copy brought, if it was not ``strict``."""
        assert self._memory is not None
        return {name for plan in self._memory.plans[:1] for name in plan.names}

    def prefetch(
        self,
        model: Model,
        version: int | None = None,
        *,
        since: int | None = None,
        convert: Convert = False,
        strict: bool = True,
        mapping: Renamed | None = None,
        only: Only | None = None,
        timeout: float | None = None,
    ) -> WeightPrefetch:
        """Pull a version into a twin of the model, on a thread; ``swap`` of the result copies it into the model.

        Returns at once, and leaves the model as it is. Copies to a GPU use a stream of their own. The twin takes as
        much memory as the model. This handle keeps it for the next prefetches of the model, as long as the model
        lives: use one handle for all of them. A model has one prefetch at a time. In a store with ``track``, a prefetch
        brings what differs from the version of the one before.

        Args:
            model: a module, or tensors by name; see ``pull``. The twin is like its tensors, or local shards.
            version: see ``pull``.
            since: the version that the model has, and holds until ``swap``; see ``pull``. If it is still the newest,
                nothing is brought, and ``swap`` has no effect.
            convert: see ``pull``.
            strict: see ``pull``.
            mapping: see ``pull``.
            only: see ``pull``. ``swap`` leaves the other tensors as they are.
            timeout: seconds for the whole pull; None: ``rpc_timeout_s``. The deadline of the call that this thread
                serves does not count.

        Raises:
            ConfigurationError: this is not a model, a version is not a number, or the model has a prefetch that was
                neither swapped nor cancelled. Errors of the pull are raised by ``wait`` and ``swap`` of the result.
        """
        version, since = checked_version("version", version), checked_version("since", since)
        options = {"convert": convert, "strict": strict, "mapping": mapping, "only": globs_of(only) or None}
        return begin_prefetch(self, self._twins, model, version, since, timeout, options)

    # --- memory --------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Drop all versions, and the memory for the next; the store stays. Only at the home. Never blocks.

        What a reader still uses is freed after it. Until the next ``publish``, whose version has the next number,
        ``version`` returns 0, and a pull of an older version raises NotFound.

        Raises ConfigurationError elsewhere, and for a store with ``publishers``.
        """
        local = self._membership()
        if self._publishers is not None:
            raise ConfigurationError(f"clear is for whole tensors of one home; {self._name!r} has several publishers")
        self._at_home(local).clear()

    def stats(self) -> WeightStats:
        """Return what this member has of the store and has moved, in bytes. Never blocks; asks no other member.

        ``versions`` that are here and memory ``held`` for them; memory of publishers that is ``mapped`` here; bytes
        that others have pulled from here (``readers``, by member) and that came here (``sources``, by member), also
        through shared memory; version and bytes of the last pull and publish. See its docstring for all fields.
        """
        local = self._membership()
        return local.weights.row(local.me.name, self._key)
