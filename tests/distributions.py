"""Distributions as pip installs them, written into a folder: packages and their metadata."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

OWN_LANES = Path(__file__).parents[1] / "examples" / "own_lanes"
#: The lanes that it adds: one for tensors, one for messages.
MEMFD, UNIX_STREAM = "memfd", "unix_stream"


def write(folder: Path, name: str, lanes: Mapping[str, str], version: str = "0.1", **modules: str) -> None:
    """A distribution with these entry points and modules (by name, their text)."""
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    points = "".join(f"{lane} = {value}\n" for lane, value in lanes.items())
    (metadata / "entry_points.txt").write_text(f"[raytorchrpc.lanes]\n{points}")
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(text)


def install_own_lanes(folder: Path, version: str = "0.1") -> Path:
    """The example's distribution, in that folder."""
    _, _, section = (OWN_LANES / "pyproject.toml").read_text().partition('[project.entry-points."raytorchrpc.lanes"]')
    lanes = dict(re.findall(r'^(\w+) = "(.*)"$', section.partition("\n[")[0], re.MULTILINE))
    assert set(lanes) == {MEMFD, UNIX_STREAM}
    write(folder, "own-lanes", lanes, version)
    shutil.copytree(OWN_LANES / "own_lanes", folder / "own_lanes")
    return folder
