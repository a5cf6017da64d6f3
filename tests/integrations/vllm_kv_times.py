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


def measure(path: str, options: dict[str, Any], lengths: list[int], rounds: int, expected: dict[Any, Any]) -> Any:
    """By length: rows of seconds to prefill, to the first token of decode, alone; and of processor time."""
    made = []
    for _ in range(2):
        variables = {
            **VARIABLES,
            "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        }
        remote = ray.remote(Timed).options(num_cpus=0, max_concurrency=8, runtime_env={"env_vars": variables})
        made.append(remote.remote(path, **OPTIONS, **options))
    try:
        ray.get([engine.start.remote() for engine in made], timeout=400)
        prefill, decode = made
        pids = ray.get([engine.pid.remote() for engine in made])
        rows: dict[int, list[list[float]]] = {length: [] for length in lengths}
        hands_over = options["kv"]["kv_connector"] != "ExampleConnector"
        for number in range(rounds + 1):  # the first one warms up
            for length in lengths:
                tokens = [random.Random(number * 10_000 + length + place).randrange(1, 300) for place in range(length)]
                began = time.perf_counter()
                first, parameters, _ = ray.get(
                    prefill.generate.remote(tokens, 1, PREFILL if hands_over else None), timeout=120
                )
                prefilled, before = time.perf_counter(), processor_s(pids)
                answer, _, decoded_s = ray.get(decode.generate.remote(tokens, 1, parameters), timeout=120)
                row = [prefilled - began, decoded_s, processor_s(pids) - before, time.perf_counter() - began]
                if answer != first:
                    raise RuntimeError(f"decode's first token is {answer}, and prefill's {first}")
                if expected.setdefault((number, length), first) != first:
                    raise RuntimeError("engines differ")
                if number:
                    rows[length].append(row)
        return rows
    finally:
        for engine in made:
            ray.kill(engine)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--only", nargs="*", help="connectors")
    options = parser.parse_args()
    ray.init(include_dashboard=False, num_cpus=4, logging_level="error", log_to_driver=bool(options.only))
    expected: dict[Any, Any] = {}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir="/dev/shm") as files:
        path = save_model(Path(folder), layers=LAYERS, hidden=128, max_position_embeddings=8400)
        print(
            "connector | tokens | to first token ms | of it prefill | decode | its processor ms | blocks/s", flush=True
        )
        for name, case in cases(files).items():
            if options.only and name not in options.only:
                continue
            try:
                rows = measure(path, case, options.lengths, options.rounds, expected)
            except Exception as error:
                print(f"{name} | failed: {type(error).__name__}: {str(error)[-600:]}", flush=True)
                continue
            for length, values in rows.items():
                prefill, decode, processor, total = (statistics.median(column) for column in zip(*values, strict=True))
                blocks = -(-length // BLOCK) * LAYERS
                figures = [f"{1e3 * each:.1f}" for each in (total, prefill, decode, processor)]
                print(" | ".join([name, str(length), *figures, f"{blocks / decode:,.0f}"]), flush=True)


if __name__ == "__main__":
    main()
