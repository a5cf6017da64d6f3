"""``raytorchrpc manifest``: what it writes is what KubeRay takes, and bad input gets one line."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from raytorchrpc.manifest import ClusterOptions, JobOptions, build, to_yaml
from raytorchrpc.runtime_env import DEFAULTS
from tests.unit import command_line
from tests.unit.manifests import BASE, IMAGE, RDMA, SAMPLES, everything

ROOT = Path(__file__).parents[3]
SCHEMA = json.loads((Path(__file__).parents[1] / "data" / "kuberay_v1.json").read_text())
JOB = {**BASE, "entrypoint": "python train.py"}


def check(manifest: dict[str, Any]) -> None:
    assert manifest["apiVersion"] == "ray.io/v1"
    jsonschema.Draft202012Validator(SCHEMA[manifest["kind"]]).validate(manifest)


def worker(manifest: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The worker's pod and its container."""
    spec = manifest["spec"].get("rayClusterSpec", manifest["spec"])
    pod = spec["workerGroupSpecs"][0]["template"]["spec"]
    return pod, pod["containers"][0]


def command(*words: str) -> tuple[int, str, str]:
    ran = command_line.run("manifest", *words)
    return ran.exit_code, ran.stdout, ran.stderr


@pytest.mark.parametrize("kind", ["RayJob", "RayCluster"])
def test_what_is_made_fits_the_schema_and_survives_yaml(kind: str) -> None:
    for manifest in everything(kind):
        check(manifest)
        assert manifest["kind"] == kind
    options = JobOptions(**JOB) if kind == "RayJob" else ClusterOptions(**BASE)
    assert yaml.safe_load(to_yaml(options)) == build(options)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["spec", "entryPoint"], "python train.py"),
        (["spec", "rayClusterSpec", "workerGroupSpecs", 0, "replicas"], "two"),
        (["spec", "rayClusterSpec", "workerGroupSpecs", 0, "template", "spec", "hostnetwork"], True),
        (["spec", "rayClusterSpec", "headGroupSpec", "rayStartParams", "num-cpus"], 0),
        (["spec", "rayClusterSpec", "authOptions", "mode"], "tokens"),
    ],
)
def test_the_schema_refuses_what_kuberay_would(path: list[Any], value: Any) -> None:
    """Else the test above could not fail."""
    manifest: Any = json.loads(json.dumps(build(JobOptions(**JOB))))
    place = manifest
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        check(manifest)


