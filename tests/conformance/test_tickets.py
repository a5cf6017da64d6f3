"""How a process gets a ticket from one that started it: here from this one, or from what holds its name."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from raytorchrpc.errors import BootstrapError
from raytorchrpc.group import tickets
from raytorchrpc.group.tickets import Parent, Ticket

_CONNECT = "import socket; sock = socket.socket(socket.AF_UNIX); sock.connect({name!r}); "
_READ = _CONNECT + "print(len(sock.recv(1 << 20)))"
_STAND_STILL = _CONNECT + "print(flush=True); import time; time.sleep(600)"
_BIND = "import socket; sock = socket.socket(socket.AF_UNIX); sock.bind({name!r}); sock.listen(); print(flush=True); "
_TAKE_NAME = _BIND + "sock.accept()[0].sendall(b'evil'); import time; time.sleep(600)"


@contextlib.contextmanager
def child(program: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-S", "-c", program.format(name=tickets._name(os.getpid()).decode())]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """This process hands out tickets; what a member runs when it leaves."""
    record = SimpleNamespace(_replace=lambda actors: ("a record",))
    monkeypatch.setattr(tickets, "record_of", lambda generation: record)
    config, me = SimpleNamespace(across_users=False), SimpleNamespace(name="parent")
    local: Any = SimpleNamespace(config=config, generation="g", me=me, at_end=[])
    Parent().serve(local, b"secret")
    yield local.at_end
    for end in local.at_end:
        end()


def get(patience_s: float = 30.0) -> Ticket | None:
    handed = tickets._tickets_from(os.getpid(), time.monotonic() + patience_s)
    return handed[0] if handed else None


@contextlib.contextmanager
def listening(backlog: int) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(tickets._name(os.getpid()))
        listener.listen(backlog)
        yield listener


def test_children_that_do_not_read_hold_nobody_up(parent: list[Any]) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stdout = stack.enter_context(child(_STAND_STILL)).stdout
            assert stdout is not None
            stdout.readline()
        began = time.monotonic()
        with child(_READ) as reader:
            assert int(reader.communicate(timeout=60)[0]) > 0
        assert time.monotonic() - began < 2 * tickets._TICKET_S, "it waited for the three"


def test_a_process_joins_one_group_after_another(
    parent: list[Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is free as soon as it has left."""
    monkeypatch.setattr(tickets, "_END_S", 30.0)
    local: Any = SimpleNamespace(generation="h", me=SimpleNamespace(name="again"), at_end=parent)
    for _ in range(50):
        parent.pop()()
        Parent().serve(local, b"secret")
    assert not [record for record in caplog.records if record.name == tickets.__name__]


def test_one_that_is_not_a_child_gets_nothing(parent: list[Any]) -> None:
    assert get() is None, "no process has started itself"


@pytest.mark.parametrize("backlog", [0, 8], ids=["full", "accepted by nobody"])
def test_an_ancestor_that_stands_still_is_named(backlog: int) -> None:
    with listening(backlog), contextlib.ExitStack() as stack:
        if backlog == 0:
            stack.enter_context(socket.socket(socket.AF_UNIX)).connect(tickets._name(os.getpid()))
        with pytest.raises(BootstrapError, match=rf"process {os.getpid()}, which started this one, .* suspended"):
            get(0.2)


def test_only_from_the_ancestor_itself_and_its_user(monkeypatch: pytest.MonkeyPatch) -> None:
    with child(_TAKE_NAME) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert get() is None, "another process has the name: nothing of it is read"
    me = os.geteuid()
    monkeypatch.setattr(tickets, "_other_end", lambda sock: (os.getpid(), me + 1, 0))
    with listening(8):
        assert get() is None, "another user's"
