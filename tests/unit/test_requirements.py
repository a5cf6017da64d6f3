"""What a user of an old Ray reads who uses a feature of a newer one. The installed Ray only seems old."""

from __future__ import annotations

from typing import Any

import pytest
import ray
import torch

import raytorchrpc as rtr

OBJECTREFS = r"objectref=True.* needs Ray 2\.59 or later, and here is 2\.48\.0: upgrade Ray, or let the members call"


def test_objectrefs_name_the_ray_that_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "__version__", "2.48.0")

    def make(self: Any) -> torch.Tensor:
        return torch.ones(1)

    for use in (rtr.rdt.enable, rtr.rdt.wait, lambda: rtr.method(objectref=True)(make)):
        with pytest.raises(rtr.ConfigurationError, match=OBJECTREFS):
            use()
    assert rtr.method(make) is not None, "all else works"
