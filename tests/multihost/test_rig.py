"""The rig itself: what it leaves behind, which is nothing, however its creator ends.

That cables, partitions and power cuts strike is shown by the tests of groups that outlive them.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

from tests.multihost.rig import REPO, Unavailable, hosts, read_line

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


def wires() -> set[str]:
    return set(os.listdir("/sys/class/net"))


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
