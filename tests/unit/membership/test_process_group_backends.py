"""Which members can have a process group over NCCL, from what they published when they joined."""

from __future__ import annotations

import pytest

from raytorchrpc.errors import ConfigurationError
from raytorchrpc.group.process_groups import check_backend, check_encryption
from tests.unit import clusters


def test_nccl_takes_members_with_a_gpu_each() -> None:
    check_backend("nccl", clusters.one_host_two_gpus())


def test_gloo_takes_anybody() -> None:
    check_backend("gloo", clusters.one_host(3))


def test_nccl_names_the_members_without_a_gpu() -> None:
    mixed = {**clusters.one_host_two_gpus(), "learner": clusters.member(7)}
    with pytest.raises(ConfigurationError, match=r"none in learner \(.*num_gpus=1.*backend='gloo'"):
        check_backend("nccl", mixed)


def test_nccl_names_two_members_on_one_gpu() -> None:
    (gpu,) = clusters.a100s(1)
    both = clusters.group(*(clusters.member(n, cuda=True, gpus=(gpu,)) for n in range(2)))
    with pytest.raises(ConfigurationError, match=r"worker_0 and worker_1 are on one GPU"):
        check_backend("nccl", both)


@pytest.mark.parametrize("backend", ["mpi", "NCCL", "", None, 3])
def test_another_backend_is_refused(backend: object) -> None:
    with pytest.raises(ConfigurationError, match="'gloo' or 'nccl', not"):
        check_backend(backend, {})


def test_a_group_that_encrypts_has_process_groups_within_a_host_alone() -> None:
    check_encryption("gloo", clusters.one_host(3))
    with pytest.raises(ConfigurationError, match=r"'gloo' does not encrypt.* worker_0 and worker_1 share no network"):
        check_encryption("gloo", clusters.two_hosts())
