"""The versions of other packages that an adapter was tested with."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

from raytorchrpc._compat.requirements import is_older

logger = logging.getLogger(__name__)

#: What each adapter was tested with, or whose sources it follows: from the first release up to before the second.
TESTED = {
    "TransferQueue": ("0.1.11", "0.2"),
    "sglang": ("0.5.17", "0.5.24"),  # the older of them have no sessions of updates
    "torchrl": ("0.14", "0.15"),
    "trl": ("1.16", "1.17"),
    "verl": ("0.9", "0.10"),
    # Before 0.27, an engine for weights has another interface; vllm/trainer.py has what differs in later ones.
    "vllm": ("0.27", "0.34"),
}


def outside(package: str, installed: str | None = None) -> str | None:
    """Say how the installed version of a package lies outside of those in ``TESTED``; None: it does not.

    ``installed``: None: as the package's metadata says, which may raise ``importlib.metadata.PackageNotFoundError``.
    Pre-releases count as their release.
    """
    oldest, before = TESTED[package]
    installed = metadata.version(package) if installed is None else installed
    if is_older(installed, before) and not is_older(installed, oldest):
        return None
    return f"{package} {installed} is installed, and this adapter was tested with {package}>={oldest},<{before}"


def report(package: str, log: logging.Logger, installed: str | None = None) -> None:
    """Log a warning if a version of a package lies outside; see ``outside``."""
    if (difference := outside(package, installed)) is not None:
        log.warning("%s: check that updated models have the weights that were published", difference)


@contextmanager
def adapted_to(package: str) -> Iterator[None]:
    """Import a package inside of this block: ``with adapted_to("torchrl"): ...``.

    Logs a warning if another version is installed. If an import fails then, the ImportError names the versions.
    """
    try:
        yield
    except ImportError as error:
        try:
            difference = outside(package)
        except metadata.PackageNotFoundError:
            oldest, before = TESTED[package]
            raise ImportError(f"install {package}>={oldest},<{before} to use this adapter: {error}") from error
        if difference is None:
            raise
        raise ImportError(f"{difference}: {error}") from error
    report(package, logger)
