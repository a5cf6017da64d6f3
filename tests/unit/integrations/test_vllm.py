"""The parts of the vLLM integration that need no vLLM; tests/integrations has the others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

#: A vLLM that is there, but for what the plugin must not import.
PLUGIN = """
import json, sys, time, types
registered = []
class Factory:
    def register_engine(self, *args):
        if args in registered:
            raise ValueError("registered already")
        registered.append(args)
class Registry(dict):
    get_supported_resolvers = dict.keys
    register_resolver = dict.__setitem__
for name in ("vllm.distributed.weight_transfer.factory", "vllm.lora.request", "vllm.lora.resolver"):
    for length in range(1, name.count(".") + 2):
        part = ".".join(name.split(".")[:length])
        sys.modules.setdefault(part, types.ModuleType(part))
factory = sys.modules["vllm.distributed.weight_transfer.factory"]
factory.WeightTransferEngineFactory = factory.WeightTransferTrainerFactory = Factory()
sys.modules["vllm.lora.request"].LoRARequest = lambda *fields: fields
sys.modules["vllm.lora.resolver"].LoRAResolver = object
sys.modules["vllm.lora.resolver"].LoRAResolverRegistry = resolvers = Registry()
before, began = set(sys.modules), time.thread_time()
import raytorchrpc_vllm
raytorchrpc_vllm.register()
raytorchrpc_vllm.register()
spent, imported = time.thread_time() - began, sorted(set(sys.modules) - before)
import asyncio
(resolver,) = resolvers.values()
names = "raytorchrpc://trl/policy-adapter@1.23", "another"
print(json.dumps([spent, imported, registered, [asyncio.run(resolver.resolve_lora("base", name)) for name in names]]))
"""


def test_the_plugin_costs_next_to_nothing_where_nobody_uses_it_and_registers_what_is_there() -> None:
    ran = subprocess.run([sys.executable, "-c", PLUGIN], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    seconds, imported, registered, resolved = json.loads(ran.stdout)
    assert [name for name in imported if name.partition(".")[0] not in sys.stdlib_module_names] == ["raytorchrpc_vllm"]
    assert seconds < 0.1, "of this thread's: torch alone would take more than one"
    assert [name for name, *_ in registered] == ["raytorchrpc", "raytorchrpc"]
    for _, module, name in registered:
        assert f"\nclass {name}(" in (ROOT / f"{module.replace('.', '/')}.py").read_text()
    name = "raytorchrpc://trl/policy-adapter@1.23"
    assert resolved == [[name, 1, name], None]
