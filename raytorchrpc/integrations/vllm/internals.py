"""Names of vLLM that its documentation does not promise: how it loads the layers of a running model again.

When a release of vLLM moves one, importing this module fails, and models are updated by ``load_weights`` instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import Module
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    _layerwise_process,
    _place_kernel_tensors,
    get_layerwise_info,
    initialize_layerwise_reload,
    initialize_online_processing,
)
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS, materialize_layer, restore_layer_on_meta
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers, get_layer_tensors
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionImplBase

Tensors = dict[str, torch.Tensor]


@contextmanager
def as_loaded(model: Module) -> Iterator[None]:
    """Have the model's tensors on the meta device, as its loaders expect them, and restore the model afterwards."""
    try:
        initialize_layerwise_reload(model)
        for layer in model.modules():
            for tensor in tensors_of(layer).values():
                if hasattr(tensor, "weight_loader"):
                    tensor.weight_loader = _get_original_loader(tensor)
        yield
    finally:
        for layer in model.modules():
            put_back(layer)
        vars(model)["_do_torchao_reload"] = getattr(model, "_original_do_torchao_reload", False)


def tensors_of(layer: Module) -> Tensors:
    """The layer's own parameters and buffers that a checkpoint may fill, by name."""
    return {name: tensor for name, tensor in get_layer_tensors(layer).items() if name not in SKIP_LOAD_TENSORS}


def tensors_in_use(layer: Module) -> Tensors:
    """The same while ``as_loaded`` has replaced them: the ones that the kernels read."""
    kept = get_layerwise_info(layer).kernel_tensors
    return tensors_of(layer) if kept is None else {**kept[0], **kept[1]}


def take_out(layer: Module, device: torch.device, kept: Sequence[str]) -> None:
    """Give the layer memory for what its loaders fill, and set aside the tensors that the kernels read.

    ``kept``: names of tensors that nothing fills; they have the values that the kernels read.
    """
    info = get_layerwise_info(layer)
    info.kernel_tensors = get_layer_params_buffers(layer)
    info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
    restore_layer_on_meta(layer, info)
    initialize_online_processing(layer)
    with device:
        materialize_layer(layer, info)
    in_use = tensors_in_use(layer)
    for name in kept:
        getattr(layer, name).data.copy_(in_use[name])


def process(layer: Module) -> None:
    """Process what was loaded into the layer, copy it to where the kernels read it, and put these tensors back.

    Frees what was loaded: the wrappers of its loaders refer to it in cycles, which Python collects much later.
    """
    loaded = [tensor.data.untyped_storage() for tensor in tensors_of(layer).values()]
    _layerwise_process(layer, get_layerwise_info(layer))
    in_use = {tensor.data.untyped_storage().data_ptr() for tensor in tensors_of(layer).values()}
    for storage in loaded:
        if storage.data_ptr() not in in_use:
            storage.resize_(0)


def put_back(layer: Module) -> None:
    """Put the tensors that the kernels read back as they were. No effect on a layer that is complete."""
    info = get_layerwise_info(layer)
    if info.can_load():
        if info.kernel_tensors is not None:
            _place_kernel_tensors(layer, info)
        info.reset()


def why_processed(layer: Module) -> str | None:
    """What vLLM makes of a layer's tensors after loading them; None if its kernels read them as they were loaded."""
    method = getattr(layer, "quant_method", None)
    if not isinstance(method, QuantizeMethodBase):
        return None
    kind: Any = type(method)
    if kind.process_weights_after_loading is QuantizeMethodBase.process_weights_after_loading:
        return None
    if kind in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
        if current_platform.is_cuda_alike():
            return None
        if current_platform.is_cpu() and getattr(layer, "cpu_linear", None) is torch.nn.functional.linear:
            return None
    return f"{kind.__name__} processes {type(layer).__name__} after loading"


def is_attention(layer: Module) -> bool:
    """Whether vLLM processes this layer after all others, whose weights it may read."""
    return bool(is_deferred_attention_layer(layer))


def reads_weights(layer: Module) -> bool:
    """Whether what vLLM makes of this attention layer may depend on weights; else its scales are all it makes."""
    kind, impl = type(layer), type(getattr(layer, "impl", None))
    is_plain = getattr(kind, "process_weights_after_loading", None) is Attention.process_weights_after_loading
    makes = getattr(impl, "process_weights_after_loading", None)
    return not is_plain or makes is not AttentionImplBase.process_weights_after_loading
