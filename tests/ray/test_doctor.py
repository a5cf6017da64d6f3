"""``raytorchrpc doctor`` on a Ray cluster: every node, and inside actors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray

from raytorchrpc.doctor.collector import collect_from_actors
from raytorchrpc.doctor.examination import make_report
from raytorchrpc.errors import BootstrapError, ConfigurationError
from tests.insides import in_actor
from tests.ray.actors import Latch, Peer
from tests.ray.commands import ROOT, Command
from tests.ray.conftest import Spawn
from tests.releases import needs


@pytest.fixture
def doctor() -> Iterator[Command]:
    doctor = Command("doctor")
    yield doctor
    doctor.end()


def test_the_command_looks_on_every_node_by_a_process_of_its_own(cluster: None, doctor: Command) -> None:
    code, out, err = doctor.run("--cluster", "--address", ray.get_runtime_context().gcs_address, "--json")
    assert code == 0, out + err
    report = json.loads(out)
    (node,) = report["nodes"]
    (known,) = ray.nodes()
    assert node["name"] == known["NodeManagerHostname"]
    evidence = node["evidence"]
    assert evidence["endpoint"]["node_ip"] == known["NodeManagerAddress"]
    assert (evidence["live"], evidence["hosts"], evidence["ray_version"]) == (True, 1, ray.__version__)
    assert evidence["endpoint"]["pid"] != os.getpid()
    assert report["together"] == []


def test_actors_are_looked_at_from_inside(spawn: Spawn, latch: Callable[[], Latch]) -> None:
    variables = {"IBV_FORK_SAFE": "1", "NCCL_IB_TIMEOUT": "23"}
    in_actor(spawn(Peer, name="learner", namespace="training"), lambda: os.environ.update(variables))
    busy = spawn(Peer, name="busy")
    learner, other = evidence = collect_from_actors(["training/learner", "busy"], 60)
    assert [each.endpoint.name for each in evidence] == ["training/learner", "busy"]
    assert learner.environment["IBV_FORK_SAFE"] == "1" and "IBV_FORK_SAFE" not in other.environment
    assert learner.nccl["NCCL_IB_TIMEOUT"] == "23"
    assert other.endpoint.pid == ray.get(busy.run.remote(os.getpid)) != learner.endpoint.pid
    routes = {each.id: each.seen for each in make_report(evidence, "").together}
    assert "training/learner - busy: calls: socket (unix socket); cpu: shm" in routes["together-routes"]

    (found,) = collect_from_actors(["learner"], 60)  # there is one of that name, in whatever namespace
    assert found.endpoint.pid == learner.endpoint.pid
    with pytest.raises(ConfigurationError, match="no actor 'elsewhere/learner'; actors of that name: training/learner"):
        collect_from_actors(["elsewhere/learner"], 60)
    with pytest.raises(ConfigurationError, match="no actor 'trainer'"):
        collect_from_actors(["busy", "trainer"], 60)

    gate = latch()
    working = busy.busy.remote(gate)
    with pytest.raises(BootstrapError, match=r"actor 'busy': no answer within [\d.]+ s \(a sync actor answers between"):
        collect_from_actors(["busy"], 0.5)
    gate.open()
    ray.get(working)


@pytest.mark.slow
@needs("token")
def test_no_token_is_one_line_and_code_2(cluster: None, tmp_path: Path) -> None:
    """In a Python of its own, as Ray decides once in a process whether it sends a token."""
    command = [sys.executable, "-m", "raytorchrpc.cli", "doctor", "--cluster", "--address"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")}
    env = {**kept, "HOME": str(tmp_path), "RAY_AUTH_MODE": "token"}
    ran = subprocess.run(
        [*command, ray.get_runtime_context().gcs_address], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert (ran.returncode, ran.stdout) == (2, ""), ran.stderr
    last = ran.stderr.splitlines()[-1]
    assert last.startswith("raytorchrpc doctor: ") and "oken" in last
