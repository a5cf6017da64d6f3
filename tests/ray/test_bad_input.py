"""What a user gets wrong, and what goes wrong on the way: a clear error, nothing half-made, and another try works."""

from __future__ import annotations

import itertools
import os
import re
import signal
import sys
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
from raytorchrpc.calls.server.exposed import methods_of
from raytorchrpc.group import ray_calls
from raytorchrpc.process.fan_out import Requests
from raytorchrpc.tensors.devices import check_mapped
from tests import insides
from tests.polling import wait_until
from tests.ray.actors import Latch, Peer
from tests.ray.conftest import Spawn, kill_for_good, pid_of
from tests.ray.plain import FailsToStart, Plain, RunsItsOwnRpc

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


@pytest.fixture
def trio(peers: list[Any]) -> Iterator[rtr.Group]:
    """a, b and the driver."""
    with rtr.init_group({"a": peers[0], "b": peers[1]}, include_driver=True) as group:
        yield group


# --- what is wrong with the request itself -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "error", "said"),
    [
        (["a", "a"], rtr.ConfigurationError, "each member once: 'a' is named 2 times"),
        (["b", "a", 0], rtr.ConfigurationError, "each member once: 'a' is named 2 times"),
        (["a", "nobody"], rtr.NotAMember, "'nobody' is not in group"),
        (["a", 7], rtr.NotAMember, "7 is not in group"),
        (["a", "driver"], rtr.ConfigurationError, "the driver stays"),
        ([], rtr.ConfigurationError, "at least one member"),
        ("a", rtr.ConfigurationError, "takes a list of members"),
    ],
)
def test_a_removal_that_cannot_be_done_changes_nothing(
    trio: rtr.Group, names: Any, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        trio.remove(names)
    assert [member.name for member in trio.members] == ["a", "b", "driver"]
    assert [rtr.rpc_sync(name).double(2) for name in ("a", "b")] == [4, 4]
    trio.wait_ready(10)


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda group: group.shutdown("soon"), "timeout is a number of seconds.*'soon'"),
        (lambda group: group.stats(timeout=None), "timeout is a number of seconds.*None"),
        (lambda group: group.on_change("lost"), "takes a function.*'lost'"),
    ],
)
def test_a_bad_argument_of_a_group_changes_nothing(
    trio: rtr.Group, ask: Callable[[rtr.Group], object], said: str
) -> None:
    with pytest.raises(rtr.ConfigurationError, match=said):
        ask(trio)
    assert rtr.get_group() is trio
    assert rtr.rpc_sync("a").double(2) == 4


def test_the_last_members_cannot_be_removed(pair: tuple[Any, Any]) -> None:
    group = rtr.get_group()
    with pytest.raises(rtr.ConfigurationError, match=r"no member would be left.*shutdown\(\)"):
        group.remove(["a", "b"])
    assert len(group) == 2


@pytest.mark.parametrize(
    ("add", "said"),
    [
        (lambda a, c: {"c": c, "d": c}, r"actors\['d'\] is the same actor as actors\['c'\]"),
        (lambda a, c: [c, a], "is a member of group 'default' already, as 'a'"),
        (lambda a, c: {"c": c, "b": c}, "same actor"),
        (lambda a, c: {"driver": c}, "has a member 'driver' already"),
        (lambda a, c: [], "at least one actor handle"),
        (lambda a, c: [c, None], "not an actor handle"),
    ],
)
def test_an_addition_that_cannot_be_done_changes_nothing(
    trio: rtr.Group, peers: list[Any], add: Callable[[Any, Any], Any], said: str
) -> None:
    with pytest.raises(rtr.ConfigurationError, match=said):
        trio.add(add(peers[0], peers[2]))
    assert [member.name for member in trio.members] == ["a", "b", "driver"]
    assert rtr.rpc_sync("a").double(2) == 4


@pytest.mark.parametrize("names", [["a", "a"], ["a", 0], []])
def test_a_process_group_that_cannot_be_made_changes_nothing(trio: rtr.Group, names: list[Any]) -> None:
    with pytest.raises(rtr.ConfigurationError, match="takes each member once, and at least one"):
        trio.process_group("gloo", members=names)
    with pytest.raises(rtr.NotAMember, match="'nobody' is not in group"):
        trio.process_group("gloo", members=["a", "nobody"])


