"""vLLM's KV connector behind servers: vLLM's own, as its proxies ask them, and Ray Serve LLM."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import ray

from tests.integrations.vllm_actors import VARIABLES, Server
from tests.integrations.vllm_kv_actors import CONNECTOR, OPTIONS, PREFILL, save_model

pytestmark = pytest.mark.slow
TOKENS = [7 + place * place % 290 for place in range(100)]
#: A prompt that cannot be read fails its request.
STRICT = {**CONNECTOR, "kv_load_failure_policy": "fail"}
#: What the prefill engine had of the prompt. vLLM says so in the parameters, and decode in its answer.
CACHED = 96
BODY = {"prompt": TOKENS, "temperature": 0, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def servers(cluster: None, path: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Server]]:
    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    options = ["--skip-tokenizer-init", "--load-format", "auto", "--max-model-len", "256", "--block-size", "32"]
    options += ["--kv-transfer-config", json.dumps(STRICT), "--enable-prompt-tokens-details"]
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda _: Server(path, options=options), range(2)))
    yield made
    for server in made:
        server.stop()


def test_servers_behind_a_proxy(servers: list[Server]) -> None:
    """What a proxy for the NixlConnector sends: the parameters of the first answer go to the second server."""
    prefill, decode = servers
    (alone,) = prefill.ask("POST", "/v1/completions", BODY)["choices"]
    first = prefill.ask("POST", "/v1/completions", {**BODY, "max_tokens": 1, "kv_transfer_params": PREFILL})
    parameters = first["kv_transfer_params"]
    answer = decode.ask("POST", "/v1/completions", {**BODY, "kv_transfer_params": parameters})
    assert answer["choices"][0]["token_ids"] == alone["token_ids"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == CACHED


@pytest.mark.filterwarnings("ignore")
def test_ray_serve(cluster: None, path: str) -> None:
    """Its application for prefill and decode, with our line in ``engine_kwargs``."""
    pytest.importorskip("ray.serve.llm", reason="needs ray[serve] and pyarrow", exc_type=ImportError)
    from ray import serve
    from ray.serve.llm import LLMConfig, build_pd_openai_app
    from ray.serve.llm.openai_api_models import CompletionRequest

    config = {
        "model_loading_config": {"model_id": "toy", "model_source": path},
        "accelerator_config": {"kind": "cpu"},
        "engine_kwargs": {**OPTIONS, "kv_transfer_config": STRICT, "enable_prompt_tokens_details": True},
        "deployment_config": {"num_replicas": 1, "ray_actor_options": {"num_cpus": 0}},
        "placement_group_config": {"bundles": [{"CPU": 0.01}]},
        "runtime_env": {"env_vars": {**VARIABLES, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}},
    }
    serve.start(proxy_location="Disabled")
    try:
        app = build_pd_openai_app({"prefill_config": LLMConfig(**config), "decode_config": LLMConfig(**config)})
        serve.run(app, name="kv", route_prefix="/kv")

        def complete(deployment: str) -> Any:
            handle = serve.get_deployment_handle(deployment, "kv").options(stream=True)
            (answer,) = handle.completions.remote(CompletionRequest(model="toy", **BODY), None)
            return answer

        alone, answer = complete("Prefill:toy"), complete("Decode:toy")
        assert answer.choices[0].token_ids == alone.choices[0].token_ids
        assert answer.usage.prompt_tokens_details.cached_tokens == CACHED
    finally:
        serve.shutdown()
