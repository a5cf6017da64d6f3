"""Submits this folder as a job, prints its log, and exits with its status.

    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=...          # the same as on the cluster
    python submit.py --address http://head:8265
    python submit.py --address http://head:8265 --package ../../dist/raytorchrpc-0.1.0-py3-none-any.whl
    python submit.py --address http://head:8265 --package image -- python ddp.py --workers 4 --backend nccl

``--package`` names the source of raytorchrpc: a folder (by default the one that this Python imports), a wheel, or
``image`` if the nodes have it installed. ``--show`` prints the runtime environment as JSON, for ``ray job submit``.
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


class SubmissionError(Exception):
    """The job was not submitted, or was stopped. The message is one line."""


def modules(package: str | None, scratch: Path) -> list[str]:
    """Returns the job's ``py_modules``. A wheel is unpacked, so that only the package is shipped: Ray would install it
    with all dependencies, including torch, which the cluster has already.
    """
    if package == "image":
        return []
    path = Path(rtr.__file__).parent if package is None else Path(package)
    if path.suffix == ".whl":
        try:
            with zipfile.ZipFile(path) as wheel:
                wheel.extractall(scratch)
        except (OSError, zipfile.BadZipFile) as error:
            raise SubmissionError(f"--package {package}: cannot be read as a wheel ({error})") from error
        path = scratch / "raytorchrpc"
    if not (path / "__init__.py").is_file():
        raise SubmissionError(f"--package {package}: neither the package's folder, nor its wheel, nor 'image'")
    return [str(path)]


def connect(address: str) -> Any:
    """Returns a client of the cluster's job server. Raises SubmissionError, with the remedy."""
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    where = urlsplit(address)
    if where.scheme not in ("http", "https") or not where.hostname:
        raise SubmissionError(f"--address {address}: not the address of a dashboard, such as http://head:8265")
    try:  # Ray itself has no timeout for the connection
        port = where.port or (443 if where.scheme == "https" else 80)
        socket.create_connection((where.hostname, port), timeout=10).close()
        return JobSubmissionClient(address)
    except AuthenticationError as error:
        text = " ".join(str(error).split())
        raise SubmissionError(
            f"{address} refused access ({text}); set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH, "
            f"to the values that the cluster was started with"
        ) from error
    except ConnectionRefusedError as error:
        raise SubmissionError(
            f"no Ray job server answers at {address}: connection refused; a head has one only with ray[default]: "
            f"pip install 'ray[default]' there, and start Ray again (--dashboard-host=0.0.0.0 admits other hosts)"
        ) from error
    except (OSError, ValueError, RuntimeError) as error:
        raise SubmissionError(
            f"no Ray job server answers at {address}: {error}; it runs on the head node, if that has ray[default], and "
            f"serves other machines only if the head was started with --dashboard-host"
        ) from error


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
    client = connect(options.address)
    command = shlex.join(options.command or ["python", "train.py"])
    job = client.submit_job(entrypoint=command, runtime_env=environment)
    print(f"submitted {job}: {command}", flush=True)
    try:
        asyncio.run(asyncio.wait_for(follow(client, job), options.timeout))
    except (TimeoutError, asyncio.TimeoutError):
        client.stop_job(job)
        raise SubmissionError(f"{job} was stopped: it took more than {options.timeout:g} s") from None
    status = client.get_job_status(job)
    print(f"{job}: {status}")
    return 0 if status == "SUCCEEDED" else 1


def main() -> int:
    parser = argparse.ArgumentParser(description="Submit the job in this folder to a Ray cluster.")
    parser.add_argument("--address", default=os.environ.get("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:8265"))
    parser.add_argument("--package", help="a folder, a wheel, or 'image'")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="set a variable; repeatable")
    parser.add_argument("--timeout", type=float, default=600, help="time limit of the job, in seconds")
    parser.add_argument("--show", action="store_true", help="print the runtime environment as JSON and exit")
    parser.add_argument("command", nargs="*", help="command to run (default: python train.py)")
    options = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as scratch:
            return submit(options, Path(scratch))
    except (SubmissionError, rtr.ConfigurationError) as error:
        print(f"submit.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
