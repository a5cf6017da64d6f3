from __future__ import annotations

import json
import os
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from ray.runtime_env import RuntimeEnv

import raytorchrpc as rtr
from tests.conformance.peers import Process

#: What a member's process needs before torch loads.
OURS = {
    "THP_MEM_ALLOC_ENABLE": "1",
    "MALLOC_MMAP_THRESHOLD_": "33554432",
    "MALLOC_TRIM_THRESHOLD_": "67108864",
    "IBV_FORK_SAFE": "1",
    "RDMAV_FORK_SAFE": "1",
}


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OURS:
        monkeypatch.delenv(name, raising=False)


def test_alone_it_holds_the_variables_and_nothing_else() -> None:
    assert rtr.runtime_env() == {"env_vars": OURS}


def test_it_joins_the_users_own_and_leaves_what_it_was_given_alone(tmp_path: Path) -> None:
    given = {"env_vars": {"MINE": "x"}, "working_dir": str(tmp_path), "pip": ["einops"]}
    before = pickle.dumps(given)
    made = rtr.runtime_env(**given)
    assert made == {**given, "env_vars": {**OURS, "MINE": "x"}}
    made["env_vars"]["LATER"] = "y"
    assert pickle.dumps(given) == before
    assert "LATER" not in rtr.runtime_env()["env_vars"]


def test_an_imported_module_stands_for_its_folder_or_file() -> None:
    given = [rtr, rtr.errors, "https://host/code.zip"]
    made = rtr.runtime_env(py_modules=given)["py_modules"]
    folder = str(Path(rtr.__file__).parent)
    assert made == [folder, f"{folder}/errors.py", "https://host/code.zip"] and given[0] is rtr
    assert json.loads(json.dumps(made)) == RuntimeEnv(py_modules=made)["py_modules"], "a job takes it too"
    with pytest.raises(rtr.ConfigurationError, match=r"py_modules: 'sys' is in no file: pass the path"):
        rtr.runtime_env(py_modules=[sys])


def test_what_the_user_chose_stays_and_what_this_process_has_goes_along(monkeypatch: pytest.MonkeyPatch) -> None:
    without = {**OURS, "THP_MEM_ALLOC_ENABLE": "0"}
    assert rtr.runtime_env(env_vars={"THP_MEM_ALLOC_ENABLE": "0"})["env_vars"] == without
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    assert rtr.runtime_env()["env_vars"] == without
    assert rtr.runtime_env(env_vars={"THP_MEM_ALLOC_ENABLE": "1"})["env_vars"] == OURS, "an argument comes first"


def runtime_env_in(variables: dict[str, str]) -> dict[str, Any]:
    os.environ.update(variables)
    return rtr.runtime_env()


def test_what_a_submitted_job_has_is_left_to_ray() -> None:
    """In a process of its own: what Ray, where it runs, says of this one would come first."""
    job = {"runtime_env": {"env_vars": {"THP_MEM_ALLOC_ENABLE": "0"}}, "metadata": {}}
    process = Process()
    try:
        made = process.run(
            runtime_env_in, {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(job), "THP_MEM_ALLOC_ENABLE": "0"}
        )
    finally:
        process.kill()
    assert made == {"env_vars": {name: value for name, value in OURS.items() if name != "THP_MEM_ALLOC_ENABLE"}}


def test_it_pickles_and_is_json_and_ray_takes_it(tmp_path: Path) -> None:
    made = rtr.runtime_env(working_dir=str(tmp_path), excludes=["*.pt"], config={"setup_timeout_seconds": 60})
    assert type(made) is dict
    assert pickle.loads(pickle.dumps(made)) == made == json.loads(json.dumps(made))
    assert RuntimeEnv(**made)["env_vars"] == OURS


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"env_vars": {"A": 1}}, "env_vars.*value 1 "),
        ({"env_vars": {2: "a"}}, "env_vars.*key 2 "),
        ({"env_vars": "A=1"}, "env_vars.*str"),
        ({"env_vars": {"A=B": "1"}}, "env_vars: 'A=B'"),
        ({"env_vars": {"": "1"}}, "env_vars: ''"),
        ({"env_vars": {"A": "x\0y"}}, r"env_vars: 'A': 'x\\x00y'"),
        ({"evn_vars": {"A": "1"}}, "no field 'evn_vars'; known: .*env_vars.*working_dir"),
        ({"working_dir": 5}, "working_dir"),
        ({"working_dir": "/no/such/directory", "env_vars": {}}, "runtime_env: working_dir: /no/such/directory"),
        ({"py_modules": [3]}, "runtime_env: py_modules: "),
        ({"pip": ["a"], "conda": "b"}, "(?s)'pip'.*'conda'"),
    ],
)
def test_bad_input_is_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(rtr.ConfigurationError) as caught:
        rtr.runtime_env(**fields)
    assert re.search(named, str(caught.value)), caught.value
