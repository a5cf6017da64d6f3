"""Installs the lanes of ``examples/own_lanes`` for this run, before the suites ask the registry for its lanes."""

from __future__ import annotations

import atexit
import shutil
import sys
import tempfile
from pathlib import Path

from tests.distributions import install_own_lanes

_FOLDER = install_own_lanes(Path(tempfile.mkdtemp(prefix="own-lanes-")))
atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)
sys.path.append(str(_FOLDER))  # other processes of a test get this one's path
