"""The test classes of torch's own RPC suite, from the installed torch, as they run in a worker process.

Importing this takes seconds. Nothing of raytorchrpc is imported, so a template of workers may import it.
"""

from __future__ import annotations

import concurrent.futures
import copy
import inspect
import sys
import types
import unittest
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch

if find_spec("expecttest") is None:  # the suite needs no more of it than a base class
    stub = types.ModuleType("expecttest")
    stub.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    sys.modules["expecttest"] = stub

from torch.testing._internal import common_distributed
from torch.testing._internal.distributed import rpc_utils
from torch.testing._internal.distributed.rpc.faulty_rpc_agent_test_fixture import FaultyRpcAgentTestFixture
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import TensorPipeRpcAgentTestFixture

#: DDP joins process groups with workers of other names; the other suites are of RPC alone.
_LEFT_OUT = ("DdpUnderDistAutogradTest", "DdpComparisonTest")
_TENSORPIPE = [
    each for each in (*rpc_utils.GENERIC_TESTS, *rpc_utils.TENSORPIPE_TESTS) if each.__name__ not in _LEFT_OUT
]
#: By name. Module attributes too, so that they can be pickled.
CASES: dict[str, Any] = {
    **rpc_utils.generate_tests("", TensorPipeRpcAgentTestFixture, _TENSORPIPE, __name__),
    **rpc_utils.generate_tests("", FaultyRpcAgentTestFixture, rpc_utils.FAULTY_AGENT_TESTS, __name__),
}
globals().update(CASES)

#: What their decorators exit with where GPUs are missing.
SKIPS = {skip.exit_code: f"skipped: {skip.message}" for skip in common_distributed.TEST_SKIPS.values()}

#: (messages that fail, messages that are late), or None for an agent without faults.
Faults = tuple[tuple[str, ...], tuple[tuple[str, float], ...]] | None


def tests() -> Iterator[tuple[str, str, int, Faults]]:
    """Class, name, number of workers, and the faults that their agents are to have."""
    for name, case in CASES.items():
        for method in unittest.TestLoader().getTestCaseNames(case):
            test = case(method)
            yield name, method, test.world_size, _faults(test, method)


def _faults(test: Any, method: str) -> Faults:
    if not isinstance(test, FaultyRpcAgentTestFixture):
        return None
    function = getattr(type(test), method)
    while function is not None:
        given = inspect.getclosurevars(function).nonlocals
        if "faulty_messages" in given:
            test.setup_fault_injection(given["faulty_messages"], given["messages_to_delay"])
            break
        function = getattr(function, "__wrapped__", None)
    return tuple(test.messages_to_fail), tuple(sorted(test.messages_to_delay.items()))


_DATA = (bool, int, float, str, list, set, dict, type(None), torch.Tensor)
_MODULES = sorted({case.__mro__[1].__module__ for case in CASES.values()})
_FIRST_VALUES = {
    module: {
        name: copy.deepcopy(value)
        for name, value in vars(sys.modules[module]).items()
        if isinstance(value, _DATA) and not name.startswith("__")
    }
    for module in _MODULES
}


def reset() -> None:
    """Give the global variables of the suite the values that they have in a new process."""
    for module, values in _FIRST_VALUES.items():
        variables = vars(sys.modules[module])
        variables.update(copy.deepcopy(values))
        for name, value in variables.items():
            if isinstance(value, concurrent.futures.Future):
                variables[name] = concurrent.futures.Future()
