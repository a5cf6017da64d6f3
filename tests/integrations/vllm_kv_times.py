"""Time to first token of two vLLM engines, by their connector: ``python -m tests.integrations.vllm_kv_times``.

A prompt is prefilled by one engine and decoded by the other, both on CPUs: by raytorchrpc, by vLLM's NixlConnector
(``pip install nixl``) and its ExampleConnector (files in /dev/shm), in turn in one run. The model is small, so its KV
cache has 4 KB a token: 8 layers, blocks of 16 KB. Processor time is that of both engines while decode brings the prompt
and computes the first token; an engine alone needs what prefill does. Medians.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import ray

from tests.integrations.vllm_actors import VARIABLES
from tests.integrations.vllm_kv_actors import CONNECTOR, PREFILL, KVEngine, save_model

LAYERS, BLOCK = 8, 32
OPTIONS: dict[str, Any] = {
    "max_model_len": 8400,
    "max_num_batched_tokens": 8400,  # the ExampleConnector stores the first chunk of a prompt alone
    "max_num_seqs": 2,
    "enable_prefix_caching": False,
    "num_gpu_blocks_override": 600,
}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def cases(folder: str) -> dict[str, dict[str, Any]]:
    """By name: the arguments of both engines."""
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": folder},
    }
    nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "fail"}
    return {
        "raytorchrpc": {"kv": CONNECTOR},
        "NixlConnector": {"kv": nixl},
        "ExampleConnector": {"kv": example, "disable_hybrid_kv_cache_manager": True},
    }


def processor_s(pids: list[int]) -> float:
    """Of these processes and those below them."""
    below: dict[int, list[int]] = {}
    times: dict[int, float] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            below.setdefault(int(fields[1]), []).append(int(entry))
            times[int(entry)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    found, total = list(pids), 0.0
    for pid in found:
        total += times.get(pid, 0.0)
        found += below.get(pid, [])
    return total


class Timed(KVEngine):
    """In a process whose pid is known."""

    async def pid(self) -> int:
        return os.getpid()


class Pair:
    """Two engines with a connector between them."""

    def __init__(self, path: str, options: dict[str, Any]) -> None:
        self.hands_over = options["kv"]["kv_connector"] != "ExampleConnector"
        self.engines: list[Any] = []
        for _ in range(2):
            variables = {
                **VARIABLES,
                "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            }
            remote = ray.remote(Timed).options(num_cpus=0, max_concurrency=8, runtime_env={"env_vars": variables})
            self.engines.append(remote.remote(path, **OPTIONS, **options))
        ray.get([engine.start.remote() for engine in self.engines], timeout=600)
        self.pids = ray.get([engine.pid.remote() for engine in self.engines])

    def measure(self, tokens: list[int]) -> tuple[list[int], list[float]]:
        """The first token; seconds to it, of these to prefill and of decode, and of processor time."""
        prefill, decode = self.engines
        began = time.perf_counter()
        call = prefill.generate.remote(tokens, 1, PREFILL if self.hands_over else None)
        first, parameters, _ = ray.get(call, timeout=120)
        prefilled, before = time.perf_counter(), processor_s(self.pids)
        answer, _, decode_s = ray.get(decode.generate.remote(tokens, 1, parameters), timeout=120)
        row = [time.perf_counter() - began, prefilled - began, decode_s, processor_s(self.pids) - before]
        if answer != first:
            raise RuntimeError(f"decode's first token is {answer}, and prefill's {first}")
        return list(answer), row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--only", nargs="*", help="connectors")
    options = parser.parse_args()
    ray.init(include_dashboard=False, num_cpus=4, logging_level="error", log_to_driver=bool(options.only))
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir="/dev/shm") as files:
        path = save_model(Path(folder), layers=LAYERS, hidden=128, max_position_embeddings=8400)
        pairs = dict[str, Pair]()
        for name, case in cases(files).items():
            if name in (options.only or [name]):
                try:
                    pairs[name] = Pair(path, case)
                except ray.exceptions.RayError as error:
                    print(f"{name} does not start: {str(error).strip()[-600:]}", flush=True)
        print(
            "connector | tokens | to first token ms | of it prefill | decode | its processor ms | blocks/s", flush=True
        )
        for length in options.lengths:
            rows: dict[str, list[list[float]]] = {name: [] for name in pairs}
            for number in range(options.rounds + 1):  # the first one warms up
                tokens = [random.Random(number * 10_000 + length + place).randrange(1, 300) for place in range(length)]
                answers = {}
                for name, pair in pairs.items():
                    answers[name], row = pair.measure(tokens)
                    rows[name] += [row] if number else []
                if len({tuple(answer) for answer in answers.values()}) > 1:
                    raise RuntimeError(f"engines differ: {answers}")
            blocks = -(-length // BLOCK) * LAYERS
            for name, values in rows.items():
                medians = [statistics.median(column) for column in zip(*values, strict=True)]
                figures = [f"{1e3 * each:.1f}" for each in medians]
                print(" | ".join([name, str(length), *figures, f"{blocks / medians[2]:,.0f}"]), flush=True)


if __name__ == "__main__":
    main()
