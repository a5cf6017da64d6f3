"""Which NIXL package is installed."""

from __future__ import annotations

import functools
import importlib.util

NIXL_MISSING = "NIXL is not installed for this torch build: pip install '.[nixl]' in a checkout"


@functools.cache
def nixl_package() -> str | None:
    """The package with NIXL's library for the CUDA release of this torch build, any if that has none; None if it is
    not installed. Imports nothing.
    """
    import torch

    cuda = torch.version.cuda
    names = [f"nixl_cu{cuda.partition('.')[0]}"] if cuda else ["nixl_cu13", "nixl_cu12"]
    return next((name for name in names if importlib.util.find_spec(name)), None)
