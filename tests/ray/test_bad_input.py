"""What a user gets wrong, and what goes wrong on the way: a clear error, nothing half-made, and another try works."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

import raytorchrpc as rtr
from raytorchrpc._compat import ray_internals
from raytorchrpc.group import ray_calls
from raytorchrpc.tensors.devices import check_mapped
from tests import insides
from tests.polling import wait_until
from tests.ray.actors import Latch, Peer
from tests.ray.conftest import Spawn, kill_for_good
from tests.ray.plain import FailsToStart, RunsItsOwnRpc

MakeLatch = Callable[[], Latch]


def assert_work(handles: list[Any], **options: Any) -> None:
    """A group of these forms, and the first reaches the last."""
    with rtr.init_group(handles, name="afterwards", **options):
        assert ray.get(handles[0].call.remote(handles[-1], "double", 21)) == 42


def cause_of(ref: Any) -> Exception:
    """What the actor's method raised."""
    with pytest.raises(ray.exceptions.RayTaskError) as raised:
        ray.get(ref, timeout=60)
    return raised.value.cause  # type: ignore[no-any-return]


# --- what is wrong with the request itself -----------------------------------------------------------------


def test_a_change_that_cannot_be_made_changes_nothing(peers: list[Any]) -> None:
    a, _, c = peers
    with rtr.init_group({"a": a, "b": peers[1]}, include_driver=True) as group:
        for ask, error, said in (
            (lambda: group.remove(["a", "a"]), rtr.ConfigurationError, "each member once: 'a' is named 2 times"),
            (lambda: group.remove(["b", "a", 0]), rtr.ConfigurationError, "each member once: 'a' is named 2 times"),
            (lambda: group.remove(["a", "nobody"]), rtr.NotAMember, "'nobody' is not in group"),
            (lambda: group.remove(["a", 7]), rtr.NotAMember, "7 is not in group"),
            (lambda: group.remove(["a", "driver"]), rtr.ConfigurationError, "the driver stays"),
            (lambda: group.remove([]), rtr.ConfigurationError, "at least one member"),
            (lambda: group.remove("a"), rtr.ConfigurationError, "takes a list of members"),
            (
                lambda: group.add({"c": c, "d": c}),
                rtr.ConfigurationError,
                r"\['d'\] is the same actor as actors\['c'\]",
            ),
            (lambda: group.add([c, a]), rtr.ConfigurationError, "is a member of group 'default' already, as 'a'"),
            (lambda: group.add({"c": c, "b": c}), rtr.ConfigurationError, "same actor"),
            (lambda: group.add({"driver": c}), rtr.ConfigurationError, "has a member 'driver' already"),
            (lambda: group.add([]), rtr.ConfigurationError, "at least one actor handle"),
            (lambda: group.add([c, None]), rtr.ConfigurationError, "not an actor handle"),
            (lambda: group.process_group("gloo", members=["a", 0]), rtr.ConfigurationError, "takes each member once"),
            (lambda: group.process_group("gloo", members=["a", "nobody"]), rtr.NotAMember, "'nobody' is not in group"),
            (lambda: group.shutdown("soon"), rtr.ConfigurationError, "timeout is a number of seconds.*'soon'"),
            (lambda: group.stats(timeout=None), rtr.ConfigurationError, "timeout is a number of seconds.*None"),
            (lambda: group.on_change("lost"), rtr.ConfigurationError, "takes a function.*'lost'"),
        ):
            with pytest.raises(error, match=said):
                ask()
            assert [member.name for member in group.members] == ["a", "b", "driver"] and rtr.get_group() is group
        assert [rtr.rpc_sync(name).double(2) for name in ("a", "b")] == [4, 4]
        group.wait_ready(10)


def test_the_last_members_cannot_be_removed(pair: tuple[Any, Any]) -> None:
    group = rtr.get_group()
    with pytest.raises(rtr.ConfigurationError, match=r"no member would be left.*shutdown\(\)"):
        group.remove(["a", "b"])
    assert len(group) == 2


