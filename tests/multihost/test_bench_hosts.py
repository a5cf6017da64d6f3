"""``raytorchrpc bench --hosts``: the command itself, run on one of two hosts, measures what crosses the wire."""

from __future__ import annotations

import sys

import pytest

from raytorchrpc.bench.results import Result
from tests.multihost.rig import Host

pytestmark = pytest.mark.multihost

ROWS = ("raytorchrpc", "torchrpc-TCP", "nng-TCP", "ray", "bare-socket")
SIZE = 10_000_000


def test_bench_measures_between_two_hosts(two_hosts: tuple[Host, Host]) -> None:
    a, b = two_hosts
    command = [sys.executable, "-m", "raytorchrpc.cli", "bench", "--device=cpu", f"--rows={','.join(ROWS)},shm"]
    command += [f"--sizes={SIZE}", "--budget=90", f"--address={a.address}:6379", "--json=/tmp/run.json"]
    before = a.sent_bytes()
    a.run([*command, "--hosts", a.address, b.name], 150, {"RAY_AUTH_MODE": "disabled"})
    sent = a.sent_bytes() - before
    result = Result.model_validate_json(a.run(["cat", "/tmp/run.json"]))
    assert result.title == "Between two hosts"
    figures = {figure.contestant: figure for figure in result.figures}
    for row in ROWS:
        assert figures[row].median is not None, figures[row].reason
    assert figures["shm"].reason == "needs both ends on one host"
    samples = 2 * sum(figures[row].turns for row in ROWS)  # at least
    assert sent > SIZE * samples, "every sample of every contestant crossed"
