"""LoRA adapters by themselves: a ``WeightStore`` has the tensors of a PEFT model's adapter, and nothing of its base.

A trainer publishes ``adapter_of(model)``. ``raytorchrpc.integrations.vllm.adapters`` loads versions of it in vLLM.
"""

from __future__ import annotations

import json
from typing import Any

import torch

import raytorchrpc as rtr

#: How the names of versions begin.
SCHEME = "raytorchrpc://"
#: The tensor that has the adapter's configuration, as the bytes of PEFT's file of this name.
CONFIG = "adapter_config.json"


def adapter_of(model: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a PEFT model's active adapter under the names of its file, and its configuration.

    They are the model's own, but for shards (DTensors): these are gathered, so that every training process calls this.

    Raises ConfigurationError if there is no adapter, or several are active.
    """
    from peft import PeftModel, get_peft_model_state_dict

    if not isinstance(model, PeftModel) or len(model.active_adapters) != 1:
        raise rtr.ConfigurationError(f"adapter_of takes a PEFT model with one active adapter, not {type(model)}")
    (name,) = model.active_adapters
    tensors = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    whole = {
        key: part.full_tensor() if hasattr(part, "full_tensor") else part.detach() for key, part in tensors.items()
    }
    text = json.dumps(model.peft_config[name].to_dict(), default=list)  # it has sets
    return {**whole, CONFIG: torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)}


def name_of(store: rtr.WeightStore, version: int, group: str | None = None) -> str:
    """Name a version of an adapter for all time: also after its home was restarted, no other one has this name.

    ``store``: a handle that has been used. ``group``: which processes join that are in none.
    """
    return f"{SCHEME}{group or ''}/{store.name}@{version}.{store.instance}"