#: What ``actors`` may not be, given an actor.
NO_ACTORS: list[tuple[Callable[[Any], Any], str]] = [
    (lambda a: [], "at least one actor handle"),
    (lambda a: {}, "at least one actor handle"),
    (lambda a: None, "a list or a dict of actor handles, not None"),
    (lambda a: a, "a list or a dict of actor handles, not Actor"),
    (lambda a: "ab", "a list or a dict of actor handles, not 'ab'"),
    (lambda a: {a}, "a list or a dict of actor handles, not {"),
    (lambda a: [a, a], r"actors\[1\] is the same actor as actors\[0\]"),
    (lambda a: {"x": a, "y": a}, r"actors\['y'\] is the same actor as actors\['x'\]"),
    (lambda a: [a, None], r"actors\[1\] is not an actor handle but None"),
    (lambda a: [a, Peer], r"actors\[1\] is not an actor handle but .*Peer.*what Class.remote\(\)"),
    (lambda a: {"x": ray.put(a)}, r"actors\['x'\] is not an actor handle but ObjectRef"),
    (lambda a: {"a b": a}, "'a b' cannot name a member"),
    (lambda a: {"": a}, "'' cannot name a member"),
    (lambda a: {"7": a}, "'7' cannot name a member.*not digits alone"),
    (lambda a: {7: a}, "7 cannot name a member"),
    (lambda a: {"driver": a}, "'driver' is the driver's own"),
]
#: Options of init_group that cannot work, and device maps.
OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"timeout": 0}, "timeout must be above 0"),
    ({"timeout": -1}, "timeout must be above 0"),
    *(({"timeout": wrong}, "timeout must be above 0") for wrong in (None, "5", float("inf"))),
    ({"name": ""}, "group's name is a string of 1 to 256 characters, not ''"),
    ({"name": 7}, "group's name is a string of 1 to 256 characters, not 7"),
    ({"name": 1000 * "long"}, "group's name is a string of 1 to 256 characters, not 'longlo"),
    ({"config": {"rpc_timeout_s": 5}}, "config is a GroupConfig"),
    ({"config": rtr.GroupConfig(transports=["carrier_pigeon"])}, "carrier_pigeon"),
    ({"config": rtr.GroupConfig(interface="no_such0")}, "no_such0"),
    ({"config": rtr.GroupConfig(lanes=["shm"])}, "no lane for calls"),
]
MAPS: list[tuple[dict[str, Any], str]] = [
    ({"a": "1_0"}, r"device_maps\['a'\].*entry 1 \('1_0'\) is malformed: expected <peer rank>_<local gpu>"),
    ({"a": "1_0_0,1-1-1"}, r"entry 2 \('1-1-1'\) is malformed"),
    ({"a": {"b": {"gpu": 0}}}, "peer 'b': 'gpu' is not a CUDA device"),
    ({"a": {"b": {"cpu": 0}}}, "map of a to b, entry cpu -> 0: b has no GPU 0"),
    ({"a": "1_0_cpu"}, "map of a to b, entry 0 -> cpu: a has no GPU 0"),
    ({"a": 7}, "a device map is a DeviceMap, its text form or"),
    ({"nobody": "1_0_0"}, "'nobody' is not in the group; its members: a"),
    ({"a": "9_0_0"}, "9 is not in the group"),
    ({"a": "1_0_0"}, "map of a to b, entry 0 -> 0: a has no GPU 0"),
]


def test_a_request_that_cannot_work_is_refused(peers: list[Any]) -> None:
    for make, said in NO_ACTORS:
        with pytest.raises(rtr.ConfigurationError, match=said):
            rtr.init_group(make(peers[0]), include_driver=True)
    for options, said in OPTIONS:
        with pytest.raises(rtr.ConfigurationError, match=said):
            rtr.init_group(peers[:2], **options)
    for maps, said in MAPS:
        with pytest.raises(rtr.ConfigurationError, match=said):
            rtr.init_group({"a": peers[0], "b": peers[1]}, config=rtr.GroupConfig(device_maps=maps))
    assert_work(peers)


def test_a_malformed_device_map_is_refused_before_any_actor_is_asked(spawn: Spawn) -> None:
    never_placed = spawn(Peer, num_gpus=5)
    with pytest.raises(rtr.ConfigurationError, match="malformed"):
        rtr.init_group([never_placed], config=rtr.GroupConfig(device_maps={"peer_0": "1_0"}), timeout=0.2)


