"""Submit this folder as a job, show its log, and end as it does.

    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=...          # as the cluster has them
    python submit.py --address http://head:8265
    python submit.py --address http://head:8265 --package ../../dist/raytorchrpc-0.1.0-py3-none-any.whl
    python submit.py --address http://head:8265 --package image -- python ddp.py --workers 4 --backend nccl

``--package`` says where the cluster gets raytorchrpc from: a folder (by default the one that this Python imports), a
wheel, or ``image`` if it is installed there. ``--show`` prints the runtime environment as JSON, for ``ray job submit``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import socket
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import raytorchrpc as rtr

HERE = Path(__file__).resolve().parent


class Refused(Exception):
    """Why no job was submitted, in one line."""


def modules(package: str | None, scratch: Path) -> list[str]:
    """For ``py_modules``. Ray would install a wheel together with all it depends on, torch included, in a folder of the
    job's own; the cluster has those already, so the wheel is unpacked and only the package travels.
    """
    if package == "image":
        return []
    path = Path(rtr.__file__).parent if package is None else Path(package)
    if path.suffix == ".whl":
        try:
            with zipfile.ZipFile(path) as wheel:
                wheel.extractall(scratch)
        except (OSError, zipfile.BadZipFile) as error:
            raise Refused(f"--package {package}: no wheel can be read there ({error})") from error
        path = scratch / "raytorchrpc"
    if not (path / "__init__.py").is_file():
        raise Refused(f"--package {package}: neither the package's folder, nor its wheel, nor 'image'")
    return [str(path)]


def client_of(address: str) -> Any:
    """A client of the cluster's job server. Raises Refused with what to do about it."""
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    where = urlsplit(address)
    if where.scheme not in ("http", "https") or not where.hostname:
        raise Refused(f"--address {address}: not the address of a dashboard, such as http://head:8265")
    try:  # Ray would try for as long as the kernel does
        port = where.port or (443 if where.scheme == "https" else 80)
        socket.create_connection((where.hostname, port), timeout=10).close()
        return JobSubmissionClient(address)
    except AuthenticationError as error:
        text = " ".join(str(error).split())
        raise Refused(
            f"{address} does not let this program in ({text}); set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN, or "
            f"RAY_AUTH_TOKEN_PATH, to what the cluster was started with"
        ) from error
    except (OSError, ValueError, RuntimeError) as error:
        raise Refused(f"no Ray job server answers at {address}: {error}") from error


async def follow(client: Any, job: str) -> None:
    async for lines in client.tail_job_logs(job):
        print(lines, end="", flush=True)


def submit(options: argparse.Namespace, scratch: Path) -> int:
    variables = dict(pair.partition("=")[::2] for pair in options.env)
    fields: dict[str, Any] = {"working_dir": str(HERE)}
    if shipped := modules(options.package, scratch):
        fields["py_modules"] = shipped
    environment = rtr.runtime_env(**fields, env_vars=variables)
    if options.show:
        print(json.dumps(environment))
        return 0
    client = client_of(options.address)
    command = shlex.join(options.command or ["python", "train.py"])
    job = client.submit_job(entrypoint=command, runtime_env=environment)
    print(f"submitted {job}: {command}", flush=True)
    try:
        asyncio.run(asyncio.wait_for(follow(client, job), options.timeout))
    except (TimeoutError, asyncio.TimeoutError):
        client.stop_job(job)
        raise Refused(f"{job} was stopped: it took more than {options.timeout:g} s") from None
    status = client.get_job_status(job)
    print(f"{job}: {status}")
    return 0 if status == "SUCCEEDED" else 1


def main() -> int:
    parser = argparse.ArgumentParser(description="Submit the job in this folder to a Ray cluster.")
    parser.add_argument("--address", default=os.environ.get("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:8265"))
    parser.add_argument("--package", help="a folder, a wheel, or 'image'")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="for the job; repeatable")
    parser.add_argument("--timeout", type=float, default=600, help="seconds that the job may take")
    parser.add_argument("--show", action="store_true", help="print the runtime environment as JSON, and stop")
    parser.add_argument("command", nargs="*", help="python train.py, unless given")
    options = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as scratch:
            return submit(options, Path(scratch))
    except (Refused, rtr.ConfigurationError) as error:
        print(f"submit.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
