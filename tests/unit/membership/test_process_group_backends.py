"""Which members can have a process group over NCCL, from what they published when they joined."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from raytorchrpc.errors import ConfigurationError
from raytorchrpc.group.process_groups import check_backend, check_encryption
from tests.unit import clusters


def on_one_gpu() -> clusters.Cluster:
    (gpu,) = clusters.a100s(1)
    return clusters.group(*(clusters.member(n, cuda=True, gpus=(gpu,)) for n in range(2)))


WITHOUT_GPU = {**clusters.one_host_two_gpus(), "learner": clusters.member(7)}


@pytest.mark.parametrize(
    ("backend", "cluster", "said"),
    [
        ("nccl", clusters.one_host_two_gpus(), None),
        ("gloo", clusters.one_host(3), None),
        ("nccl", WITHOUT_GPU, r"none in learner \(.*num_gpus=1.*backend='gloo'"),
        ("nccl", on_one_gpu(), "worker_0 and worker_1 are on one GPU"),
        *((wrong, {}, "'gloo' or 'nccl', not") for wrong in ("mpi", "NCCL", "", None, 3)),
    ],
)
def test_a_backend_that_cannot_work_is_refused_with_the_members(
    backend: object, cluster: clusters.Cluster, said: str | None
) -> None:
    with nullcontext() if said is None else pytest.raises(ConfigurationError, match=said):
        check_backend(backend, cluster)


def test_a_group_that_encrypts_has_process_groups_within_a_host_alone() -> None:
    check_encryption("gloo", clusters.one_host(3))
    with pytest.raises(ConfigurationError, match=r"'gloo' does not encrypt.* worker_0 and worker_1 share no network"):
        check_encryption("gloo", clusters.two_hosts())
