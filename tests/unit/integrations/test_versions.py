"""An adapter says clearly when another version of its package is installed than it was tested with."""

from __future__ import annotations

import logging
from importlib import metadata

import pytest

from raytorchrpc.integrations.versions import adapted_to, outside


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    versions: dict[str, str] = {}

    def version(package: str) -> str:
        if package not in versions:
            raise metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(metadata, "version", version)
    return versions


@pytest.mark.parametrize("version", ["0.14", "0.14.1", "0.14.1+cpu", "0.14.0rc1", "0.14.9.post1"])
def test_tested_versions(installed: dict[str, str], version: str) -> None:
    installed["torchrl"] = version
    assert outside("torchrl") is None


@pytest.mark.parametrize("version", ["0.13.9", "0.15", "0.15.0.dev3", "1.0", "0.9"])
def test_other_versions_are_named(installed: dict[str, str], version: str) -> None:
    installed["torchrl"] = version
    assert outside("torchrl") == (
        f"torchrl {version} is installed, and this adapter was tested with torchrl>=0.14,<0.15"
    )


def test_another_version_is_used_with_a_warning(installed: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    installed["torchrl"] = "0.15.2"
    with caplog.at_level(logging.WARNING), adapted_to("torchrl"):
        pass
    assert "torchrl 0.15.2 is installed" in caplog.text


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (None, "install torchrl>=0.14,<0.15 to use this adapter: no such name"),
        ("0.12", "torchrl 0.12 is installed, and this adapter was tested with torchrl>=0.14,<0.15: no such name"),
        ("0.14.2", "no such name"),
    ],
)
def test_an_import_that_fails_names_the_versions(installed: dict[str, str], version: str | None, message: str) -> None:
    if version is not None:
        installed["torchrl"] = version
    with pytest.raises(ImportError) as raised, adapted_to("torchrl"):
        raise ImportError("no such name")
    assert str(raised.value) == message
