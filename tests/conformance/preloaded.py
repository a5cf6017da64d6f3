"""What the fork server of the tests imports, so that none of its processes has to."""

from __future__ import annotations

import pytest  # noqa: F401

from raytorchrpc.config import GroupConfig
from raytorchrpc.lanes.nng import lane as nng  # noqa: F401
from raytorchrpc.lanes.shm import lane as shm  # noqa: F401
from raytorchrpc.lanes.socket import lane  # noqa: F401
from tests.conformance import peers  # noqa: F401

GroupConfig()  # loads pydantic