@pytest.mark.parametrize(
    ("make", "said"),
    [
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
    ],
)
def test_a_request_that_cannot_work_is_refused(peers: list[Any], make: Callable[[Any], Any], said: str) -> None:
    with pytest.raises(rtr.ConfigurationError, match=said):
        rtr.init_group(make(peers[0]), include_driver=True)
    assert_work(peers[:1])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"timeout": 0}, "timeout must be above 0"),
        ({"timeout": -1}, "timeout must be above 0"),
        *(({"timeout": wrong}, "timeout must be above 0") for wrong in (None, "5", float("inf"))),
        ({"name": ""}, "group's name is a string of 1 to 256 characters, not ''"),
        ({"name": 7}, "group's name is a string of 1 to 256 characters, not 7"),
        ({"name": 1000 * "long"}, "group's name is a string of 1 to 256 characters, not 'longlo"),
        ({"config": {"rpc_timeout_s": 5}}, "config is a GroupConfig"),
        ({"config": rtr.GroupConfig(transports=["carrier_pigeon"])}, "carrier_pigeon"),
        ({"config": rtr.GroupConfig(interface="no_such0")}, "no_such0"),
        ({"config": rtr.GroupConfig(lanes=["socket"])}, "no lane for CPU tensors"),
    ],
)
def test_an_option_that_cannot_work_is_refused(peers: list[Any], options: dict[str, Any], said: str) -> None:
    with pytest.raises(rtr.ConfigurationError, match=said):
        rtr.init_group(peers[:2], **options)


