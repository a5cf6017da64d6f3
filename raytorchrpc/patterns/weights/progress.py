"""Counts pulls and publishing of weights for the metrics, and records them as spans of a trace."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from raytorchrpc.calls.counters import PullCounter, StoreKey
from raytorchrpc.calls.member import LocalMember


class Publishing:
    """What ``publishing`` yields: set the version."""

    version = 0


@contextmanager
def pulling(local: LocalMember, store: StoreKey) -> Iterator[PullCounter]:
    """One pull. The caller sets the counter's ``version`` to what the pull returns."""
    tracer = local.tracer
    began = 0.0 if tracer is None else time.monotonic()
    pull, error = local.weights.begin_pull(store), None
    try:
        yield pull
    except BaseException as raised:
        error = type(raised).__name__  # the error itself would hold this frame, which would hold it
        raise
    finally:
        local.weights.end_pull(pull, error is not None)
        if tracer is not None:
            size = pull.in_vain + pull.brought
            about = {"version": pull.version, "bytes": size, "home": store[1]}
            tracer.span("pull", f"pull {store[0]}", began, about, error)


@contextmanager
def publishing(local: LocalMember, store: StoreKey, tensors: Mapping[str, torch.Tensor]) -> Iterator[Publishing]:
    """One publishing of these tensors. The caller sets ``version``."""
    tracer = local.tracer
    began = 0.0 if tracer is None else time.monotonic()
    publish, error = Publishing(), None
    size = sum(tensor.nbytes for tensor in tensors.values())
    try:
        yield publish
        local.weights.published(store, publish.version, size)
    except BaseException as raised:
        error = type(raised).__name__
        raise
    finally:
        if tracer is not None:
            about = {"version": publish.version, "bytes": size, "home": store[1]}
            tracer.span("publish", f"publish {store[0]}", began, about, error)
