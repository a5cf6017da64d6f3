"""Brings weights of a ``WeightStore`` into vLLM: ``LLM(..., weight_transfer_config={"backend": "raytorchrpc"})``.

``engine`` is the side of vLLM's workers, and ``trainer`` the one of the training process. vLLM loads both by the plugin
in ``raytorchrpc_vllm.py``.
"""
