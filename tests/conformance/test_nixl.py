"""What is the nixl lane's own: registered memory, peers that break off, UCX's settings. Two processes, as in
test_tensor_lanes; functions with an underscore run in them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from raytorchrpc.errors import LaneUnavailable, NotFound, PeerLost
from raytorchrpc.lanes.base import PeerAddress, Pieces
from raytorchrpc.lanes.nixl.agent import Agent
from raytorchrpc.lanes.nixl.lane import NixlLane
from tests.conformance import peers
from tests.conformance.peers import export, tensors
from tests.conformance.test_tensor_lanes import Pair, _drop, _fetch, _keep_only
from tests.insides import needs_nixl
from tests.polling import wait_until

MIB = 1 << 20


def test_without_the_package_the_lane_says_what_to_install() -> None:
    with pytest.raises(LaneUnavailable, match=r"pip install '\.\[nixl\]' in a checkout"):
        Agent(None, {})


@pytest.fixture
def form(form: Callable[..., Pair]) -> Callable[..., Pair]:
    """Makes two members."""
    return lambda kind="nixl", capacity=64 * MIB, patience_s=20.0: form(kind, capacity, patience_s)


def lane() -> NixlLane:
    found = tensors().lane
    assert isinstance(found, NixlLane)
    return found


def _used() -> int:
    lane().reap()
    return lane()._pool.used


def _ones(size: int) -> list[torch.Tensor]:
    return [torch.ones(size, dtype=torch.uint8)]


# --- memory ----------------------------------------------------------------------------------------------------


@needs_nixl
def test_memory_comes_back_and_is_used_again(form: Callable[..., Pair]) -> None:
    pair = form()
    for _ in range(3):
        pair.pass_on("kept", _two_and_small)
        assert pair.a.run(_comes_back), "the sender's"
        assert pair.b.run(_used) >= 4 * MIB
        pair.b.run(_keep_only, "kept", 1)
        assert 2 * MIB <= pair.b.run(_used) < 3 * MIB
        pair.b.run(_drop, "kept")
        assert pair.b.run(_used) == 0
        assert pair.a.run(_registered) == pair.b.run(_registered) == 3


def _two_and_small() -> list[torch.Tensor]:
    return [*_ones(2 * MIB), *_ones(2 * MIB), *_ones(7), torch.arange(9)]


def _comes_back() -> bool:
    return wait_until(lambda: _used() == 0, 40)


def _registered() -> int:
    pool = lane()._pool
    return sum(len(blocks) for blocks in pool._free.values()) + len(pool._given)


@needs_nixl
def test_a_full_pool_says_so_and_a_crowded_receiver_copies(form: Callable[..., Pair]) -> None:
    pair = form()
    sent = [pair.send(_ones, 20 * MIB) for _ in range(3)]
    with pytest.raises(AssertionError, match=r"LaneUnavailable.*60 MiB of 64 MiB.*clone\(\).*shm_bytes"):
        pair.send(_ones, 20 * MIB)
    for number, each in enumerate(sent):
        pair.b.run(_fetch, each, f"kept {number}", _ones, 20 * MIB)
    assert pair.b.run(_used) == 40 * MIB, "the third came when more than half was out"
    assert pair.a.run(_comes_back)
    pair.pass_on("", _ones, 50 * MIB)  # other sizes: what is free makes room
    assert pair.a.run(_comes_back)
    assert pair.a.run(lambda: lane()._pool._total) <= 64 * MIB


# --- peers that break off --------------------------------------------------------------------------------------


@needs_nixl
def test_a_sender_that_dies_meanwhile_is_lost_at_once(form: Callable[..., Pair]) -> None:
    pair = form("nixl over tcp", 1 << 30)
    pair.pass_on("", _ones, 10)
    large, small = pair.send(_ones, 400 * MIB), pair.send(_ones, 10)
    pid = pair.a.run(os.getpid)
    taken = pair.b.run(_fetch_while, large, pid, signal.SIGKILL)
    assert taken < 10, "longer than it takes to notice"
    assert pair.b.run(_is_lost, small) < 1
    assert pair.b.run(_used) == 0
    assert pair.b.run(_export_to_the_lost)


def _fetch_while(sent: Any, pid: int, what: int) -> float:
    """Fetch; once data moves, send its sender a signal. Returns how long it took to fail."""

    def strike() -> None:
        assert wait_until(lambda: lane()._reading == 1, 10)
        os.kill(pid, what)

    threading.Thread(target=strike).start()
    began = time.monotonic()
    with pytest.raises(PeerLost):
        lane().read("a", *sent)
    return time.monotonic() - began


def _is_lost(sent: Any) -> float:
    began = time.monotonic()
    with pytest.raises(PeerLost):
        lane().read("a", *sent)
    lane().release("a", sent[0])
    return time.monotonic() - began


def _export_to_the_lost() -> bool:
    with pytest.raises(LaneUnavailable, match="the connection to 'a' broke"):
        export(_ones(10), "a")
    return True


@needs_nixl
def test_a_sender_that_stands_still_is_given_up_and_its_data_may_still_come(form: Callable[..., Pair]) -> None:
    pair = form("nixl over tcp", 1 << 30, patience_s=1.0)
    pair.pass_on("", _ones, 10)
    large = pair.send(_ones, 200 * MIB)
    pid = pair.a.run(os.getpid)
    try:
        assert 0.9 < pair.b.run(_fetch_while, large, pid, signal.SIGSTOP) < 10
        assert pair.b.run(_used) >= 200 * MIB, "the memory may still be written"
    finally:
        os.kill(pid, signal.SIGCONT)
    assert pair.b.run(_comes_back)
    assert pair.a.run(_comes_back)
    pair.pass_on("", _ones, 10)


@needs_nixl
@pytest.mark.parametrize("kind", ["nixl", "nixl over tcp"])
def test_a_receiver_that_died_is_found_out(form: Callable[..., Pair], kind: str) -> None:
    pair = form(kind)
    pair.pass_on("", _ones, 10)
    pair.send(_ones, 3 * MIB)
    assert pair.a.run(_used) >= 3 * MIB
    pair.b.kill()
    assert pair.a.run(_comes_back)


@needs_nixl
def test_a_lane_may_close_while_it_is_read_from_and_while_it_reads(form: Callable[..., Pair]) -> None:
    for closing in ("a", "b"):
        pair = form("nixl over tcp", 1 << 30)
        sent = pair.send(_ones, 400 * MIB)
        if closing == "b":
            assert pair.b.run(_close_while_fetching, sent) < 5
        else:
            pair.b.begin(_fails_or_arrives, sent)
            pair.a.run(peers.close_tensors)
            assert pair.b.result()


def _close_while_fetching(sent: Any) -> float:
    mine = lane()
    ended: list[str] = []

    def fetch() -> None:
        try:
            mine.read("a", *sent)
            ended.append("arrived")
        except (PeerLost, LaneUnavailable) as error:
            ended.append(str(error))

    thread = threading.Thread(target=fetch)
    thread.start()
    assert wait_until(lambda: mine._reading == 1 or bool(ended), 10)
    began = time.monotonic()
    mine.close()
    thread.join(10)
    assert ended and not thread.is_alive()
    return time.monotonic() - began


def _fails_or_arrives(sent: Any) -> bool:
    try:
        lane().read("a", *sent)
    except PeerLost:
        return True
    return True


# --- what is exposed -------------------------------------------------------------------------------------------


def _expose_ones(size: int) -> Any:
    return lane().expose(_ones(size))


def _gather(descriptor: Any, size: int) -> str:
    """What came of it."""
    target, one = torch.zeros(size, dtype=torch.uint8), numpy.zeros(1, numpy.int64)
    try:
        lane().gather("a", descriptor, [Pieces(one, one, one + target.data_ptr(), size)], target.device)
    except (NotFound, PeerLost, LaneUnavailable) as error:
        return type(error).__name__
    return "right" if bool(target.all()) else "wrong"


def _conceal(descriptor: Any) -> bool:
    """Whether the memory is kept for now."""
    lane().conceal(descriptor, ["b", "nobody"])
    return lane()._end_exposed()


def _is_let_go() -> bool:
    return wait_until(lambda: not lane()._exposed, 20)


@needs_nixl
@pytest.mark.parametrize("kind", ["nixl", "nixl over tcp"])
def test_what_is_exposed_is_kept_until_its_reader_is_done_with_it(form: Callable[..., Pair], kind: str) -> None:
    pair = form(kind)
    first, second, third = (pair.a.run(_expose_ones, 9 * MIB) for _ in range(3))
    assert pair.b.run(_gather, first, 9 * MIB) == "right"
    reader = pair.b.run(os.getpid)
    os.kill(reader, signal.SIGSTOP)
    try:
        assert pair.a.run(_conceal, first)
    finally:
        os.kill(reader, signal.SIGCONT)
    assert wait_until(lambda: len(pair.a.run(lambda: [*lane()._exposed])) == 2, 20)
    assert pair.b.run(_gather, first, 9 * MIB) == "NotFound"
    assert pair.b.run(_gather, second, 9 * MIB) == "right", "nothing else is lost"
    pair.b.kill()
    for descriptor in (second, third):
        pair.a.run(_conceal, descriptor)
    assert pair.a.run(_is_let_go)


@needs_nixl
def test_an_owner_that_dies_or_stands_still_is_lost_to_its_readers(form: Callable[..., Pair]) -> None:
    size = 200 * MIB
    for what in (signal.SIGKILL, signal.SIGSTOP):
        pair = form("nixl over tcp", 64 * MIB, patience_s=1.0)
        descriptor, owner = pair.a.run(_expose_ones, size), pair.a.run(os.getpid)
        assert pair.b.run(_gather, descriptor, 1) == "right"
        assert pair.b.run(_gather_while, descriptor, size, owner, what) == "PeerLost"
        if what == signal.SIGSTOP:
            assert pair.b.run(_used) > 0, "what still comes is written to memory of the lane"
            os.kill(owner, signal.SIGCONT)
            assert pair.b.run(_comes_back)
            assert pair.b.run(_gather, descriptor, size) == "right"
        else:
            assert pair.b.run(_gather, descriptor, size) == "LaneUnavailable"


def _gather_while(descriptor: Any, size: int, pid: int, what: int) -> str:
    def strike() -> None:
        while not lane()._reading and time.monotonic() < began + 10:
            pass  # no pause: a fast host reads all of it in the time of one
        os.kill(pid, what)

    began = time.monotonic()
    threading.Thread(target=strike).start()
    outcome = _gather(descriptor, size)
    assert time.monotonic() - began < 10
    return outcome


# --- the process around it -------------------------------------------------------------------------------------


@needs_nixl
def test_idle_it_uses_no_core(form: Callable[..., Pair]) -> None:
    pair = form()
    pair.pass_on("", _two_and_small)
    for process in (pair.a, pair.b):
        assert process.run(_share_of_a_core, 0.5) < 0.25


def _share_of_a_core(seconds: float) -> float:
    used, began = time.process_time(), time.monotonic()
    threading.Event().wait(seconds)
    return (time.process_time() - used) / (time.monotonic() - began)


ALONE = """
import json, logging, logging.handlers, os, sys
handler = logging.FileHandler(sys.argv[1], mode="w")
logging.getLogger().addHandler(handler)
before = (logging.raiseExceptions, dict(os.environ), [name for name in logging.root.manager.loggerDict])
from raytorchrpc.errors import LaneUnavailable
from raytorchrpc.lanes.nixl.lane import NixlLane
lane = NixlLane(1 << 20, (), 5.0, json.loads(sys.argv[2]))
try:
    lane.open()
    opened = "opened"
