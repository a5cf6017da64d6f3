"""LoRA adapters in vLLM that its workers pull out of a ``WeightStore``: no files, and nothing of the base model.

Give the engine ``enable_lora=True`` and ``weight_transfer_config={"backend": "raytorchrpc"}``. The trainer publishes
``adapter_of(model)`` of ``raytorchrpc.integrations.adapters``, and keeps as many versions as requests may name.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors.torch import save_file
from vllm.lora.request import LoRARequest

import raytorchrpc as rtr
from raytorchrpc.integrations.adapters import CONFIG, SCHEME, name_of
from raytorchrpc.integrations.engines import Progress, become_member, follow_group

_NAME = re.compile(rf"{SCHEME}(?P<group>[^/]*)/(?P<store>.+)@(?P<version>\d+)\.(?P<instance>\d+)")
#: vLLM keeps the numbers of adapters as int32, from 1 on.
_IDS = (1 << 31) - 2
#: For a worker to join the group and to pull an adapter (seconds).
_TIMEOUT_S = 60.0


def request(
    store: str = "adapter", version: int | None = None, *, group: str | None = None, timeout: float = 60.0
) -> LoRARequest:
    """Name a version of an adapter to vLLM: ``llm.generate(prompts, lora_request=request())``. Blocks.

    The first request that has it, or ``llm.llm_engine.add_lora(request())``, has each worker pull the adapter.
    Requests that run go on with theirs; ``max_loras`` adapters can be in use at a time.

    Args:
        store: the name of the ``WeightStore``, in whichever member it is.
        version: None: the newest, and if there is none yet, the first.
        group: the group that this process and the workers join if they are in none.
        timeout: seconds.

    Raises:
        NotFound: no member has such a store.
        Empty: nothing was published in time.
    """
    progress = Progress(timeout)
    become_member(group, progress.left())
    there = rtr.WeightStore.find(store, timeout=progress.left())
    name = name_of(there, there.wait(1, progress.left()) if version is None else version, group)
    digest = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    return LoRARequest(name, 1 + digest % _IDS, name)


@contextmanager
def pulled(name: str) -> Iterator[str]:
    """Pull a version into a folder as vLLM loads it: the folder lasts as long as the block.

    Raises NotFound if the version is not there any more, or its home was restarted.
    """
    progress, parts = Progress(_TIMEOUT_S), _NAME.fullmatch(name)
    if parts is None:
        raise rtr.ConfigurationError(f"{name!r} has to be a name that name_of or request gave")
    group, version = parts["group"] or None, int(parts["version"])
    become_member(group, progress.left())
    follow_group(group, progress.left())
    store = rtr.WeightStore.find(parts["store"], timeout=progress.left())
    if str(store.instance) != parts["instance"]:
        raise rtr.NotFound(f"version {version} of adapter {store.name!r} ended when its home was restarted")
    tensors = store.layout(version, timeout=progress.left()).empty("cpu")
    store.pull(tensors, version, timeout=progress.left())
    with TemporaryDirectory(prefix="raytorchrpc-adapter-") as folder:
        Path(folder, CONFIG).write_bytes(tensors.pop(CONFIG).numpy().tobytes())
        save_file(tensors, Path(folder, "adapter_model.safetensors"))
        yield folder