def test_a_cuda_tensor_without_a_mapping_names_the_device_the_peer_and_the_map() -> None:
    on_gpu_1: Any = SimpleNamespace(is_cuda=True, get_device=lambda: 1)
    with pytest.raises(rtr.LaneUnavailable, match=r"on cuda:1 has no mapping to member 'b' .*cuda:0 -> cuda:3"):
        check_mapped([torch.ones(1), on_gpu_1], "b", {0: 3}, "torchrpc")
    check_mapped([torch.ones(1), on_gpu_1], "b", {1: 0}, "torchrpc")


@pytest.mark.gpu(1)
def test_a_cuda_tensor_for_a_member_without_a_gpu_is_refused(spawn: Spawn, peers: list[Any]) -> None:
    with_gpu = spawn(Peer, num_gpus=1)

    def send(peer: Any) -> Any:
        return rtr.rpc_sync(peer).double(torch.ones(1, device="cuda"))

    with rtr.init_group({"gpu": with_gpu, "bare": peers[0]}):
        error = cause_of(with_gpu.run.remote(send, peers[0]))
        assert isinstance(error, rtr.LaneUnavailable)
        assert "cuda:0" in str(error) and "'bare'" in str(error)
        assert ray.get(with_gpu.call.remote(peers[0], "double", 1)) == 2


# --- members that cannot join ---------------------------------------------------------------------------------


def dead(spawn: Spawn) -> Any:
    actor = spawn(Peer)
    kill_for_good(actor)
    return actor


def full(spawn: Spawn) -> Any:
    actor = spawn(Peer, max_pending_calls=1)
    actor.run.remote(time.sleep, 60)
    return actor


NOWHERE = NodeAffinitySchedulingStrategy("ab" * 28, soft=False)


@pytest.mark.parametrize(
    ("make", "said", "timeout"),
    [
        (dead, "'b'.*died", 60),
        (lambda spawn: spawn(FailsToStart), "'b'.*the checkpoint is missing", 60),
        (lambda spawn: spawn(Peer, num_gpus=5), r"'b': no answer within \d+ s: pending resources .*GPU", 1),
        (lambda spawn: spawn(Peer, scheduling_strategy=NOWHERE), "'b'.*not schedulable", 60),
        (full, "'b'", 60),
    ],
)
def test_an_actor_that_cannot_join_is_named_with_the_cause(
    spawn: Spawn, peers: list[Any], make: Callable[[Spawn], Any], said: str, timeout: float
) -> None:
    """Where Ray reports the cause, long before the timeout."""
    with pytest.raises(rtr.BootstrapError, match=said) as raised:
        rtr.init_group({"a": peers[0], "b": make(spawn), "c": peers[1]}, timeout=timeout)
    assert raised.value.members == ("b",) and "^^" not in str(raised.value)
    assert_work(peers[:2])


def test_resources_of_a_placement_group_are_named_as_they_were_asked_for(spawn: Spawn) -> None:
    space = placement_group([{"CPU": 1}])
    strategy = PlacementGroupSchedulingStrategy(space, placement_group_bundle_index=0)
    try:
        first = spawn(Peer, num_cpus=1, scheduling_strategy=strategy)
        ray.get(first.threads.remote(), timeout=60)  # it has all there is
        waiting = spawn(Peer, num_cpus=1, scheduling_strategy=strategy)
        said = r"'b': no answer within \d+ s: pending resources \{CPU: 1\} of its placement group"
        with pytest.raises(rtr.BootstrapError, match=said):
            rtr.init_group({"b": waiting}, timeout=1)
    finally:
        remove_placement_group(space)


HANGS = """
import sys, time

class Hangs:
    def find_spec(self, name, path, target=None):
        if name == "torch":
            time.sleep(120)

sys.meta_path.insert(0, Hangs())
"""


@pytest.mark.usefixtures("cluster")
def test_a_process_that_hangs_as_it_loads_torch_is_named(tmp_path: Path) -> None:
    class Bare:  # here: to import this module would import torch
        def ready(self) -> bool:
            return True

    (tmp_path / "sitecustomize.py").write_text(HANGS)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    actor = ray.remote(num_cpus=0, runtime_env={"env_vars": {"PYTHONPATH": path}})(Bare).remote()
    ray.get(actor.ready.remote())
    began = time.monotonic()
    with pytest.raises(rtr.BootstrapError, match=r"1 of 1 could not be probed: .*: loading raytorchrpc and torch"):
        rtr.init_group([actor], timeout=2)
    assert time.monotonic() - began < 100, "not until they have loaded it"
    ray.kill(actor)


