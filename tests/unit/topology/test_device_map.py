"""Device maps: the forms they are given in, what results take, what is generated and what is refused."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from raytorchrpc.config import GroupConfig
from raytorchrpc.errors import ConfigurationError
from raytorchrpc.group.formation import with_named_maps
from raytorchrpc.topology import device_map
from raytorchrpc.topology.device_map import DeviceMap, gpu_pairs, inverse, way_back
from tests.unit.clusters import a100s, member


def resolve(config: GroupConfig, endpoints: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The maps of each member to all, as a group decides them for members without handles."""
    config = with_named_maps(config, dict.fromkeys(endpoints))
    device_map.check(config, endpoints)
    maps = {a: {b: device_map.between(config, a, b, endpoints[a], endpoints[b]) for b in endpoints} for a in endpoints}
    return {a: {b: pairs for b, pairs in row.items() if pairs} for a, row in maps.items()}


# --- forms ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "maps"),
    [
        ("1_0_1, 2_0_2,0_0_0,1_1_0", {1: {0: 1, 1: 0}, 2: {0: 2}, 0: {0: 0}}),
        ("1_cpu_0,2_0_cpu, 2_1_0", {1: {"cpu": 0}, 2: {0: "cpu", 1: 0}}),
        (" ", {}),
    ],
)
def test_text_form(text: str, maps: dict[int, Any]) -> None:
    assert DeviceMap.parse(text).to_dict() == maps
    assert bool(DeviceMap.parse(text)) is bool(maps)


@pytest.mark.parametrize(
    ("text", "position", "entry"),
    [
        ("1_0", 1, "1_0"),
        ("1_0_1,", 2, ""),
        ("1_0_1,2_0_x", 2, "2_0_x"),
        ("1_0_1,2-0-1", 2, "2-0-1"),
        ("1_0_-1", 1, "1_0_-1"),
        ("1_0_1,,2_0_1", 2, ""),
        ("1_0_1_2", 1, "1_0_1_2"),
        ("1_cpu_x", 1, "1_cpu_x"),
        ("cpu_0_1", 1, "cpu_0_1"),
        ("1_0_1 2_0_2", 1, "1_0_1 2_0_2"),
    ],
)
def test_malformed_text_says_where_and_what_was_expected(text: str, position: int, entry: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        DeviceMap.parse(text)
    assert f"entry {position} ({entry!r})" in str(caught.value)
    assert "<peer rank>_<local gpu>_<peer gpu>" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1_0_1,2_0_2,1_0_2", r"entry 3 \('1_0_2'\): GPU 0 is mapped to both GPU 1 and GPU 2 of peer 1"),
        ("1_cpu_0,1_cpu_1", r"entry 2 \('1_cpu_1'\): the CPU is mapped to both GPU 0 and GPU 1 of peer 1"),
    ],
)
def test_one_device_cannot_go_to_two_of_a_peer(text: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        DeviceMap.parse(text)


@pytest.mark.parametrize(
    ("pairs", "read"),
    [
        *((pairs, {0: 1}) for pairs in ({0: 1}, {"0": "1"}, {"cuda:0": "cuda:1"})),
        ({torch.device("cuda:0"): torch.device("cuda:1")}, {0: 1}),
        *((pairs, {"cpu": 0}) for pairs in ({"cpu": 0}, {torch.device("cpu"): "cuda:0"})),
        ({" cpu": torch.device("cuda:0")}, {"cpu": 0}),
        ({"cpu": "cpu", 0: "cpu"}, {0: "cpu"}),  # what stays on the CPU needs no entry
        ({"cpu": "cpu"}, None),
    ],
)
def test_dict_form_takes_every_way_to_name_a_device(pairs: dict[Any, Any], read: Any) -> None:
    assert DeviceMap.from_dict({"learner": pairs}).to_dict().get("learner") == read


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"b": {"gpu": 0}}, "peer 'b': 'gpu' is not a CUDA device with an index .0, 'cuda:0'., nor 'cpu'"),
        ({"b": {"cpu": 0, torch.device("cpu"): 1}}, "peer 'b': the CPU is mapped to both GPU 0 and GPU 1"),
        ({"b": {"cpu:0": 0}}, "'cpu:0' is not a CUDA device"),
        ({"b": {torch.device("cuda"): 0}}, "is not a CUDA device with an index"),
        ({"b": {torch.device("cpu", 0): 0}}, "is not a CUDA device"),
        ({"b": {0: -1}}, "-1 is not a CUDA device"),
        ({"b": {True: 0}}, "True is not a CUDA device"),
        ({"b": {0: 1, "cuda:0": 0}}, "peer 'b': GPU 0 is mapped to both GPU 1 and GPU 0"),
        ({"b": [0, 1]}, "peer 'b': expected {local gpu: peer gpu}"),
        (["1_0_1"], r"a device map is .* or {peer: {local gpu: peer gpu}}, not \['1_0_1'\]"),
    ],
)
def test_malformed_dict_names_the_peer(value: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        DeviceMap.from_dict(value)


def test_a_map_is_a_value() -> None:
    one = DeviceMap.parse("1_0_1,2_cpu_2")
    other = DeviceMap.from_dict({2: {"cpu": "cuda:2"}, 1: {0: 1}})
    assert one == other == pickle.loads(pickle.dumps(one)) and hash(one) == hash(other)
    assert one != DeviceMap.parse("1_0_1") and one != "1_0_1,2_cpu_2"
    one.to_dict()[1][0] = 5
    assert one == other
    with pytest.raises(AttributeError, match="cannot assign"):
        one.anything = 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("pairs", "back"),
    [
        ({0: 1, 1: 0}, {1: 0, 0: 1}),
        ({"cpu": 0}, {0: "cpu"}),
        ({"cpu": 0, 1: 2}, {0: "cpu", 2: 1}),
        ({"cpu": 0, 1: 0}, {0: 1}),  # what is on a GPU goes back to one
        ({0: "cpu"}, {}),  # a CPU result stays one
        ({0: "cpu", 1: 1}, {1: 1}),
        ({}, {}),
    ],
)
def test_the_way_of_results(pairs: dict[Any, Any], back: dict[Any, Any]) -> None:
    assert way_back(pairs) == back


