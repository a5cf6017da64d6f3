"""torch's own RPC suite passes between members; see ``torch_suite``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Tests of init_rpc and shutdown, of groups beside the members', of GPUs, and those that torch leaves out itself.
MOST_SKIPPED = 28


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_torchs_rpc_suite_passes_between_members() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.ray.torch_suite"], cwd=ROOT, capture_output=True, text=True, timeout=1400
    )
    results = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("[")]
    assert results, ran.stdout + ran.stderr
    failed = {name: (what, detail) for name, what, detail, _ in results if what not in ("passed", "skipped")}
    skipped = {name: detail for name, what, detail, _ in results if what == "skipped"}
    assert not failed, "\n".join(f"{name}: {what}: {detail}" for name, (what, detail) in failed.items())
    assert len(skipped) <= MOST_SKIPPED, skipped
    assert len(results) - len(skipped) >= 424
    assert ran.returncode == 0, ran.stderr
