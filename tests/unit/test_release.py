"""What a distribution says of itself, with and without the project's address."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import raytorchrpc as rtr

core = pytest.importorskip("hatchling.metadata.core")
manager = pytest.importorskip("hatchling.plugin.manager")

ROOT = Path(__file__).parents[2]
URL = "https://code.example/team/raytorchrpc"


def metadata(monkeypatch: pytest.MonkeyPatch, url: str | None) -> core.CoreMetadata:
    monkeypatch.delenv("RAYTORCHRPC_URL", raising=False)
    if url is not None:
        monkeypatch.setenv("RAYTORCHRPC_URL", url)
    return core.ProjectMetadata(str(ROOT), manager.PluginManager()).core


def test_a_release_has_whole_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page of a package index has no files beside it."""
    found = metadata(monkeypatch, f"{URL}/")
    assert found.urls["Repository"] == URL and found.urls["Issues"] == f"{URL}/issues"
    targets = re.findall(r"\]\(([^)\s]+)\)", found.readme)
    assert targets and all(target.startswith(("https://", "#")) for target in targets)
    for target in targets:
        kind, tag, path = target.removeprefix(f"{URL}/").split("/", 2)
        assert tag == f"v{rtr.__version__}" and kind == ("raw" if path.endswith(".svg") else "blob")
        assert (ROOT / path.partition("#")[0]).exists()
    assert f"git clone {URL} " in found.readme


def test_a_build_without_an_address_leaves_links_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    found = metadata(monkeypatch, None)
    assert found.urls == {}
    assert found.readme == (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("url", ["raytorchrpc", "http://code.example/team/raytorchrpc", "https://code.example"])
def test_an_address_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"https://...), not {url!r}")):
        _ = metadata(monkeypatch, url).readme


def test_one_version_everywhere() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == rtr.__version__
    newest = re.search(r"^## \[?([\d.]+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None and newest[1] == rtr.__version__
