"""A job that is submitted to a cluster of two hosts, with token authentication: its tensors cross the wire."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="jobs need ray[default]: pip install '.[jobs]' in a checkout")

from tests.multihost.conftest import given
from tests.multihost.rig import REPO, Host

pytestmark = [pytest.mark.multihost, pytest.mark.slow]

JOB = str(REPO / "examples" / "job")
TOKEN = "fedcba9876543210" * 4
STEPS = 20
#: Of one pull or push: the weights of the example's model.
BYTES = 4 * (256 * 2048 + 2048 + 2048 + 1)


@pytest.mark.parametrize("how", [{}, {"own_name": "127.0.1.1"}], ids=["plain", "debian"])
def test_a_submitted_job_moves_its_tensors_between_hosts(how: dict[str, Any]) -> None:
    """From the host that is not the head, as from a laptop: by Ray's own command line, by Python, and with DDP."""
    with given(2, token=TOKEN, **how) as (head, other):
        let_in = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
        server = f"http://{head.address}:8265"
        environment = other.run(["python", f"{JOB}/submit.py", "--show"], env=let_in)
        assert "py_modules" in json.loads(environment)
        before = head.sent_bytes(), other.sent_bytes()
        command = ["ray", "job", "submit", "--address", server, "--runtime-env-json", environment, "--working-dir", JOB]
        log = other.run([*command, "--", "python", "train.py", "--steps", str(STEPS)], 120, let_in)
        assert "succeeded" in log
        crossed = _crossed(log)
        sent = [now - then for now, then in zip((head.sent_bytes(), other.sent_bytes()), before, strict=True)]
        # One worker at least is not on the learner's host; each of its steps pulls the weights and pushes gradients.
        assert crossed >= 2 * STEPS * BYTES
        assert sum(sent) >= crossed and min(sent) >= STEPS * BYTES

        log = _submit(other, server, let_in, "train.py", "--workers", "1")
        assert log.rstrip().endswith("SUCCEEDED") and _crossed(log) >= 2 * STEPS * BYTES
        log = _submit(other, server, let_in, "ddp.py")
        assert re.search(r"^JOB OK: 2 ranks over gloo", log, re.MULTILINE), log


def _submit(host: Host, server: str, env: dict[str, str], *command: str) -> str:
    return host.run(["python", f"{JOB}/submit.py", "--address", server, "--", "python", *command], 120, env)


def _crossed(log: str) -> int:
    found = re.search(r"^JOB OK: \d members on 2 node\(s\), (\d+) bytes", log, re.MULTILINE)
    assert found, log
    return int(found[1])
