"""The nng lane and the process around it: values for those who are no members, forks, and the end."""

from __future__ import annotations

from collections.abc import Iterator

import numpy
import pytest
import torch

from raytorchrpc.errors import LaneUnavailable, PeerLost
from raytorchrpc.lanes.nng.offers import NngClient, NngServer, OfferAddress
from raytorchrpc.tensors.codec import Codec
from tests.conformance.peers import SECRET, Process
from tests.programs import run_program

CLIENT = NngClient()


@pytest.fixture
def server() -> Iterator[NngServer]:
    server = NngServer("a", SECRET, tcp_host="127.0.0.1")
    yield server
    server.close()


def fetched(address: OfferAddress) -> tuple[float, list[int], str]:
    """In a process that is no member."""
    value = Codec().decode(*CLIENT.fetch(address, SECRET, "key", 20))
    value["weights"] += 1
    return float(value["weights"].sum()), value["array"].tolist(), value["name"]


@pytest.mark.parametrize("tcp", [False, True], ids=["ipc", "tcp"])
def test_a_process_that_is_no_member_fetches_a_value(server: NngServer, process: Process, tcp: bool) -> None:
    address = server.open()
    weights = torch.zeros(3_000_000)
    server.offer("key", Codec().encode({"weights": weights, "array": numpy.arange(3), "name": "x"}))
    for _ in range(2):
        got = process.run(fetched, address._replace(network="another host") if tcp else address)
        assert got == (3_000_000.0, [0, 1, 2], "x")
    assert not weights.any()


def test_what_is_not_offered_and_who_may_not(server: NngServer) -> None:
    address = server.open()
    value = Codec().encode(torch.arange(4))
    server.offer("key", value)
    assert torch.equal(Codec().decode(*CLIENT.fetch(address, SECRET, "key", 10)), torch.arange(4))
    with pytest.raises(LaneUnavailable, match="'other'"):
        CLIENT.fetch(address, SECRET, "other", 10)
    with pytest.raises(PeerLost, match="secret"):
        CLIENT.fetch(address, b"another secret", "key", 10)
    with pytest.raises(LaneUnavailable, match="CPU"):
        server.offer("meta", value._replace(tensors=[torch.empty(1, device="meta")]))
    server.withdraw("key")
    with pytest.raises(LaneUnavailable, match="'key'"):
        CLIENT.fetch(address, SECRET, "key", 10)
    server.close()
    with pytest.raises(PeerLost):
        CLIENT.fetch(address, SECRET, "key", 10)


# --- the process ---------------------------------------------------------------------------------------------


ENDS = """
import sys, threading, warnings
import torch
from tests.conformance import peers
from tests.conformance.peers import EMPTY, Message, Node, PeerAddress, answer

warnings.filterwarnings("ignore", "This process", DeprecationWarning)  # Python 3.12: a fork beside threads
a, b = Node("nng over tcp", "a", 0), Node("nng over tcp", "b", 1)
a.lane.connect([PeerAddress("b", b.address)])
answer(a.lane.call("b", Message(("echo",), EMPTY), 20))
held = a.lane.call("b", Message(("hold",), EMPTY), 20)
threading.Thread(target=held.wait, args=(20,), daemon=True).start()
print("ready", flush=True)
"""


FORKS = """
import gc, os, signal, sys
from raytorchrpc.errors import LaneUnavailable

def child(end):
    global a, b
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    signal.alarm(20)
    try:
        a.lane.call("c", Message(("echo",), EMPTY), 5)
    except LaneUnavailable as error:
        said = str(error)
    a.lane.disconnect("b")
    a.lane.close()
    del a.lane, a
    b.lane.close()
    del b.lane, b
    gc.collect()
    assert "fork" in said, said
    end(7)

codes = child(os._exit), child(sys.exit)
answer(a.lane.call("b", Message(("echo",), EMPTY), 20))
print(codes)
"""


def test_a_forked_child_neither_hangs_nor_harms_its_parent_which_ends_with_calls_under_way() -> None:
    ran = run_program("-c", ENDS + "a.lane.connect([PeerAddress('c', b.address)])" + FORKS + "sys.exit(3)")
    assert (ran.stdout, ran.stderr, ran.returncode) == ("ready\n(7, 7)\n", "", 3)
