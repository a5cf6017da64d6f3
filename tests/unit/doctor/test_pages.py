"""``docs/reference/findings.md`` lists every finding as the code does, and ``docs/rdma.md`` names those that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import yaml

from raytorchrpc.topology import nccl_env
from tests.unit.doctor.pages import FINDINGS
from tests.unit.sources import parse

ROOT = Path(__file__).parents[3]
FINDINGS_PAGE = (ROOT / "docs" / "reference" / "findings.md").read_text(encoding="utf-8")
RDMA = (ROOT / "docs" / "rdma.md").read_text(encoding="utf-8")
#: Functions that make a finding, and the position of its id in their arguments.
ADDERS = {"ok": 0, "note": 0, "warning": 0, "problem": 0, "finding": 1}


def test_the_table_of_findings_is_that_of_the_code() -> None:
    said: dict[str, set[str]] = {}
    for file in (ROOT / "raytorchrpc" / "doctor").glob("*.py"):
        for node in ast.walk(parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ADDERS:
                name = node.args[ADDERS[node.func.id]]
                assert isinstance(name, ast.Constant), f"{file.name}: an id is written out"
                said.setdefault(name.value, set()).add(node.func.id)
    assert said.keys() == FINDINGS.keys()
    for name, adders in said.items():
        assert adders - {"finding"} <= FINDINGS[name], f"docs/reference/findings.md lists other levels for {name}"


def test_the_page_tells_of_every_variable_of_nccls() -> None:
    for name in nccl_env.VARIABLES:
        assert re.search(rf"^\| `{name}` \|", FINDINGS_PAGE, re.MULTILINE), name


def test_a_finding_that_is_named_in_the_page_on_rdma_exists() -> None:
    named = set(re.findall(r"`((?:rdma|gpu|memlock|fork|together|nccl|shm|nixl)-[a-z-]+)`", RDMA))
    assert named and named <= set(FINDINGS)


def test_each_gap_of_tensorpipe_has_its_findings_and_its_test() -> None:
    page = (ROOT / "docs" / "internals.md").read_text(encoding="utf-8")
    gaps = page.split("## Where TensorPipe alone fails")[1].split("\n## ")[0].split("\n### ")[1:]
    assert len(gaps) == 5
    promises = yaml.safe_load((ROOT / "docs" / "promises.yml").read_text(encoding="utf-8"))["internals.md"]
    shown = {entry["promise"]: entry["tests"] for entry in promises["Where TensorPipe alone fails"]}
    for gap in gaps:
        assert re.search(r"^- Findings?: `", gap, re.MULTILINE), gap
        (test,) = shown[gap.partition("\n")[0]]
        assert test.startswith("tests/unit/topology/test_rdma.py::")
