"""The doctor where there are GPUs."""

from __future__ import annotations

import pytest
import torch

from raytorchrpc.doctor import NodeReport, Report
from tests.unit import command_line


def examined() -> NodeReport:
    (node,) = Report.model_validate_json(command_line.run("doctor", "--json").stdout).nodes
    return node


@pytest.mark.gpu
def test_gpus_are_found_and_nothing_is_said_against_them() -> None:
    node = examined()
    evidence = node.evidence
    assert len(evidence.endpoint.gpus) == torch.cuda.device_count()
    assert evidence.cuda_works and evidence.cuda_driver
    found = {finding.id: finding.level for finding in node.findings}
    assert found["gpu"] == "ok"
    assert not {"gpu-none", "gpu-cuda-fails", "gpu-not-in-container"} & found.keys()


@pytest.mark.gpu(2)
def test_the_ways_between_gpus_are_told() -> None:
    node = examined()
    evidence = node.evidence
    count = torch.cuda.device_count()
    assert {(link.a, link.b) for link in evidence.links} == {(a, b) for b in range(count) for a in range(b)}
    access = all(torch.cuda.can_device_access_peer(link.a, link.b) for link in evidence.links)
    found = {finding.id for finding in node.findings}
    assert ("gpu-links" in found) is access and ("gpu-no-peer-access" in found) is not access
