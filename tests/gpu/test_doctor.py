"""The doctor where there are GPUs."""

from __future__ import annotations

import pytest
import torch

from raytorchrpc.doctor.collector import gather
from raytorchrpc.doctor.examination import examine_evidence


@pytest.mark.gpu
def test_gpus_are_found_and_nothing_is_said_against_them() -> None:
    evidence = gather(node_ip="127.0.0.1")
    assert len(evidence.endpoint.gpus) == torch.cuda.device_count()
    assert evidence.cuda_works and evidence.cuda_driver
    found = {finding.id: finding.level for finding in examine_evidence(evidence)}
    assert found["gpu"] == "ok"
    assert not {"gpu-none", "gpu-cuda-fails", "gpu-not-in-container"} & found.keys()


@pytest.mark.gpu(2)
def test_the_ways_between_gpus_are_told() -> None:
    evidence = gather(node_ip="127.0.0.1")
    count = torch.cuda.device_count()
    assert {(link.a, link.b) for link in evidence.links} == {(a, b) for b in range(count) for a in range(b)}
    access = all(torch.cuda.can_device_access_peer(link.a, link.b) for link in evidence.links)
    found = {finding.id for finding in examine_evidence(evidence)}
    assert ("gpu-links" in found) is access and ("gpu-no-peer-access" in found) is not access
