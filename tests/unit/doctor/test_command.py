"""``raytorchrpc doctor`` as a command, without Ray: exit codes, JSON, one line for what cannot be."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from raytorchrpc.doctor import Report
from tests.programs import run_program
from tests.unit import command_line
from tests.unit.trees import laptop, public_node


def told(tree: Path, *options: str) -> command_line.Ran:
    return command_line.run("doctor", "--sysfs-root", str(tree), *options)


def test_json_is_the_whole_report_and_nothing_else(tmp_path: Path) -> None:
    public_node(tmp_path)
    code, out, err = told(tmp_path, "--json")
    assert (code, err) == (0, "")
    (node,) = json.loads(out)["nodes"]
    assert node["name"] == "node-7"
    assert node["nccl"]["NCCL_IB_GID_INDEX"]["value"] == "3"
    assert {"id": "gpu-links"}.keys() <= node["findings"][0].keys()
    assert Report.model_validate_json(out).healthy()


def test_the_evidence_of_a_report_is_an_evidence_file(tmp_path: Path) -> None:
    public_node(tmp_path / "node")
    _, out, _ = told(tmp_path / "node", "--json")
    first = json.loads(out)["nodes"][0]
    (tmp_path / "copy/proc").mkdir(parents=True)
    (tmp_path / "copy/evidence.json").write_text(json.dumps(first["evidence"]))
    _, out, _ = told(tmp_path / "copy", "--json")
    assert json.loads(out)["nodes"][0] == first


@pytest.mark.parametrize(("strict", "memlock", "shm", "level", "code"), [
    (False, "unlimited", 64 << 30, "note", 0),
    (True, "unlimited", 64 << 30, "note", 0),
    (False, "unlimited", 1 << 20, "warning", 0),
    (True, "unlimited", 1 << 20, "warning", 1),
    (False, "8388608", 64 << 30, "problem", 1),
])  # fmt: skip
def test_exit_codes(tmp_path: Path, strict: bool, memlock: str, shm: int, level: str, code: int) -> None:
    tree = public_node(tmp_path)
    tree.process(uid=1000, ipc_lock=False, memlock=memlock)
    tree.say(shm_total_bytes=shm, endpoint={"shm_free_bytes": shm})
    ran = told(tmp_path, "--json", *["--strict"] * strict)
    assert (ran.exit_code, json.loads(ran.stdout)["level"]) == (code, level)


def test_the_text_says_what_was_seen_what_it_means_and_what_to_do(tmp_path: Path) -> None:
    public_node(tmp_path).process(uid=1000, ipc_lock=False, memlock="8388608")
    code, out, _ = told(tmp_path)
    assert code == 1
    lines = [line.strip() for line in out.splitlines()]
    at = next(number for number, line in enumerate(lines) if line.startswith("problem  memlock-small:"))
    assert lines[at + 1].startswith("means: RDMA locks its buffers")
    assert lines[at + 2].startswith("do: run as root with IPC_LOCK")
    assert any(line.startswith("NCCL_IB_HCA: =mlx5_1:1,") for line in lines)
    assert lines[-1] == "1 problem, 1 note"


def test_lines_fit_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    public_node(tmp_path).process(uid=1000, ipc_lock=False, memlock="8388608")
    shown = {}
    for columns in (80, 120):
        monkeypatch.setenv("COLUMNS", str(columns))
        shown[columns] = told(tmp_path).stdout
    assert max(map(len, shown[80].splitlines())) <= 80 < max(map(len, shown[120].splitlines()))
    assert "".join(shown[80].split()) == "".join(shown[120].split()), "nothing is cut off"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--sysfs-root /nonexistent", "/nonexistent has neither sys nor proc"),
        ("--cluster --sysfs-root /", "exclude each other"),
        ("--cluster --actors a", "exclude each other"),
        ("--actors=,", "names no actor"),
        ("--actors a,b,a", "an actor twice"),
        ("--address 10.0.0.1:6379", "--address requires --cluster or --actors"),
        ("--cluster --timeout 0", "--timeout must be a number of seconds"),
        ("--cluster --address 127.0.0.1:1", "no Ray cluster answers at 127.0.0.1:1"),
        ("--cluster --address local", "name one that runs"),
    ],
)
def test_bad_usage_is_one_line_and_code_2(options: str, words: str) -> None:
    code, out, err = command_line.run("doctor", *options.split())
    assert (code, out) == (2, "")
    assert words in err and err.startswith("raytorchrpc doctor: ") and err.count("\n") == 1


WITHOUT = """
import runpy, sys
for name in ("rich", "typer", "click", "pynvml"):
    sys.modules[name] = None  # as if it were not installed
sys.argv = ["doctor", "--json", "--sysfs-root", sys.argv[1]]
runpy.run_module("raytorchrpc.doctor", run_name="__main__")
"""


@pytest.mark.parametrize("module", ["raytorchrpc.doctor", "raytorchrpc.cli doctor"])
def test_a_reader_that_closes_the_pipe_ends_it_without_a_word(module: str, tmp_path: Path) -> None:
    laptop(tmp_path)
    reads, writes = os.pipe()
    os.close(reads)
    ran = run_program("-m", *module.split(), "--sysfs-root", str(tmp_path), stdout=writes)
    os.close(writes)
    assert (ran.returncode, ran.stderr) == (1, "")


def test_the_module_runs_without_typer_and_rich(tmp_path: Path) -> None:
    laptop(tmp_path)
    ran = run_program("-c", WITHOUT, str(tmp_path))
    assert (ran.returncode, ran.stderr) == (0, "")
    assert json.loads(ran.stdout)["level"] == "note"