def test_lanes_are_told_of_gpus_alone() -> None:
    assert gpu_pairs({"cpu": 0, 0: "cpu", 1: 2}) == {1: 2}
    assert inverse({0: 1, 1: 0, 2: 5}) == {1: 0, 0: 1, 5: 2}
    with pytest.raises(ConfigurationError, match="no inverse"):
        inverse({0: 1, 2: 1})


# --- generated maps ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("local", "peer", "local_devices", "expected"),
    [
        (1, 1, None, {0: 0}),
        (2, 4, None, {0: 0, 1: 1}),
        (4, 2, None, {0: 0, 1: 1}),  # GPUs 2 and 3 would share a target, which torchrpc refuses
        (8, 8, (2, 5), {2: 2, 5: 5}),
        (8, 2, (2, 5), {2: 0, 5: 1}),
        (4, 2, (1, 2, 3), {1: 1, 2: 0}),
        (2, 2, (1, 7), {1: 1}),
        (0, 4, None, {}),
        (4, 0, None, {}),
        (member(cuda=True, gpus=a100s(2)), member(cuda=True, gpus=a100s(2), wants_gpu=False), None, {}),
        (member(cuda=True, gpus=a100s(2), wants_gpu=False), member(cuda=True, gpus=a100s(2)), None, {}),
    ],
)
def test_auto(local: Any, peer: Any, local_devices: tuple[int, ...] | None, expected: dict[int, int]) -> None:
    device_map = DeviceMap.auto(local, {"peer": peer}, local_devices=local_devices)
    assert device_map.to_dict().get("peer", {}) == expected


# --- the maps of a group -------------------------------------------------------------------------------------

WHOLE = {0: 0, 1: 1}


