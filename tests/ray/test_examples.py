"""The examples do what their last line says: most in this process and its Ray, some as scripts, as a user runs them."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from examples import parameter_server, ray_data, rl_post_training
from tests.programs import run_program

ROOT = Path(__file__).parents[2]
NAMES = (
    *("async_actors", "digits", "kv_cache", "parameter_server", "pipeline_training", "ray_data"),
    *("rl_collectors", "rl_post_training", "torch_parameter_server", "torch_rl"),
)


#: What a group that forms logs while it waits for its members, whose processes start slowly on a busy machine.
NOTICE = re.compile(r"^group '\w+', after \d+ s, .*waits for .*\n", re.MULTILINE)


def script(name: str, *options: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """How an example ended; its errors without such notices."""
    path, environ = str(ROOT / "examples" / f"{name}.py"), {**os.environ, **environ}
    ran = run_program(path, *options, env=environ, timeout=250)
    ran.stderr = NOTICE.sub("", ran.stderr)
    return ran


def pipeline_autograd(*options: str) -> dict[str, Any]:
    ran = script("pipeline_autograd", "--json", *options)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    figures: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return figures


# --- in this process, which has a Ray already ------------------------------------------------------------------------


@pytest.mark.usefixtures("cluster")
def test_a_parameter_server_learns_from_stale_gradients() -> None:
    result = parameter_server.main(["--workers", "3", "--steps", "70"])
    assert result.accuracy >= 0.9 and result.last_loss < result.first_loss / 2
    assert result.staleness.total() == 210
    assert max(result.staleness) >= 1, "the workers took turns"


@pytest.mark.parametrize("name", NAMES)
def test_help_and_bad_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    main = importlib.import_module(f"examples.{name}").main
    with pytest.raises(SystemExit) as shown:
        main(["--help"])
    assert shown.value.code == 0 and "--" in capsys.readouterr().out
    count = {"async_actors": "--calls", "ray_data": "--rows", "kv_cache": "--tokens", "rl_collectors": "--updates"}
    count["torch_rl"] = "--episodes"
    with pytest.raises(SystemExit) as refused:
        main([count.get(name, "--steps"), "0"])
    assert refused.value.code == 2 and "must be at least" in capsys.readouterr().err


def test_an_example_that_lacks_packages_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_data, "find_spec", lambda name: None if name == "pyarrow" else object())
    with pytest.raises(SystemExit, match=r"^ray_data: Ray Data needs pyarrow: pip install '\.\[data\]' in a checkout$"):
        ray_data.main([])


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_short_and_says_how_it_is_run(name: str) -> None:
    text = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) < (300 if name in ("digits", "rl_post_training") else 180)
    assert text.count(f"\n    python examples/{name}.py ") == 2, "the whole and the short form"
    assert f"`{name}.py`" in (ROOT / "examples" / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow  # each of five processes imports transformers
@pytest.mark.usefixtures("cluster")
def test_the_reward_rises_though_a_generator_is_killed(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", reason="the example needs transformers: pip install '.[llm]'")
    result = rl_post_training.main(["--quick"])
    lines = capsys.readouterr().out.splitlines()
    rewards = [step.reward for step in result.steps]
    assert len(rewards) == 12 and sum(rewards[-3:]) > 2 * sum(rewards[:3])
    assert [step.version for step in result.steps] == list(range(2, 14))
    survivor, restarted = result.versions
    # The survivor pulls once more in the new process group, so it may use one version twice.
    assert survivor == sorted(survivor) and set(restarted) <= set(survivor)
    assert len(set(restarted)) == len(restarted) and restarted[0] > survivor[0] == 1
    changes = [line.strip() for line in lines if line.startswith(" ")]
    assert changes == ["generator_1: lost", "generator_1: back"]
    assert lines[-1].startswith("checked: the reward rose from ")
    assert lines[-1].endswith(f"generator_1 rejoined with version {restarted[0]}")


# --- as scripts ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["decode_0", "prefill_0"])
def test_serving_goes_on_without_a_replica(killed: str) -> None:
    pytest.importorskip("starlette", reason="Ray Serve is not installed: pip install '.[serve]'")
    ran = script("serving", "--at-once", "4", "--kill", killed)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(r"; [1-9]\d* times another replica took over\nchecked: 24 answers of 24 tokens ", ran.stdout)


def async_rl(*options: str, **environ: str) -> str:
    ran = script("async_rl/train", *options, **environ)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(r"^checked: the reward is (1\.00|0\.[89]\d), at least 0\.8$", ran.stdout, re.MULTILINE)
    return ran.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_asynchronous_learning_goes_on_from_a_checkpoint_without_an_environment(tmp_path: Path) -> None:
    options = ("--checkpoint", str(tmp_path / "run.pt"), "--updates")
    address = ray.get_runtime_context().gcs_address
    assert "one was killed, and is back" in async_rl(*options, "40", RAY_ADDRESS=address)
    resumed = async_rl(*options, "10", "--kill-at", "0", RAY_ADDRESS=address)
    assert re.match(r"update 50: reward (1\.00|0\.[89]\d), ", resumed), "it had to learn anew"


@pytest.mark.slow
def test_asynchronous_learning_on_two_nodes() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        out = async_rl("--nodes", "2", "--kill-at", "0", "--updates", "40", RAY_ADDRESS=cluster.address)
        assert "5 members on 2 node(s)" in out
    finally:
        cluster.shutdown()


@pytest.mark.gpu(2)
def test_pipeline_between_two_gpus_is_four_times_faster_than_staged() -> None:
    figures = pipeline_autograd("--rounds", "10", "--repeats", "5")
    assert figures["gpu"] and figures["gradients_match"]
    assert figures["device_map"] == {"0": 0}
    assert figures["ratio"] >= 4, figures


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_example_runs_as_it_is(name: str) -> None:
    """In a Ray of its own, in the short form that it names."""
    if name == "ray_data" and any(find_spec(package) is None for package in ("numpy", "pandas", "pyarrow")):
        pytest.skip("Ray Data is not installed: pip install '.[data]'")
    if name == "digits" and find_spec("sklearn") is None:
        pytest.skip("scikit-learn is not installed: pip install '.[demo]'")
    if name == "rl_post_training" and find_spec("transformers") is None:
        pytest.skip("transformers is not installed: pip install '.[llm]'")
    text = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    (short,) = re.findall(rf"python examples/{name}.py (.*?) +# the short form", text)
    ran = script(name, *short.split())
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stdout + ran.stderr
    assert ran.stdout.splitlines()[-1].startswith("checked: ")