def test_a_misspelt_setting_in_the_environment_is_refused(peers: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYTORCHRPC_RPC_TIMEOUT", "5")
    with pytest.raises(rtr.ConfigurationError, match="RAYTORCHRPC_RPC_TIMEOUT is not a setting"):
        rtr.init_group(peers[:1])


@pytest.mark.parametrize(
    ("maps", "said"),
    [
        ({"a": "1_0"}, r"device_maps\['a'\].*entry 1 \('1_0'\) is malformed: expected <peer rank>_<local gpu>"),
        ({"a": "1_0_0,1-1-1"}, r"entry 2 \('1-1-1'\) is malformed"),
        ({"a": {"b": {"gpu": 0}}}, "peer 'b': 'gpu' is not a CUDA device"),
        ({"a": {"b": {"cpu": 0}}}, "map of a to b, entry cpu -> 0: b has no GPU 0"),
        ({"a": "1_0_cpu"}, "map of a to b, entry 0 -> cpu: a has no GPU 0"),
        ({"a": 7}, "a device map is a DeviceMap, its text form or"),
        ({"nobody": "1_0_0"}, "'nobody' is not in the group; its members: a"),
        ({"a": "9_0_0"}, "9 is not in the group"),
        ({"a": "1_0_0"}, "map of a to b, entry 0 -> 0: a has no GPU 0"),
    ],
)
def test_a_bad_device_map_says_where(peers: list[Any], maps: dict[str, Any], said: str) -> None:
    members = {"a": peers[0], "b": peers[1]}
    with pytest.raises(rtr.ConfigurationError, match=said):
        rtr.init_group(members, config=rtr.GroupConfig(device_maps=maps))
    assert_work(peers[:2])


def test_a_malformed_device_map_is_refused_before_any_actor_is_asked(spawn: Spawn) -> None:
    never_placed = spawn(Peer, num_gpus=5)
    with pytest.raises(rtr.ConfigurationError, match="malformed"):
        rtr.init_group([never_placed], config=rtr.GroupConfig(device_maps={"peer_0": "1_0"}), timeout=0.2)


def test_a_map_to_a_gpu_that_does_not_exist(spawn: Spawn, peers: list[Any]) -> None:
    with_gpu = spawn(Peer, num_gpus=0.5)
    config = rtr.GroupConfig(device_maps={"a": {"b": {0: 99}}, "b": {"b": {99: 99}}})
    with pytest.raises(rtr.ConfigurationError, match=r"(a|b) has no GPU \d+"):
        rtr.init_group({"a": peers[0], "b": with_gpu}, config=config)
    assert_work([peers[0], with_gpu])


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
        (lambda spawn: spawn(Peer, num_gpus=5), r"'b': no answer within \d+ s: pending resources .*GPU", 2),
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
    assert raised.value.members == ("b",)
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


class CtrlC:
    """Interrupts ``init_group`` in one step: as it asks the second member, as it waits for them, or as it stores.

    ``again``: interrupts the rollback, too.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: str, moment: str, again: bool = False) -> None:
        self._step, self._asked, self._again = step, list[str](), again
        internals = ray_calls.ray_internals
        self._real = {"calls": internals.call_actor, "waits": Requests.next, "stores": internals.store}
        monkeypatch.setattr(internals, "call_actor", self.calls)
        if moment == "calls":
            self._most = 1
        else:
            self._most = 99
            if moment == "waits":
                monkeypatch.setattr(Requests, "next", lambda requests, until: self.waits(requests, until))
            else:
                monkeypatch.setattr(internals, "store", self.stores)

    def calls(self, handle: Any, function: Any, *args: Any) -> Any:
        self._asked.append(function.__name__)
        if function.__name__ == self._step and self._asked.count(self._step) > self._most:
            raise KeyboardInterrupt
        if function.__name__ == "give_up" and self._again:
            raise KeyboardInterrupt
        return self._real["calls"](handle, function, *args)

    def waits(self, *args: Any) -> Any:
        if self._asked[-1] == self._step:
            raise KeyboardInterrupt
        return self._real["waits"](*args)

    def stores(self, key: str, value: bytes | None) -> None:
        if key.startswith("groups/") and value is not None:
            raise KeyboardInterrupt
        self._real["stores"](key, value)


def threads_of_groups() -> list[str]:
    """Threads of this process, once those have ended that were told to."""
    stay = "raytorchrpc-deadlines", "raytorchrpc-copy"

    def found() -> list[str]:
        names = [thread.name for thread in threading.enumerate()]
        return [name for name in names if name.startswith("raytorchrpc") and not name.startswith(stay)]

    wait_until(lambda: not found(), 20)
    return found()


def is_member() -> bool:
    try:
        rtr.current_member()
    except rtr.NotAMember:
        return False
    return True


@pytest.mark.parametrize(
    ("step", "moment"),
    [*itertools.product(("probe", "prepare", "commit"), ("calls", "waits")), ("", "stores")],
)
def test_forming_that_is_interrupted_leaves_nothing(peers: list[Any], step: str, moment: str) -> None:
    posted = insides.stored_keys("groups/")
    with pytest.MonkeyPatch.context() as patch:
        CtrlC(patch, step, moment)
        with pytest.raises(KeyboardInterrupt):
            rtr.init_group(peers, include_driver=True)
    assert threads_of_groups() == []
    assert insides.stored_keys("groups/") == posted
    for peer in peers:
        assert insides.in_actor(peer, threads_of_groups) == []
        assert not insides.in_actor(peer, is_member)
    assert not is_member()
    assert_work(peers)


def test_the_same_actors_form_a_group_after_ctrl_c_in_the_rollback(peers: list[Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        CtrlC(patch, "commit", "waits", again=True)
        with pytest.raises(KeyboardInterrupt):
            rtr.init_group(peers)
    assert_work(peers)


SLOW_IMPORT = """
import sys, time, types

class Slow:
    def find_spec(self, name, path, target=None):
        if name == "torch":
            sys.meta_path.remove(self)
            for number in range(%d):
                time.sleep(0.5)
                if %r:
                    sys.modules["slowly_%%d" %% number] = types.ModuleType("slowly")

sys.meta_path.insert(0, Slow())
"""


def bare(folder: Path, code: str, count: int) -> list[Any]:
    """Actors whose class imports neither torch nor raytorchrpc; they run this code when their processes start."""

    class Bare:  # here: to import this module would import both
        def ready(self) -> bool:
            return True

    (folder / "sitecustomize.py").write_text(code)
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    made = [ray.remote(num_cpus=0, runtime_env={"env_vars": {"PYTHONPATH": path}})(Bare).remote() for _ in range(count)]
    ray.get([actor.ready.remote() for actor in made])
    return made


@pytest.mark.usefixtures("cluster")
def test_processes_that_load_torch_get_the_time_that_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray_calls, "_FIRST_NOTICE_S", 2.0)
    monkeypatch.setattr(ray_calls, "_NOTICE_S", 0.5)  # the first may come before the process reports that it loads
    monkeypatch.setattr(ray_calls, "LONGEST", 40)  # torch itself takes long on a busy machine
    actors = bare(tmp_path, SLOW_IMPORT % (10, True), 1)
    began = time.monotonic()
    with rtr.init_group(actors, timeout=4) as group:
        assert time.monotonic() - began > 5 and len(group) == 1
    notices = [record.getMessage() for record in caplog.records if record.name == ray_calls.__name__]
    said = r"group 'default', after \d+ s, loading raytorchrpc and torch: 0 of 1 are there, waits for"
    assert any(re.match(said, notice) for notice in notices), notices
    for actor in actors:
        ray.kill(actor)


@pytest.mark.usefixtures("cluster")
def test_a_process_that_hangs_as_it_loads_torch_is_named(tmp_path: Path) -> None:
    actors = bare(tmp_path, SLOW_IMPORT % (240, False), 2)
    began = time.monotonic()
    with pytest.raises(rtr.BootstrapError, match=r"2 of 2 could not be probed: .*: loading raytorchrpc and torch"):
        rtr.init_group(actors, timeout=3)
    assert time.monotonic() - began < 100, "not until they have loaded it"
    for actor in actors:
        ray.kill(actor)


def test_it_says_meanwhile_whom_it_waits_for_and_why(
    spawn: Spawn,
    peers: list[Any],
    latch: MakeLatch,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(ray_calls, "_FIRST_NOTICE_S", 1.5)
    gate, unplaced = latch(), spawn(Peer, num_gpus=5)
    working = peers[0].busy.remote(gate)
    held = gate.await_arrival()
    actor_id = ray_internals.actor_id_of(peers[0])
    assert wait_until(lambda: ray_internals.running_methods().get(actor_id) == "busy", 60), "Ray reports once a second"
    members = {"a": peers[0], "b": unplaced, "c": peers[1]}
    with pytest.raises(rtr.BootstrapError, match=r"'a': no answer"):
        rtr.init_group(members, timeout=3)
    notice, *_ = [record.getMessage() for record in caplog.records if record.name == ray_calls.__name__]
    assert re.fullmatch(
        r"group 'default', after \d+ s, waits for a: busy in busy; b: pending resources \{.*GPU: 5.*\}", notice
    )
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(ray_calls, "_FIRST_NOTICE_S", 0.1)
    with pytest.raises(rtr.BootstrapError):
        rtr.init_group(members, timeout=1.5)
    line = capsys.readouterr().err
    assert line.startswith("\r\x1b[Kgroup 'default', after") and line.endswith("\r\x1b[K") and "\n" not in line
    gate.release(held)
    ray.get(working, timeout=60)


def test_a_method_that_forms_a_group_with_its_own_actor_is_told_so(peers: list[Any]) -> None:
    def form(other: Any) -> None:
        rtr.init_group({"other": other, "me": ray.get_runtime_context().current_actor})

    error = cause_of(peers[0].run.remote(form, peers[1]))
    assert isinstance(error, rtr.ConfigurationError)
    assert "actors['me'] is this actor" in str(error) and "include_driver=True" in str(error)


def test_an_actor_that_is_in_a_group_is_refused_until_that_one_ends(peers: list[Any]) -> None:
    a, b, c = peers
    with rtr.init_group({"a": a, "b": b}, name="first"):
        with pytest.raises(rtr.BootstrapError, match="'b' is already in group 'first'; end that one") as raised:
            rtr.init_group({"c": c, "b": b}, name="second")
        assert raised.value.members == ("b",)
        with pytest.raises(rtr.BootstrapError, match="group 'first' exists"):
            rtr.init_group({"c": c}, name="first")
        assert ray.get(a.call.remote(b, "double", 1)) == 2, "the refused attempt broke the group"
    assert_work([c, b])


def test_a_driver_that_is_in_a_group_is_refused(peers: list[Any]) -> None:
    with (
        rtr.init_group(peers[:1], name="first", include_driver=True),
        pytest.raises(rtr.BootstrapError, match="'driver' is already in group 'first'"),
    ):
        rtr.init_group(peers[1:2], name="second", include_driver=True)
    assert_work(peers[:2])


def test_a_busy_member_is_named_and_the_others_are_free_at_once(peers: list[Any], latch: MakeLatch) -> None:
    a, b, busy = peers
    gate = latch()
    working = busy.busy.remote(gate)
    start = time.monotonic()
    with pytest.raises(rtr.BootstrapError, match=r"'c': no answer within \d+ s: .*between its methods") as raised:
        rtr.init_group({"a": a, "b": b, "c": busy}, timeout=2)
    assert raised.value.members == ("c",)
    assert time.monotonic() - start < 20
    assert_work([a, b])

    gate.open()
    ray.get(working)
    assert_work([a, b, busy])


@pytest.mark.slow
def test_a_member_that_gets_busy_while_the_group_forms(spawn: Spawn, peers: list[Any], latch: MakeLatch) -> None:
    """It has answered the first question and gets stuck before the next."""
    early, late = spawn(Plain), peers[0]
    ray.get(early.__ray_call__.remote(lambda self: __import__("torch").__name__))  # or the probe takes seconds
    holds_the_probe, holds_the_rest = latch(), latch()
    working = late.busy.remote(holds_the_probe)
    errors: list[Exception] = []

    def form() -> None:
        try:
            rtr.init_group({"early": early, "late": late, "third": peers[1]}, timeout=1.5)
        except Exception as error:
            errors.append(error)

    forming = threading.Thread(target=form)
    forming.start()
    while not ray.get(early.has_loaded.remote("raytorchrpc.group.join")):
        pass  # the actor runs its tasks in order: once this is true, it has answered
    stuck = early.__ray_call__.remote(lambda self, gate: gate.pass_through(), holds_the_rest)
    holds_the_probe.open()
    ray.get(working)
    forming.join()

    (error,) = errors
    assert isinstance(error, rtr.BootstrapError), error
    assert error.members == ("early",)
    assert_work([late, peers[1]])
    holds_the_rest.open()
    ray.get(stuck)
    assert_work([late, early, peers[1]])


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


def test_members_with_different_torch_releases_are_named(spawn: Spawn, peers: list[Any]) -> None:
    other = spawn(Peer)

    def claim(version: str) -> None:
        torch.__version__ = version  # what the probe reads

    ray.get(other.run.remote(claim, "1.13.1"))
    with pytest.raises(rtr.BootstrapError, match=r"different torch releases: b has 1.13.1, a has 2") as raised:
        rtr.init_group({"a": peers[0], "b": other, "c": peers[1]})
    assert raised.value.members == ("b",)
    ray.get(other.run.remote(claim, str(torch.__version__)))
    assert_work([peers[0], other])


def test_a_group_that_is_being_formed_cannot_take_members_of_a_formed_one(
    spawn: Spawn, peers: list[Any], latch: MakeLatch
) -> None:
    """The slow attempt saw its member free; when it goes on, the member has joined the other group."""
    wanted, late, third = spawn(Plain), peers[0], peers[1]
    gate = latch()
    working = late.busy.remote(gate)
    outcome: list[Any] = []

    def form_slowly() -> None:
        try:
            outcome.append(rtr.init_group({"wanted": wanted, "late": late}, name="slow"))
        except rtr.BootstrapError as error:
            outcome.append(error)

    forming = threading.Thread(target=form_slowly)
    forming.start()
    while not ray.get(wanted.has_loaded.remote("raytorchrpc.group.join")):
        pass
    with rtr.init_group({"wanted": wanted, "third": third}, name="quick"):
        gate.open()
        ray.get(working)
        forming.join()
        (slow,) = outcome
        if isinstance(slow, rtr.Group):
            slow.shutdown()
        assert isinstance(slow, rtr.BootstrapError), "it took a member away from a living group"
        with pytest.raises(rtr.NoSuchMethod, match=r"Plain.double is not exposed"):  # it answers
            ray.get(third.call.remote("wanted", "double", 1, timeout=60))


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [False, True])
def test_a_group_whose_forming_actor_died_does_not_keep_its_members(
    spawn: Spawn, peers: list[Any], restarts: bool
) -> None:
    controller = spawn(Peer, max_restarts=int(restarts))

    def form(handles: list[Any]) -> None:
        rtr.init_group(handles, name="by the controller")

    ray.get(controller.run.remote(form, peers[:2]))
    if restarts:
        before = ray.get(controller.run.remote(os.getpid))
        ray.kill(controller, no_restart=False)
        assert wait_until(lambda: pid_of(controller) not in (None, before), 30)
    else:
        kill_for_good(controller)
    try:
        assert_work(peers[:2])
    finally:
        for peer in peers[:2]:
            ray.get(peer.run.remote(insides.leave_group))


def before_its_methods_are_listed(todo: Callable[[], None] | None) -> None:
    """Lets a test hold ``prepare`` there."""
    from raytorchrpc.group import join

    def listed(instance: Any) -> dict[str, Any]:
        if todo is not None:
            todo()
        return methods_of(instance)

    join.methods_of = listed


def threads_of_a_member() -> list[str]:
    """Without those that belong to the process, in a group or not."""
    ours = {thread.name for thread in threading.enumerate() if "raytorchrpc" in thread.name}
    return sorted(ours - {"raytorchrpc-deadlines"})


@pytest.mark.slow
def test_a_slow_threaded_member_that_was_rolled_back_keeps_nothing(
    spawn: Spawn, peers: list[Any], latch: MakeLatch
) -> None:
    slow = spawn(Peer, max_concurrency=4)
    gate = latch()
    ray.get(slow.run.remote(before_its_methods_are_listed, gate.pass_through))
    with pytest.raises(rtr.BootstrapError, match="'slow': no answer"):
        rtr.init_group({"a": peers[0], "slow": slow}, timeout=1)
    ray.get(slow.run.remote(before_its_methods_are_listed, None))
    gate.open()
    ray.get(slow.run.remote(wait_for_the_last_step))
    left = ray.get(slow.run.remote(threads_of_a_member))
    assert_work([peers[0], slow])
    assert left == []


def wait_for_the_last_step() -> None:
    """Until prepare(), which goes on after it was held, has returned."""
    while any(
        frame.f_code.co_name == "prepare" and frame.f_globals.get("__name__") == "raytorchrpc.group.join"
        for top in sys._current_frames().values()
        for frame in _stack(top)
    ):
        threading.Event().wait(0.01)


def _stack(frame: Any) -> Iterator[Any]:
    while frame is not None:
        yield frame
        frame = frame.f_back


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


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("nobody", "'nobody' is not in group 'default'; its members: a .0., b .1."),
        ("a stranger", r"its members: a \(0\), b \(1\)"),
        (7, "7 is not in group"),
        (-1, "-1 is not in group"),
        (None, "None does not name a member: pass an actor handle"),
        (1.5, "1.5 does not name a member"),
    ],
)
def test_an_unknown_target_is_told_who_there_is(
    pair: tuple[Any, Any], peers: list[Any], target: Any, said: str
) -> None:
    with pytest.raises(rtr.NotAMember, match=said):
        raise cause_of(pair[0].call.remote(peers[2] if target == "a stranger" else target, "double", 1))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("dubble", r"Peer has no method 'dubble' \(exposed: double, give, .*, who\); did you mean 'double'\?"),
        ("undecorated", r"Peer.undecorated is not exposed: decorate it with @raytorchrpc.method"),
        ("tag", "Peer has no method 'tag'"),
        ("unbound", "Peer.unbound is a static or class method, which cannot be called directly: make it a method"),
    ],
)
def test_an_unknown_or_undecorated_method_is_refused_by_every_verb(pair: tuple[Any, Any], name: str, said: str) -> None:
    a, b = pair
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
    with pytest.raises(AttributeError, match=r"\.double\.remote\(\.\.\.\) is for Ray's handles: write \.double"):
        getattr(rtr, verb)("b").double.remote(1)


def test_arguments_that_do_not_fit_raise_what_python_raises(pair: tuple[Any, Any]) -> None:
    with pytest.raises(TypeError, match=r"double\(\) takes 2 positional arguments but 3 were given"):
        raise cause_of(pair[0].call.remote(pair[1], "double", 1, 2))


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
        assert "b.hold did not answer by its deadline" in str(error) or "b.hold was running" in str(error)
        assert 0.15 < elapsed < 20
    assert ray.get(a.run.remote(error_of_the_call)) is None


@pytest.mark.parametrize(
    ("timeout", "error", "said"),
    [
        *((none, rtr.RpcTimeout, r"no time left to call b.double") for none in (0, -1, 0.0)),
        *(
            (wrong, rtr.ConfigurationError, "timeout is a number of seconds up to")
            for wrong in (float("inf"), float("nan"), 1e12, "5")
        ),
    ],
)
def test_a_call_without_time_is_not_sent(
    pair: tuple[Any, Any], timeout: Any, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        raise cause_of(pair[0].call.remote("b", "double", 1, timeout=timeout))


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