@pytest.mark.parametrize(
    ("values", "gpus", "expected"),
    [
        ({}, {"a": 2, "b": 1, "c": 0}, {"a": {"a": WHOLE, "b": {0: 0}}, "b": {"a": {0: 0}, "b": {0: 0}}, "c": {}}),
        ({"local_devices": (1,)}, {"a": 2, "b": 2}, {"a": {"a": {1: 1}, "b": {1: 1}}}),
        (
            {"device_maps": {"a": "1_0_1", "b": DeviceMap.parse("0_0_1"), "c": {"0": {"0": "cuda:1"}}}},
            dict.fromkeys("abcd", 2),
            {"a": {"b": {0: 1}}, "b": {"a": {0: 1}}, "c": {"a": {0: 1}}, "d": dict.fromkeys("abcd", WHOLE)},
        ),
        # A name that looks like a rank is a name.
        ({"device_maps": {"1": {"0": {0: 1}}}}, {"1": 1, "0": 2}, {"1": {"0": {0: 1}}}),
        # A result takes the inverse of its request's map, so the two directions never meet.
        ({"device_maps": {"a": "1_0_1", "b": "0_0_0"}}, {"a": 1, "b": 2}, {"a": {"b": {0: 1}}, "b": {"a": {0: 0}}}),
        ({"device_maps": {"a": "0_0_0,0_1_1,1_1_0", "b": {"a": {0: 1}}}}, {"a": 2, "b": 1}, {"b": {"a": {0: 1}}}),
        ({"device_maps": {"a": {"b": {"cpu": 0}}}}, {"a": 0, "b": 1}, {"a": {"b": {"cpu": 0}}, "b": {"b": {0: 0}}}),
        (
            {"device_maps": {"c": "0_cpu_1,1_cpu_0", "a": "2_0_cpu,2_1_cpu,1_cpu_0,1_0_0"}},
            {"a": 2, "b": 1, "c": 0},
            {"c": {"a": {"cpu": 1}, "b": {"cpu": 0}}, "a": {"c": {0: "cpu", 1: "cpu"}, "b": {"cpu": 0, 0: 0}}},
        ),
    ],
)
def test_given_maps_are_taken_and_the_others_generated(values: Any, gpus: dict[str, Any], expected: Any) -> None:
    maps = resolve(GroupConfig(**values), gpus)
    assert list(maps) == list(gpus)
    assert {name: maps[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("maps", "said"),
    [
        ({"a": {"b": {2: 0}}}, "device map of a to b, entry 2 -> 0: a has no GPU 2 .it sees 2"),
        ({"a": {"b": {0: 1}}}, "device map of a to b, entry 0 -> 1: b has no GPU 1 .it sees 1"),
        ({"a": "1_0_1"}, "device map of a to b, entry 0 -> 1: b has no GPU 1"),
        ({"b": {"a": {0: 0}, "c": {0: 0}}}, "device map of b to c.*c has no GPU 0"),
        ({"a": {"d": {0: 0, 1: 0}}}, "device map of a to d, entry 1 -> 0: GPU 0 of d is already the target"),
        ({"a": {"a": {0: 1}}}, "device map of a to a, entry 0 -> 1: a member maps to itself only as 0 -> 0"),
        ({"a": {"e": {0: 0}}}, r"e has no GPU 0 \(its actor asked Ray for no GPU\)"),
        # crossing
        ({"a": {"c": {"cpu": 0}}}, "device map of a to c, entry cpu -> 0: c has no GPU 0 .it sees 0"),
        ({"c": {"a": {0: "cpu"}}}, "device map of c to a, entry 0 -> cpu: c has no GPU 0"),
        ({"a": {"b": {"cpu": 1}}}, "device map of a to b, entry cpu -> 1: b has no GPU 1"),
        ({"a": "0_cpu_0"}, "device map of a to a, entry cpu -> 0: a member maps to itself only as cpu -> cpu"),
        *(
            ({"a": {"d": pairs}}, r"a to d, entry 0 -> cpu: CPU tensors already arrive on GPU 1 .cpu -> 1.")
            for pairs in ({"cpu": 1, 0: "cpu"}, {0: "cpu", "cpu": 1})
        ),
        # who
        ({"a": {"nobody": {0: 0}}}, "device map of a: 'nobody' is not in the group; its members: a .0., b .1., c .2."),
        ({"a": "5_0_0"}, "device map of a: 5 is not in the group"),
        ({"nobody": {"a": {0: 0}}}, "device_maps: 'nobody' is not in the group; its members: a"),
        ({"a": "1_0_0", "0": "1_0_0"}, "'a' is given twice"),
        ({"a": {"b": {0: 0}, "1": {1: 0, 0: 1}}}, "GPU 0 is mapped to both GPU 0 and GPU 1 of peer 'b'"),
        # what
        ({"a": "1_0"}, r"device_maps\['a'\]: device map entry 1 .'1_0'. is malformed"),
        ({"a": 7}, r"device_maps\['a'\]: .*not 7"),
    ],
)
def test_maps_that_cannot_work_are_refused(maps: dict[str, Any], said: str) -> None:
    members = {"a": 2, "b": 1, "c": 0, "d": 2, "e": member(1, cuda=True, gpus=a100s(1), wants_gpu=False)}
    with pytest.raises(ConfigurationError, match=said):
        resolve(GroupConfig(device_maps=maps), members)


def test_local_devices_that_no_member_has_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"local_devices=.5,.: no member has GPU 5 .the most any of them sees"):
        resolve(GroupConfig(local_devices=(5,)), {"a": 2, "b": 2})