def test_a_worker_with_rdma() -> None:
    pod, container = worker(build(JobOptions(**JOB, **RDMA)))
    resources = container["resources"]
    assert resources["limits"] == resources["requests"]
    assert resources["limits"]["rdma/hca_shared_devices_a"] == "2" and resources["limits"]["nvidia.com/gpu"] == "8"
    assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}, "runAsUser": 0}
    assert (pod["hostNetwork"], pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")


def test_shared_memory_is_memory_and_has_room_for_the_object_store() -> None:
    manifest = build(ClusterOptions(**BASE, memory="64Gi", shm="16Gi"))
    pod, container = worker(manifest)
    assert container["volumeMounts"] == [{"name": "dshm", "mountPath": "/dev/shm"}]
    assert pod["volumes"] == [{"name": "dshm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}}]
    assert container["resources"]["limits"]["memory"] == "64Gi"
    parameters = manifest["spec"]["workerGroupSpecs"][0]["rayStartParams"]
    assert 0 < int(parameters["object-store-memory"]) < 16 << 30


def test_without_rdma_nothing_asks_for_privileges() -> None:
    pod, container = worker(build(ClusterOptions(**BASE)))
    assert "securityContext" not in container and "hostNetwork" not in pod
    assert set(container["resources"]["limits"]) == {"cpu", "memory"}


def test_another_user_than_root_is_told_what_rdma_needs() -> None:
    options = ClusterOptions(**BASE, **RDMA, non_root=True)
    assert worker(build(options))[1]["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    assert "LimitMEMLOCK=infinity" in to_yaml(options)
    assert "LimitMEMLOCK" not in to_yaml(ClusterOptions(**BASE))


def test_the_environment_is_ours_unless_the_user_says_otherwise() -> None:
    manifest = build(ClusterOptions(**BASE, env=["IBV_FORK_SAFE=0", "NCCL_DEBUG=INFO"]))
    spec = manifest["spec"]
    for pod in (spec["headGroupSpec"]["template"]["spec"], worker(manifest)[0]):
        found = {variable["name"]: variable["value"] for variable in pod["containers"][0]["env"]}
        assert found == {**DEFAULTS, "RAY_AUTH_MODE": "token", "IBV_FORK_SAFE": "0", "NCCL_DEBUG": "INFO"}
    assert spec["authOptions"] == {"mode": "token"}
    assert build(ClusterOptions(**BASE, auth="disabled"))["spec"]["authOptions"] == {"mode": "disabled"}


def test_the_head_runs_no_actors_and_says_where_it_listens() -> None:
    head = build(JobOptions(**JOB))["spec"]["rayClusterSpec"]["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    ports = {port["name"]: port["containerPort"] for port in head["template"]["spec"]["containers"][0]["ports"]}
    assert ports == {"gcs-server": 6379, "dashboard": 8265, "client": 10001}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--workers -1", "workers=-1 must be greater than or equal to 1"),
        ("--gpus -2", "gpus=-2 must be greater than or equal to 0"),
        ("--rdma-resource rdma", "rdma_resource='rdma' must match"),
        ("--rdma-resource nvidia.com/gpu", "rdma_resource: "),
        ("--rdma-resource rdma/ib --rdma-count 0", "rdma_count=0 must be greater than or equal to 1"),
        ("--shm 64Gi", "shm 64Gi does not fit into memory 32Gi"),
        ("--shm 1Ki", "shm 1Ki is too little"),
        ("--memory 12Q", "memory='12Q' must match"),
        ("--memory 100M", "memory 100M is too little"),
        ("--auth none", "auth='none' must be 'token' or 'disabled'"),
        ("--env RAY_AUTH_MODE=disabled", "env: .*--auth"),
        ("--env JUST_A_NAME", "env: 'JUST_A_NAME' is not NAME=VALUE"),
        ("--env 1A=2", "env: '1A=2' is not NAME=VALUE"),
        ("--name Train", "name='Train' must match"),
        ("--name " + "a" * 54, "name=.* must have at most 53 characters"),
        ("--namespace a.b", "namespace='a.b' must match"),
        ("--image ''", "image='' must match"),
        ("--ray-version 2.48.0", "auth: .*needs Ray 2.52 or later, and here is 2.48.0: .*--auth disabled"),
        ("--ray-version 2.9.0", "ray_version 2.9.0 is not Ray 2.48.0 or later"),
        ("--output /nonexistent/file.yaml", "/nonexistent/file.yaml"),
    ],
)
def test_bad_input_gets_one_line_and_an_exit_code(words: str, message: str) -> None:
    code, out, err = command("raycluster", "--image", IMAGE, "--ray-version", "2.60.0", *shlex.split(words))
    assert (code, out, err.count("\n")) == (1 if "--output" in words else 2, "", 1), err
    assert err.startswith("raytorchrpc manifest raycluster: ")
    assert re.search(message, err), err


def test_a_job_needs_a_command() -> None:
    code, out, err = command("rayjob", "--image", IMAGE, "--entrypoint", " ")
    assert (code, out) == (2, "") and err.startswith("raytorchrpc manifest rayjob: entrypoint=' ' must match")


@pytest.mark.parametrize("file", SAMPLES)
def test_the_samples_are_what_the_command_writes(file: str) -> None:
    """``python -m raytorchrpc.cli manifest ... --output examples/...`` with the words of ``SAMPLES``."""
    code, out, err = command(*SAMPLES[file])
    assert code == 0, err
    text = (ROOT / "examples" / file).read_text()
    assert text == out
    manifest = yaml.safe_load(text)
    check(manifest)
    if entrypoint := manifest["spec"].get("entrypoint"):
        script = entrypoint.split()[1].replace("/opt/", "examples/")  # where docs/kubernetes.md puts it
        assert (ROOT / script).is_file()
