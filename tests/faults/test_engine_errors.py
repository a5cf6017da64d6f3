"""What goes wrong in an update is named within seconds, at the trainer and the engine, and no model is half new."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
import ray

import raytorchrpc as rtr
from tests.faults.engine_faults import FORMS, LOST, Form

#: Of an update (seconds), and until its error is there, on a busy machine.
TIMEOUT_S, SOON_S = 3.0, 20.0
#: The tensor that is another one, and who does not answer, by adapter.
FAKES = r"layers\.7\.weight"
TABLE = {
    "vllm in its actor": (FAKES, "engine"),
    "vllm in a child": (FAKES, "engine"),
    "vllm with a loan": (FAKES, "engine"),
    "trl and a server": (FAKES, "worker"),
    "trl with a loan": (FAKES, "worker"),
    "sglang": (r"layers\.1\.norm", "worker"),
    "torchrl": (FAKES, "collector_1"),
    "verl": (FAKES, ""),
}
#: What a call says that a stopped process does not answer. verl waits for its workers itself.
SILENT = {
    "vllm in its actor": r"vLLM has not answered start_weight_update within 6 s",
    "vllm in a child": r"vLLM has not answered start_weight_update within 6 s",
    "vllm with a loan": r"vLLM has not answered start_weight_update within 6 s",
    "trl and a server": r"vLLM server at http.* has not taken version",
    "trl with a loan": r"vLLM server at http.* has not taken version",
    "sglang": r"SGLang has not answered begin_weight_update within",
    "torchrl": r"collector_1 took no weights within 3 s",
}

#: What an update says of trainers that go on as another number of processes; see ``Form.remesh`` for such a restart.
MESHES = {
    "vllm in a child": r"'trainer' has .*'policy' with publishers=.'trainer', 'trainer_1'.*, not publishers=None",
    "vllm with a loan": r"'trainer' has .*'policy' with publishers=.'trainer', 'trainer_1'.*, not publishers=None",
    "sglang": r"'trainer' has .*'policy' with publishers=.'trainer', 'trainer_1'.*, not publishers=None",
    "verl": r"publishers=.'trainer_0', 'trainer_1'",
}

#: These start processes, or are another form of the first.
LONG = "vllm in a child", "vllm with a loan", "trl and a server", "trl with a loan", "sglang"


def refused(form: Form, case: str, text: str) -> str | None:
    """Say what is wrong with the refusal of an update."""
    began = time.monotonic()
    try:
        form.train(case)
    except (rtr.RayTorchRpcError, ray.exceptions.RayError, OSError) as error:
        took = time.monotonic() - began
        if re.search(text, str(error)) and took < SOON_S:
            return None
        return f"{case}: after {took:.1f} s {error!r}"
    return f"{case}: it was taken"


def generated(form: Form) -> list[float] | None:
    """None: it refuses to."""
    try:
        return form.generate()
    except LOST:
        return None


def trained(form: Form) -> float:
    """As soon as it works again: an engine that was stopped may have calls to finish."""
    until = time.monotonic() + 30
    while True:
        try:
            return form.train()
        except LOST:
            if time.monotonic() > until:
                raise


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in LONG else []) for name in TABLE]
)
def test_errors_are_named_and_no_model_is_half_new(cluster: None, name: str) -> None:
    tensor, silent = TABLE[name]
    problems: list[str] = []
    with FORMS[name](timeout=TIMEOUT_S) as form:
        for case in ("other shape", "missing tensor", "other dtype"):
            before = trained(form)
            problems += filter(None, [refused(form, case, tensor)])
            if (values := generated(form)) not in ([before], None):
                problems.append(f"{case}: generated with {values}, not {before}")
        if silent:
            trained(form)
            pid = form.pids()[silent]
            os.kill(pid, signal.SIGSTOP)
            try:
                problems += filter(None, [refused(form, "never answers", SILENT[name])])
            finally:
                os.kill(pid, signal.SIGCONT)
            if len(values := generated(form) or []) > 1:
                problems.append(f"after it was stopped, it generated with {values}")
        after = trained(form)
        if (values := form.generate()) != [after]:
            problems.append(f"after an update it generated with {values}, not {after}")
        if name in LONG or name == "torchrl":
            form.remesh()
            if [trained(form)] != form.generate():
                problems.append("after a restart as another mesh, an update has brought something else")
        if name in MESHES:
            problems += filter(None, [refused(form, "changed mesh", MESHES[name])])
            if name.startswith("vllm"):
                home = r"'policy' is published by trainer, trainer_1, and here by trainer_1"
                problems += filter(None, [refused(form, "another home", home)])
            if [trained(form)] != form.generate():
                problems.append("after a changed mesh, an update has brought something else")
    assert not problems, "\n".join(problems)
