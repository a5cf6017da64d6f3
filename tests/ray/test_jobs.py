"""The example job on a real head with its job server and token authentication."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import raytorchrpc as rtr
from tests.ray.heads import ROOT, Head, head

pytest.importorskip("aiohttp", reason="jobs need ray[default]: pip install '.[jobs]' in a checkout")

SUCCESS = re.compile(r"^JOB OK: \d members on 1 node\(s\)", re.MULTILINE)


@pytest.fixture(scope="module")
def jobs() -> Iterator[Head]:
    with head() as started:
        yield started


def submit(jobs: Head, *options: str, **variables: str | None) -> tuple[int, str, str]:
    ran = jobs.run("submit.py", "--address", jobs.address, *options, **variables)
    return ran.returncode, ran.stdout, ran.stderr


def test_a_submitted_job_succeeds_tuned_by_its_environment_alone(jobs: Head) -> None:
    """The package travels along, and RAYTORCHRPC_* of the job reaches the driver and the members."""
    tuned = ("--env", "RAYTORCHRPC_RPC_TIMEOUT_S=33", "--env", "RAYTORCHRPC_LANES=socket,torchrpc")
    code, out, err = submit(jobs, *tuned, "--", "python", "train.py", "--workers", "1")
    assert code == 0, out + err
    assert SUCCESS.search(out) and out.rstrip().endswith("SUCCEEDED")
    assert "torchrpc" in out and "shm" not in out
    seen = re.findall(r"worker \d: rpc_timeout_s=(\S+) raytorchrpc from (\S+)", out)
    assert [timeout_s for timeout_s, _ in seen] == ["33"]
    assert "py_modules" in seen[0][1], "the workers found it elsewhere"


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("options", "variables", "message"),
    [
        (
            ["--address", "http://127.0.0.1:9"],
            {},
            r"no Ray job server answers at http://127\.0\.0\.1:9: .*ray\[default\]",
        ),
        ([], {"RAY_AUTH_TOKEN": None, "HOME": "/nonexistent"}, r"refused access .*RAY_AUTH_TOKEN"),
        slow(["--address", "head:8265"], {}, r"--address head:8265: not the address of a dashboard"),
        slow([], {"RAY_AUTH_TOKEN": "f" * 64}, r"refused access .*invalid"),
        slow(["--package", "nothing.whl"], {}, r"--package nothing\.whl: cannot be read as a wheel"),
        slow(["--package", "/"], {}, r"--package /: neither the package's folder"),
        slow(["--env", "=1"], {}, r"env_vars: ''"),
    ],
)
def test_bad_input_gets_one_line(
    jobs: Head, options: list[str], variables: dict[str, str | None], message: str
) -> None:
    code, out, err = submit(jobs, *options, **variables)
    lines = [line for line in err.splitlines() if "WARNING" not in line]
    assert code == 1 and len(lines) == 1, out + err
    assert lines[0].startswith("submit.py: ") and re.search(message, lines[0]), err


def isolated(commands: str) -> subprocess.CompletedProcess[str]:
    """Runs a script of bash in the checkout, with a network and processes of its own."""
    spaces = ["unshare", "--map-root-user", "--net", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if subprocess.run([*spaces, "true"], capture_output=True).returncode:
        pytest.skip("needs the right to create namespaces")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTEST", "PYTHON"))}
    with tempfile.TemporaryDirectory(prefix="rtr-") as folder:  # Ray's sockets lie in it, so its path has to be short
        programs = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', os.defpath)}"
        environment = {**kept, "PATH": programs, "PYTHONPATH": str(ROOT), "RAY_TMPDIR": folder}
        return subprocess.run(
            [*spaces, "bash", "-euc", f"ip link set lo up\n{commands}"],
            cwd=ROOT,
            env={**environment, "RAY_USAGE_STATS_ENABLED": "0"},
            capture_output=True,
            text=True,
            timeout=250,
        )


@pytest.mark.slow
def test_the_commands_of_the_page_submit_a_job() -> None:
    """As printed, with Ray's own ports, in namespaces of their own; the cluster ends with them."""
    page = (ROOT / "docs" / "jobs.md").read_text(encoding="utf-8")
    (commands,) = [block for block in re.findall(r"^```console\n(.*?)^```$", page, re.M | re.S) if "ray start" in block]
    assert len(commands.splitlines()) == 4
    ran = isolated(commands)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert SUCCESS.search(ran.stdout) and ran.stdout.rstrip().endswith("SUCCEEDED")


@pytest.mark.slow
def test_ray_job_submit_with_a_wheel(jobs: Head, tmp_path: Path) -> None:
    """The command line of Ray's own, with what ``--show`` prints; the package from a wheel."""
    wheel = tmp_path / "raytorchrpc-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in sorted((ROOT / "raytorchrpc").rglob("*.py")):
            archive.write(path, path.relative_to(ROOT))
    code, out, err = submit(jobs, "--package", str(wheel), "--", "python", "train.py", "--steps", "10")
    assert code == 0 and SUCCESS.search(out), out + err
    shown = jobs.run("submit.py", "--show")
    environment = json.loads(shown.stdout)
    assert environment["py_modules"] == [str(Path(rtr.__file__).parent)]
    assert environment["env_vars"]["IBV_FORK_SAFE"] == "1"
    ray = str(Path(sys.executable).parent / "ray")
    ran = jobs.run(
        *(ray, "job", "submit", "--address", jobs.address),
        *("--runtime-env-json", shown.stdout, "--", "python", "train.py"),
    )
    assert ran.returncode == 0 and SUCCESS.search(ran.stdout), ran.stdout + ran.stderr
    assert "succeeded" in ran.stdout


@pytest.mark.slow
def test_a_job_that_fails_says_so(jobs: Head) -> None:
    code, out, _ = submit(jobs, "--", "python", "train.py", "--workers", "0")
    assert code == 1 and "--workers must be at least 1" in out and out.rstrip().endswith("FAILED")


@pytest.mark.slow
def test_a_data_parallel_job(jobs: Head) -> None:
    code, out, err = submit(jobs, "--", "python", "ddp.py", "--steps", "15")
    assert code == 0, out + err
    assert re.search(r"^gloo: worker_0 is rank 0, worker_1 is rank 1$", out, re.MULTILINE)
    assert re.search(r"^JOB OK: 2 ranks over gloo", out, re.MULTILINE)
