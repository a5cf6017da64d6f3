"""The rig itself: what it leaves behind, which is nothing, however its creator ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.multihost.rig import REPO, Host, Unavailable, hosts, read_line

pytestmark = pytest.mark.multihost

TIMEOUT_S = 20.0
_CREATOR = """
from tests.multihost.rig import hosts
with hosts(2, user={user}) as (a, b):
    left = b.start(["sh", "-c", "setsid sleep 1000 & echo; wait"])
    left.stdout.readline()
    print(a._init, b._init, left.pid, flush=True)
    input()
"""
_TRY = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 9), float(sys.argv[2]))  # nobody listens there
except ConnectionRefusedError:
    print("reached")
except OSError as error:
    print(type(error).__name__)
"""


def wires() -> set[str]:
    return set(os.listdir("/sys/class/net"))


def reached(a: Host, b: Host, patience_s: float = 5.0) -> bool:
    return a.run([sys.executable, "-ISc", _TRY, b.address, str(patience_s)]) == "reached\n"


def silent(a: Host, b: Host) -> bool:
    return not reached(a, b, 0.3)


@pytest.fixture(params=[False, True], ids=["root", "user-namespace"], autouse=True)
def user(request: pytest.FixtureRequest) -> bool:
    """Whether hosts are built in a user namespace, as they are without root."""
    try:
        with hosts(1, user=request.param):
            pass
    except Unavailable as unavailable:
        pytest.skip(str(unavailable))
    return bool(request.param)


def test_a_creator_that_is_killed_takes_every_process_along(user: bool) -> None:
    before = wires()
    pipe = subprocess.PIPE
    code = _CREATOR.format(user=user)
    creator = subprocess.Popen([sys.executable, "-c", code], cwd=REPO, stdin=pipe, stdout=pipe, text=True)
    watched: list[int] = []
    try:
        watched = [os.pidfd_open(int(pid)) for pid in read_line(creator, TIMEOUT_S).split()]
        assert len(watched) == 3 and wires() == before
        creator.send_signal(signal.SIGKILL)
        for fd in watched:
            assert select.select([fd], [], [], TIMEOUT_S)[0], "it outlived its creator"
    finally:
        creator.kill()
        creator.communicate(timeout=TIMEOUT_S)
        for fd in watched:
            os.close(fd)


def test_hosts_end_with_the_block_and_what_ran_in_them_too(user: bool) -> None:
    with hosts(2, user=user) as (a, b):
        running = a.start(["sleep", "1000"])
        b.power_off()
        with pytest.raises(AssertionError, match=r"host-1: .* took over 0.1 s"):
            a.run(["sleep", "1000"], timeout_s=0.1)
        with pytest.raises(AssertionError, match=r"host-1: .* ended with 3\nout\n\nerr"):
            a.run(["sh", "-c", "echo out; echo err >&2; exit 3"])
    running.communicate(timeout=TIMEOUT_S)
    assert running.returncode != 0


def test_a_directory_below_tmp_is_seen_only_if_it_is_kept(user: bool) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        (Path(folder) / "file").write_text("kept")
        with hosts(1, user=user) as (a,):
            assert "kept" not in a.run(["sh", "-c", f"cat {folder}/file || :"])
        with hosts(1, [Path(folder)], user=user) as (a,):
            assert a.run(["cat", f"{folder}/file"]) == "kept"


def test_a_cable_that_is_pulled_says_nothing_to_anybody(user: bool) -> None:
    with hosts(3, user=user) as (a, b, c):
        assert reached(a, b)
        b.pull_cable()
        assert silent(a, b) and silent(b, c) and reached(a, c)
        b.plug_in()
        assert reached(a, b) and reached(b, c)


def test_a_network_falls_into_parts_and_heals(user: bool) -> None:
    with hosts(4, user=user) as (a, b, c, d):
        for _ in range(2):
            a.network.partition([a, b], [c, d])
            assert reached(a, b) and reached(c, d) and silent(a, c) and silent(d, b)
            a.network.heal(c, d)
            assert reached(a, c) and reached(d, b)
        a.network.partition([], [b], [c])
        assert reached(a, d) and silent(a, b) and silent(b, c)


def test_a_process_is_killed_and_a_host_loses_its_power(user: bool) -> None:
    with hosts(2, user=user) as (a, b):
        process = b.start(["sh", "-c", "sleep 1000 & echo $!; wait $!; echo $?; exec sleep 1000"])
        before = time.monotonic()
        assert before < b.kill(int(read_line(process, TIMEOUT_S))) < time.monotonic()
        assert read_line(process, TIMEOUT_S) == "137\n"
        assert reached(a, b)
        b.power_off()
        process.communicate(timeout=TIMEOUT_S)
        assert silent(a, b)


def test_a_wire_is_as_slow_as_it_is_told(user: bool) -> None:
    code = """
import socket, sys, time
with socket.create_server((sys.argv[1], 0)) as door:
    print(door.getsockname()[1], flush=True)
    other, _ = door.accept()
    with other:
        began, size = time.monotonic(), 0
        while part := other.recv(1 << 20):
            size += len(part)
    print(size * 8 / (time.monotonic() - began))
"""
    send = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2]))).sendall(bytes(5 * 10**6))"
    with hosts(2, user=user) as (a, b):
        try:
            b.limit_rate(40)
        except Unavailable as unavailable:
            pytest.skip(str(unavailable))
        for sender, taker in ((a, b), (b, a)):
            process = taker.start([sys.executable, "-ISc", code, taker.address])
            port = read_line(process, TIMEOUT_S).strip()
            sender.run([sys.executable, "-ISc", send, taker.address, port])
            rate = float(read_line(process, TIMEOUT_S))
            process.communicate(timeout=TIMEOUT_S)
            assert 5e6 < rate < 60e6


def test_a_host_can_take_its_own_name_for_loopback(user: bool) -> None:
    with hosts(2, user=user, own_name="127.0.1.1") as (a, b):
        for host, other in ((a, b), (b, a)):
            known = host.run(["cat", "/etc/hosts"]).splitlines()
            assert f"127.0.1.1 {host.name}" in known and f"{other.address} {other.name}" in known
