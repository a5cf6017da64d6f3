"""What a build adds: the examples, and what the metadata takes from the project's address in ``RAYTORCHRPC_URL``.

A package index shows the README by itself, so its links to files must be whole there. Without an address they stay as
they are, and the distribution has no links.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(?P<before>!?\[[^\]]*\]\()(?P<path>(?!\w+:|#|/)[^)\s]+)(?P<after>\))")
_ADDRESS = "<address of this repository>"


def links(url: str) -> dict[str, str]:
    """What an index shows beside the text."""
    return {
        "Repository": url,
        "Issues": f"{url}/issues",
        "Changelog": f"{url}/blob/main/CHANGELOG.md",
        "Security": f"{url}/security/policy",
    }


def readme(text: str, url: str, tag: str) -> str:
    """The README with whole links to the files of that tag: pictures as such, all others as pages."""

    def whole(found: re.Match[str]) -> str:
        kind = "raw" if found["before"].startswith("!") else "blob"
        return f"{found['before']}{url}/{kind}/{tag}/{found['path']}{found['after']}"

    return _LINK.sub(whole, text).replace(_ADDRESS, url)


class CustomMetadataHook(MetadataHookInterface):
    """Hatchling looks for this name."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        if url := os.environ.get("RAYTORCHRPC_URL", "").rstrip("/"):
            version = Path(self.root, "raytorchrpc", "__init__.py").read_text(encoding="utf-8")
            found = re.search(r'^__version__ = "(.+)"$', version, re.MULTILINE)
            if found is None or not re.fullmatch(r"https://[^\s/]+/[^\s]+", url):
                raise ValueError(f"RAYTORCHRPC_URL is the address of the repository (https://...), not {url!r}")
            text, metadata["urls"] = readme(text, url, f"v{found[1]}"), links(url)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


class ExamplesHook(BuildHookInterface[Any]):
    """Puts the examples into a wheel, for ``raytorchrpc examples``; an editable install reads them in the checkout."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "standard":
            build_data["force_include"]["examples"] = "raytorchrpc/_examples"