except LaneUnavailable as error:
    opened = error.reason
lane.close()
logging.getLogger().warning("still here")
handler.flush()
same = logging.raiseExceptions is before[0] and dict(os.environ) == before[1] and not logging.getLogger("nixl").handlers
import nixl  # the package itself finds the library loaded
print(json.dumps([opened, same, open(sys.argv[1]).read().strip(), nixl.nixl_agent_config().enable_pthread]))
"""


def alone(tmp_path: Path, settings: dict[str, str] | None, **environment: str) -> list[Any]:
    """Open the lane in a process of its own; what came of it."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    ran = subprocess.run(
        [sys.executable, "-c", ALONE, str(tmp_path / "log"), json.dumps(settings)],
        cwd=Path(__file__).parents[2],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    found: list[Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


@needs_nixl
def test_opening_leaves_the_logging_and_the_environment_of_the_program_alone(tmp_path: Path) -> None:
    assert alone(tmp_path, {}) == ["opened", True, "still here", True]


@needs_nixl
@pytest.mark.skipif(Path("/sys/class/infiniband").exists(), reason="this machine may have an RDMA device")
def test_without_a_device_it_is_not_available_and_the_users_environment_wins(tmp_path: Path) -> None:
    opened, *_ = alone(tmp_path, {"TLS": "^tcp"})
    assert "UCX found no usable transport" in opened and "TLS=^tcp" in opened
    assert alone(tmp_path, {"TLS": "^tcp"}, UCX_TLS="tcp")[0] == "opened"
    assert "LIBFABRIC cannot be used" in alone(tmp_path, None)[0]


@needs_nixl
def test_strangers_are_unknown() -> None:
    mine = NixlLane(MIB, (), 5.0, peers.NIXL_SETTINGS["nixl over tcp"])
    try:
        assert mine.open()[2] is None
        mine.connect([PeerAddress("gone", ("raytorchrpc-gone", b"not an address", None))])
        sent = mine.export(_ones(10), "gone", {})
        with pytest.raises(PeerLost, match="'gone'"):
            mine.read("gone", sent.descriptor, [(torch.uint8, (10,))])
        with pytest.raises(LaneUnavailable, match="'nobody' is unknown"):
            mine.export(_ones(10), "nobody", {})
        with pytest.raises(PeerLost, match="'nobody' is unknown"):
            mine.read("nobody", sent.descriptor, [(torch.uint8, (10,))])
    finally:
        mine.close()
    with pytest.raises(LaneUnavailable, match="closed"):
        mine.export(_ones(10), "gone", {})


# --- GPU only --------------------------------------------------------------------------------------------------


@needs_nixl
@pytest.mark.gpu(1)
def test_what_arrives_is_not_written_over_by_earlier_work(form: Callable[..., Pair]) -> None:
    pair = form("nixl on cuda")
    pair.b.run(_keep_first, pair.a.run(_export_full, 0, 8 * MIB))
    for number in range(1, 6):
        pair.b.run(_fetch_while_busy, pair.a.run(_export_full, number, 8 * MIB), number)


def _export_full(number: int, count: int) -> Any:
    return export([torch.full((count,), number, dtype=torch.int32, device="cuda")])


def _keep_first(sent: Any) -> None:
    _fetch_and_keep(sent)


def _fetch_while_busy(sent: Any, number: int) -> None:
    """The allocator believes freed memory free for this stream, though work that writes it is still queued."""
    torch.cuda._sleep(50_000_000)
    tensors().kept.pop("earlier").fill_(-1)
    arrived = _fetch_and_keep(sent)
    torch.cuda.synchronize()
    assert bool((arrived == number).all())


def _fetch_and_keep(sent: Any) -> torch.Tensor:
    (arrived,) = lane().read("a", *sent)
    tensors().kept["earlier"] = arrived
    return arrived


@needs_nixl
@pytest.mark.gpu(1)
def test_an_allocation_that_was_freed_is_not_taken_for_its_successor(form: Callable[..., Pair]) -> None:
    pair = form("nixl on cuda")
    for number in range(6):
        size = (32 + 16 * (number % 2)) * MIB
        sent = pair.a.run(_export_full, number, size)
        pair.b.run(_fetch_full, sent, number)
        assert pair.a.run(_free_everything)
    assert pair.a.run(lambda: len(lane()._segments._known)) <= 3


def _fetch_full(sent: Any, number: int) -> None:
    (arrived,) = lane().read("a", *sent)
    assert bool((arrived == number).all())


def _free_everything() -> bool:
    tensors().exports.clear()
    let_go = wait_until(lambda: lane().reap() is None and not lane().outstanding, 10)
    torch.cuda.empty_cache()
    return let_go
