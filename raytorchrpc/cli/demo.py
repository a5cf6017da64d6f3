"""``raytorchrpc demo``: runs the example ``digits`` on a Ray of its own, or on a cluster."""

from __future__ import annotations

import runpy
from typing import Any

from ray.exceptions import RayError

from raytorchrpc.cli.examples import folder
from raytorchrpc.errors import BootstrapError, RayTorchRpcError
from raytorchrpc.process.ray_session import ray_session


def run(*, address: str | None, workers: int, target: float, **options: Any) -> None:
    """Train, then show the routes of the calls and their cost.

    Raises RayTorchRpcError if Ray fails or the target accuracy is not reached.
    """
    # Under this name workers cannot import the example: Ray sends its classes by value.
    train = runpy.run_path(str(folder() / "digits.py"), run_name="digits")["run"]
    try:
        with ray_session(address, cpus=workers + 1):
            final = train(workers=workers, target=target, **options)
    except RayError as error:
        raise BootstrapError(str(error)) from error
    if final.accuracy < target:
        reached = f"test accuracy {final.accuracy:.1%} after {final.steps} steps"
        raise RayTorchRpcError(f"{reached}, below the target of {target:.1%}")
