"""The programs that tests run as forks: see ``tests.programs``."""

from __future__ import annotations

import os

from tests.programs import run_program

AT_EXIT = """
import atexit, os

fds = [os.dup(0) for _ in range({count})]
atexit.register(lambda: print([fd for fd in fds if not os.path.exists(f"/proc/self/fd/{{fd}}")]))
"""


def test_a_program_keeps_its_descriptors_until_it_has_ended() -> None:
    """Numbers that the template has used are free for it: one that was closed there stopped torch's event loop."""
    count = max(map(int, os.listdir("/proc/self/fd"))) + 64
    ended = run_program("-c", AT_EXIT.format(count=count))
    assert (ended.returncode, ended.stdout.strip(), ended.stderr) == (0, "[]", "")