def test_it_says_meanwhile_whom_it_waits_for_and_why(
    spawn: Spawn,
    peers: list[Any],
    latch: MakeLatch,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(ray_calls, "_FIRST_NOTICE_S", 0.5)
    gate, unplaced = latch(), spawn(Peer, num_gpus=5)
    working = peers[0].busy.remote(gate)
    held = gate.await_arrival()
    actor_id = ray_internals.actor_id_of(peers[0])
    assert wait_until(lambda: ray_internals.running_methods().get(actor_id) == "busy", 60), "Ray reports once a second"
    members = {"a": peers[0], "b": unplaced, "c": peers[1]}
    with pytest.raises(rtr.BootstrapError, match=r"'a': no answer"):
        rtr.init_group(members, timeout=1.5)
    notice, *_ = [record.getMessage() for record in caplog.records if record.name == ray_calls.__name__]
    assert re.fullmatch(
        r"group 'default', after \d+ s, waits for a: busy in busy; b: pending resources \{.*GPU: 5.*\}", notice
    )
    gate.release(held)
    ray.get(working, timeout=60)


def test_a_method_that_forms_a_group_with_its_own_actor_is_told_so(peers: list[Any]) -> None:
    def form(other: Any) -> None:
        rtr.init_group({"other": other, "me": ray.get_runtime_context().current_actor})

    error = cause_of(peers[0].run.remote(form, peers[1]))
    assert isinstance(error, rtr.ConfigurationError)
    assert "actors['me'] is this actor" in str(error) and "include_driver=True" in str(error)


def test_a_group_of_a_name_that_exists_is_refused(peers: list[Any]) -> None:
    a, b, c = peers
    with rtr.init_group({"a": a, "b": b}, name="first"):
        with pytest.raises(rtr.BootstrapError, match=r"'first' exists; .* raytorchrpc\.get_group\('first'\)\.shutdown"):
            rtr.init_group({"c": c}, name="first")
        assert ray.get(a.call.remote(b, "double", 1)) == 2, "the refused attempt broke the group"
    assert_work([c, b])


def test_a_busy_member_is_named_and_the_others_are_free_at_once(peers: list[Any], latch: MakeLatch) -> None:
    a, b, busy = peers
    gate = latch()
    working = busy.busy.remote(gate)
    start = time.monotonic()
    with pytest.raises(rtr.BootstrapError, match=r"'c': no answer within \d+ s: .*between its methods") as raised:
        rtr.init_group({"a": a, "b": b, "c": busy}, timeout=1)
    assert raised.value.members == ("c",)
    assert time.monotonic() - start < 20
    assert_work([a, b])

    gate.open()
    ray.get(working)
    assert_work([a, b, busy])


def test_a_member_that_dies_while_the_group_forms(spawn: Spawn, peers: list[Any]) -> None:
    doomed = spawn(Peer)

    def die_when_all_listen() -> None:
        insides.before_step("commit", lambda: os.kill(os.getpid(), signal.SIGKILL))

    ray.get(doomed.run.remote(die_when_all_listen))
    with pytest.raises(rtr.BootstrapError, match="'doomed'"):
        rtr.init_group({"a": peers[0], "doomed": doomed, "b": peers[1]}, timeout=40)
    assert_work(peers[:2])


def test_a_process_with_its_own_torch_rpc_is_named_with_the_remedy(spawn: Spawn, peers: list[Any]) -> None:
    own = spawn(RunsItsOwnRpc)
    ray.get(own.begin.remote())
    with pytest.raises(rtr.BootstrapError, match=r"'b': .*already runs torch.distributed.rpc.*shutdown") as raised:
        rtr.init_group({"a": peers[0], "b": own, "c": peers[1]})
    assert raised.value.members == ("b",)
    ray.get(own.end.remote())
    assert_work([peers[0], own, peers[1]])


# --- calls -----------------------------------------------------------------------------------------------


@pytest.fixture
def pair(peers: list[Any]) -> Iterator[tuple[Any, Any]]:
    """Two members, ``a`` and ``b``, that still reach each other after the test."""
    with rtr.init_group({"a": peers[0], "b": peers[1]}):
        yield peers[0], peers[1]
        assert ray.get(peers[0].call.remote("b", "double", 1, timeout=60)) == 2
        assert ray.get(peers[1].call.remote("a", "double", 1, timeout=60)) == 2


def test_a_call_outside_a_group_names_the_remedy(peers: list[Any]) -> None:
    error = cause_of(peers[0].call.remote(peers[1], "double", 1))
    assert isinstance(error, rtr.NotAMember)
    assert "init_group" in str(error) or "its group has ended" in str(error)  # it has been in one or not
    for verb in (rtr.rpc_sync, rtr.rpc_async, rtr.remote):
        with pytest.raises(rtr.NotAMember, match=r"form one with raytorchrpc.init_group\(.*include_driver=True\)"):
            verb(peers[0]).double(1)
    with pytest.raises(rtr.NotAMember, match=r"instead of a Ray task, or join .*join\(name\)"):
        raise cause_of(ray.remote(num_cpus=0)(lambda peer: rtr.rpc_sync(peer).double(1)).remote(peers[0]))


def test_a_driver_outside_its_group_is_no_member(pair: tuple[Any, Any]) -> None:
    assert rtr.rpc_sync(pair[0]).double(1) == 2
    with pytest.raises(rtr.NotAMember, match=r"formed group 'default' without joining it.* pass include_driver=True"):
        rtr.current_member()
    with pytest.raises(rtr.LaneUnavailable, match=r"a client of a group has no torchrpc agent.*include_driver=True"):
        rtr.remote(pair[0]).double(1)


def test_a_call_under_way_fails_when_the_group_ends(peers: list[Any], latch: MakeLatch) -> None:
    a, b = peers[:2]
    gate = latch()
    group = rtr.init_group([a, b])
    ray.get(a.run.remote(start_a_call, b, gate))
    held = gate.await_arrival()
    group.shutdown()
    error = ray.get(a.run.remote(error_of_the_call), timeout=60)
    gate.release(held)
    assert isinstance(error, rtr.PeerLost)
    assert isinstance(cause_of(a.call.remote(b, "double", 1)), rtr.NotAMember)
    assert_work([a, b])


def start_a_call(target: Any, gate: Latch) -> None:
    globals()["the_call"] = rtr.rpc_async(target).hold(gate)


def error_of_the_call() -> BaseException | None:
    return globals()["the_call"].exception()  # type: ignore[no-any-return]


def test_an_unknown_target_is_told_who_there_is(pair: tuple[Any, Any], peers: list[Any]) -> None:
    for target, said in (
        ("nobody", "'nobody' is not in group 'default'; its members: a .0., b .1."),
        (peers[2], r"its members: a \(0\), b \(1\)"),
        (7, "7 is not in group"),
        (-1, "-1 is not in group"),
        (None, "None does not name a member: pass an actor handle"),
        (1.5, "1.5 does not name a member"),
    ):
        with pytest.raises(rtr.NotAMember, match=said):
            raise cause_of(pair[0].call.remote(target, "double", 1))


def test_an_unknown_or_undecorated_method_is_refused_by_every_verb(pair: tuple[Any, Any]) -> None:
    a, b = pair
    for name, said in (
        ("dubble", r"Peer has no method 'dubble' \(exposed: double, give, .*, who\); did you mean 'double'\?"),
        ("undecorated", r"Peer.undecorated is not exposed: decorate it with @raytorchrpc.method"),
        ("tag", "Peer has no method 'tag'"),
        ("unbound", "Peer.unbound is a static or class method, which cannot be called directly: make it a method"),
    ):
        for function in (call_sync, call_async, call_remote):
            error = ray.get(a.run.remote(function, b, name), timeout=60)
            assert isinstance(error, AttributeError) and not isinstance(error, rtr.NotAMember)
            with pytest.raises(rtr.NoSuchMethod, match=said):
                raise error


def call_sync(target: Any, name: str, *args: Any) -> BaseException | None:
    return _error_of(lambda: getattr(rtr.rpc_sync(target), name)(*args))


def call_async(target: Any, name: str, *args: Any) -> BaseException | None:
    return _error_of(lambda: getattr(rtr.rpc_async(target), name)(*args).result())


def call_remote(target: Any, name: str, *args: Any) -> BaseException | None:
    return _error_of(lambda: getattr(rtr.remote(target), name)(*args).to_here())


def _error_of(function: Callable[[], Any]) -> BaseException | None:
    try:
        function()
    except BaseException as error:
        return error
    return None


@pytest.mark.parametrize("verb", ["rpc_sync", "rpc_async", "remote"])
def test_calling_the_proxy_itself_says_what_to_write(verb: str) -> None:
    with pytest.raises(TypeError, match=rf"names no method: write {verb}\(target\)\.method\(\.\.\.\)"):
        getattr(rtr, verb)("b")(1, x=2)
    assert repr(getattr(rtr, verb)("b")) == f"<{verb}('b'): call a method of it>"
    assert repr(getattr(rtr, verb)("b").double) == f"<{verb}('b').double: call it, .double(...)>"
    with pytest.raises(AttributeError, match=r"\.double\.remote\(\.\.\.\) is for Ray's handles: write \.double"):
        getattr(rtr, verb)("b").double.remote(1)


def test_an_unpicklable_argument_is_named_and_sends_nothing(pair: tuple[Any, Any]) -> None:
    def send(target: Any) -> list[BaseException | None]:
        return [
            _error_of(lambda: rtr.rpc_sync(target).keep(threading.Lock())),
            _error_of(lambda: rtr.rpc_async(target).keep(1, {"deep": [threading.Lock()]})),
            _error_of(lambda: rtr.remote(target).keep(1, value=threading.Lock())),
            _error_of(lambda: rtr.rpc_sync(target).keep(rtr.rpc_async(target).double(1))),
        ]

    said = [
        "the 1st argument of b.keep (_thread.lock) cannot be pickled: ",
        "the 2nd argument of b.keep (dict) cannot be pickled, because of its ['deep'][0] (_thread.lock): ",
        "argument 'value' of b.keep (_thread.lock) cannot be pickled: ",
        "the 1st argument of b.keep (raytorchrpc.calls.client.future.Future) cannot be pickled: TypeError: a",
    ]

    a, b = pair
    before = ray.get(a.call.remote(b, "keep", None))
    for error, text in zip(ray.get(a.run.remote(send, b)), said, strict=True):
        assert isinstance(error, rtr.SerializationError)
        assert str(error).startswith(text) and ("lock" in str(error) or "Future" in text)
    assert ray.get(a.call.remote(b, "keep", None)) == before + 1


class NeedsArguments(Exception):
    """Pickle would call it with its one message, and fail."""

    def __init__(self, code: int, *, hint: str) -> None:
        super().__init__(f"code {code}")
        self.code, self.hint = code, hint


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__(threading.Lock())


def raise_needs_arguments() -> None:
    raise NeedsArguments(7, hint="try again")


def raise_unpicklable() -> None:
    raise Unpicklable


def raise_of_a_local_class() -> None:
    class Local(NeedsArguments):
        pass

    raise Local(7, hint="try again")


def open_what_is_not_there() -> None:
    with open("/no/such/file"):
        pass


def decode_garbage() -> None:
    b"\xff".decode()


def ask_to_exit() -> None:
    raise SystemExit(3)


PHI = "C:\\users\\new \N{GREEK SMALL LETTER PHI}\nsecond line"


def fail_with_phi() -> None:
    raise ValueError(PHI)


def described(call: Callable[..., Any], target: Any, raises: Callable[[], Any]) -> tuple[list[str], str, Any, str]:
    """Class names, text, attributes and remote traceback: Ray itself could not bring all of these exceptions here."""
    error = call(target, "give", raises)
    attributes = {name: value for name, value in vars(error).items() if isinstance(value, (str, int))}
    attributes |= {"filename": error.filename} if isinstance(error, OSError) else {}
    return [cls.__name__ for cls in type(error).__mro__], str(error), attributes, str(error.__cause__)


@pytest.mark.parametrize(
    ("raises", "kind", "said", "attributes", "of_rref"),
    [
        (raise_needs_arguments, "NeedsArguments", "code 7", {"code": 7, "hint": "try again"}, "RemoteError"),
        (raise_of_a_local_class, "Local NeedsArguments", "code 7", {"code": 7, "hint": "try again"}, "RemoteError"),
        (raise_unpicklable, "Unpicklable", "lock object", {}, "RemoteError"),
        (open_what_is_not_there, "FileNotFoundError", "No such file", {"filename": "/no/such/file"}, None),
        (decode_garbage, "UnicodeDecodeError", "can't decode byte 0xff in position 0", {}, None),
        (fail_with_phi, "ValueError", PHI, {}, "ValueError"),
        (ask_to_exit, "RemoteError", "SystemExit", {}, "RemoteError"),
        (threading.Lock, "SerializationError", "the result of b.give (_thread.lock) cannot be pickled", {}, None),
    ],
)
def test_a_remote_exception_comes_as_it_was(
    pair: tuple[Any, Any], raises: Callable[[], Any], kind: str, said: str, attributes: dict[str, Any], of_rref: str
) -> None:
    a, b = pair
    for function in (call_sync, call_async):
        names, text, found, cause = ray.get(a.run.remote(described, function, b, raises), timeout=60)
        assert names[: len(kind.split())] == kind.split() and said in text
        assert found.items() >= attributes.items()
        if kind.startswith("NeedsArguments"):
            assert "on b.give" in cause and "in raise_needs_arguments" in cause, "the remote traceback"
    if of_rref is not None:
        names, text, _, _ = ray.get(a.run.remote(described, call_remote, b, raises), timeout=60)
        assert names[0] == of_rref and said.removeprefix("in ") in text


# --- deadlines ---------------------------------------------------------------------------------------------


def elapsed_and_error(function: Callable[[], Any]) -> tuple[float, BaseException | None]:
    start = time.monotonic()
    error = _error_of(function)
    return time.monotonic() - start, error


def wait_in_every_way(target: Any, gate: Latch) -> list[tuple[float, BaseException | None]]:
    def future() -> Any:
        return rtr.rpc_async(target, timeout=0.2).hold(gate)

    watched, called = future(), threading.Event()
    watched.add_done_callback(lambda _: called.set())
    waits = [
        elapsed_and_error(lambda: rtr.rpc_sync(target, timeout=0.2).hold(gate)),
        elapsed_and_error(lambda: future().wait()),
        elapsed_and_error(lambda: future().result()),
        elapsed_and_error(lambda: future().result(timeout=60)),
        elapsed_and_error(lambda: _raise(future().exception())),
        elapsed_and_error(lambda: _raise(future().exception(timeout=60))),
    ]
    assert called.wait(30) and watched.done()
    return waits


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error


def test_a_deadline_that_passes_ends_every_kind_of_wait(pair: tuple[Any, Any], latch: MakeLatch) -> None:
    a, b = pair
    gate = latch()
    ray.get(a.run.remote(start_a_call, b, gate))
    held = gate.await_arrival()
    waits = ray.get(a.run.remote(wait_in_every_way, b, gate), timeout=60)
    gate.release(held)
    for elapsed, error in waits:
        assert isinstance(error, rtr.RpcTimeout)
        assert isinstance(error, TimeoutError)
        assert "b.hold did not answer within " in str(error) or "b.hold was running" in str(error)
        assert 0.15 < elapsed < 20
    assert ray.get(a.run.remote(error_of_the_call)) is None


def test_a_call_without_time_is_not_sent(pair: tuple[Any, Any]) -> None:
    for timeout in (0, -1, 0.0):
        with pytest.raises(rtr.RpcTimeout, match=r"no time left to call b.double"):
            raise cause_of(pair[0].call.remote("b", "double", 1, timeout=timeout))
    for wrong in (float("inf"), float("nan"), 1e12, "5"):
        with pytest.raises(rtr.ConfigurationError, match="timeout is a number of seconds up to"):
            raise cause_of(pair[0].call.remote("b", "double", 1, timeout=wrong))


def test_a_call_on_behalf_of_another_ends_by_that_ones_deadline(spawn: Spawn, latch: MakeLatch) -> None:
    """b, asked by a, asks back for longer than a waits."""
    a, b, gate = spawn(Peer, max_concurrency=2), spawn(Peer), latch()

    def hold_for_a_minute() -> None:
        rtr.rpc_sync("a", timeout=60).hold(gate)

    def call(target: Any) -> float:
        start = time.monotonic()
        ended = rtr.rpc_async(target, timeout=0.4).give(hold_for_a_minute)
        assert isinstance(_error_of(ended.wait), rtr.RpcTimeout)
        rtr.rpc_sync(target, timeout=40).double(1)  # b takes the next call: it no longer waits
        return time.monotonic() - start

    with rtr.init_group({"a": a, "b": b}, name="deadlines"):
        assert ray.get(a.run.remote(call, b), timeout=60) < 40
        gate.open_for_all()
