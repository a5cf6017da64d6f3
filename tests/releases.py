"""Skips tests of features that the installed Ray or torch is too old for."""

from __future__ import annotations

from importlib import metadata

import pytest

from raytorchrpc._compat import requirements


def obstacle(feature: str) -> str | None:
    """Why the installed release lacks a feature of ``requirements.FEATURES``; None if it has it."""
    return requirements.obstacle(feature, metadata.version(requirements.FEATURES[feature].package.lower()))


def needs(feature: str) -> pytest.MarkDecorator:
    """For a test of the feature, or as ``pytestmark``."""
    missed = obstacle(feature)
    return pytest.mark.skipif(missed is not None, reason=missed or "it is there")


def skip_module_without(feature: str) -> None:
    """For a module that cannot be imported without the feature."""
    if missed := obstacle(feature):
        pytest.skip(missed, allow_module_level=True)
