"""What the package imports is declared in pyproject.toml: by itself, or by the extra that the importing file needs."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from raytorchrpc._compat import requirements
from tests.unit.sources import parse

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
VERSIONS = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")

#: Distributions that have another name than what is imported.
DISTRIBUTIONS = {"ale_py": "ale-py", "monarch": "torchmonarch", "pynvml": "nvidia-ml-py", "sklearn": "scikit-learn"}
DISTRIBUTIONS["yaml"] = "pyyaml"
#: The extra that a file, or a folder of files, is there for; the longest name that fits. All others: none.
NEEDS = {
    "raytorchrpc/bench": "bench",
    "raytorchrpc/bench/actors.py": "peers",
    "raytorchrpc/cli": "cli",
    "raytorchrpc/cli/bench.py": "bench",
    "raytorchrpc/manifest.py": "cli",
    "examples/atari_dqn": "atari",
    "examples/digits.py": "demo",
    "examples/ray_data.py": "data",
    "examples/grpo_vllm.py": "llm",
    "examples/rl_post_training.py": "llm",
    "examples/serving.py": "serve",
}
#: Imports that a file does without, having looked for the package first.
DONE_WITHOUT = {
    ("examples/grpo_vllm.py", "vllm"),
    ("raytorchrpc/doctor/collector.py", "pynvml"),
    ("raytorchrpc/lanes/common/protection.py", "cryptography"),
}
#: Extras whose packages are found by name, or that only widen what another package brings.
FOUND_BY_NAME = {"nixl": "nixl", "jobs": "ray", "data": "ray", "serve": "ray"}

FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("raytorchrpc", "examples")
    for path in (ROOT / folder).rglob("*.py")
)


def distributions(requirements: list[str]) -> set[str]:
    """Names alone; an extra of this project stands for what it asks for."""
    found: set[str] = set()
    for requirement in requirements:
        own = re.match(r"raytorchrpc\[([\w,]+)\]", requirement)
        if own is not None:
            found.update(*(distributions(EXTRAS[extra]) for extra in own[1].split(",")))
        else:
            found.add(re.split(r"[^\w-]", requirement)[0].lower())
    return found


def imports(file: str) -> set[str]:
    """Packages of others that a file imports anywhere, also when a function of it runs."""
    found: set[str] = set()
    for node in ast.walk(parse((ROOT / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module is not None:
            found.add(node.module.partition(".")[0])
    own = {"raytorchrpc", "examples", *(path.stem for path in (ROOT / file).parent.glob("*.py"))}
    return found - sys.stdlib_module_names - own


#: What a package of raytorchrpc/integrations itself requires.
BROUGHT = {
    "torchrl": {"tensordict"},
    "trl": {"accelerate"},
    "vllm": {"safetensors"},
    "adapters": {"peft"},
    "transferqueue": {"transfer_queue", "tensordict", "omegaconf"},
}


def plugged_into(file: str) -> set[str]:
    """The package that loads a file of raytorchrpc/integrations, so that it is there, with what it requires."""
    found = re.match(r"raytorchrpc/integrations/(\w+)", file)
    return {found[1], *BROUGHT.get(found[1], ())} if found is not None else set()


def declared_for(file: str) -> set[str]:
    fitting = [name for name in NEEDS if file == name or file.startswith(f"{name}/")]
    extra = EXTRAS[NEEDS[max(fitting, key=len)]] if fitting else []
    return distributions([*PROJECT["dependencies"], *extra])


@pytest.mark.parametrize("file", FILES)
def test_what_a_file_imports_is_declared(file: str) -> None:
    wanted = {name: DISTRIBUTIONS.get(name, name) for name in imports(file) if (file, name) not in DONE_WITHOUT}
    there = declared_for(file) | plugged_into(file)
    undeclared = {name for name, distribution in wanted.items() if distribution not in there}
    assert not undeclared, f"{file} imports {undeclared}, which pyproject.toml does not declare for it"


def test_what_is_declared_is_imported() -> None:
    used = {DISTRIBUTIONS.get(name, name) for file in FILES for name in imports(file)} | set(FOUND_BY_NAME.values())
    assert distributions(PROJECT["dependencies"]) <= used
    for extra in EXTRAS:
        assert distributions(EXTRAS[extra]) <= used, f"the extra {extra} asks for what nothing imports"


def test_ci_runs_on_the_versions_that_are_declared_and_documented() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    row = r'name: (\w+), python: "([\d.]+)", torch: "torch==([\d.]+)\.\*", ray: "ray==([\d.]+)\.\*"'
    bounds = dict(each.split(">=") for each in PROJECT["dependencies"])
    oldest, middle = re.findall(row, workflow)
    assert oldest == ("oldest", PROJECT["requires-python"].removeprefix(">="), bounds["torch"], bounds["ray"])
    assert {"torch": bounds["torch"], "Ray": bounds["ray"]} == requirements.OLDEST
    for run in (oldest, middle):
        assert f"| {' | '.join(run)} |" in VERSIONS


def test_the_page_on_installing_lists_what_needs_a_newer_one() -> None:
    section = VERSIONS.split("## What needs a newer release")[1].partition("\n## ")[0]
    listed = section.split("|---|---|---|")[1]
    lines = [re.sub(r"`|\[|\]\([^)]*\)", "", line).strip("| ") for line in listed.splitlines() if "|" in line]
    features = requirements.FEATURES.values()
    assert [line.split(" | ") for line in lines] == [[e.name, f"{e.package} {e.since}", e.otherwise] for e in features]


def test_an_extra_is_installed_from_a_checkout() -> None:
    """The package is on no index: ``pip install 'raytorchrpc[cli]'`` would fail, or install somebody else's."""
    shown = set()
    for file in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *map(ROOT.joinpath, FILES)):
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"pip install \S*raytorchrpc\b(?!-\*\.whl)", text), file
        shown.update(*(extras.split(",") for extras in re.findall(r"pip install '\.\[([\w,]+)\]'", text)))
    assert {"cli", "jobs", "nixl"} <= shown <= EXTRAS.keys()
