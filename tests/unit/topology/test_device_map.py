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


def resolve(config: GroupConfig, members: list[str], endpoints: dict[str, Any]) -> dict[str, DeviceMap]:
    """As a group does, for members without handles."""
    return device_map.resolve(with_named_maps(config, dict.fromkeys(members)), members, endpoints)


def check(maps: dict[str, Any], members: dict[str, Any]) -> None:
    resolve(GroupConfig(device_maps=maps), list(members), members)


# -- forms ---------------------------------------------------------------------------------------------------


def test_text_form() -> None:
    device_map = DeviceMap.parse("1_0_1, 2_0_2,0_0_0,1_1_0")
    assert device_map.to_dict()[1] == {0: 1, 1: 0}
    assert device_map.to_dict()[2] == {0: 2}
    assert device_map.to_dict()[0] == {0: 0}
    assert device_map.to_dict().get(7) is None
    assert not DeviceMap.parse(" ")


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


def test_one_gpu_cannot_go_to_two_of_a_peer() -> None:
    with pytest.raises(ConfigurationError, match=r"entry 3 \('1_0_2'\): GPU 0 is already mapped to GPU 1"):
        DeviceMap.parse("1_0_1,2_0_2,1_0_2")


@pytest.mark.parametrize(
    "pairs", [{0: 1}, {"0": "1"}, {"cuda:0": "cuda:1"}, {torch.device("cuda:0"): torch.device("cuda:1")}]
)
def test_dict_form_takes_every_way_to_name_a_gpu(pairs: dict[Any, Any]) -> None:
    assert DeviceMap.from_dict({"learner": pairs}).to_dict()["learner"] == {0: 1}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"b": {"gpu": 0}}, "peer 'b': 'gpu' is not a CUDA device with an index .0, 'cuda:0'., nor 'cpu'"),
        ({"b": {"cpu": 0, torch.device("cpu"): 1}}, "peer 'b': the CPU is mapped twice"),
        ({"b": {"cpu:0": 0}}, "'cpu:0' is not a CUDA device"),
        ({"b": {torch.device("cuda"): 0}}, "is not a CUDA device with an index"),
        ({"b": {torch.device("cpu", 0): 0}}, "is not a CUDA device"),
        ({"b": {0: -1}}, "-1 is not a CUDA device"),
        ({"b": {True: 0}}, "True is not a CUDA device"),
        ({"b": {0: 1, "cuda:0": 0}}, "peer 'b': GPU 0 is mapped twice"),
        ({"b": [0, 1]}, "peer 'b': expected {local gpu: peer gpu}"),
    ],
)
def test_malformed_dict_names_the_peer(value: dict[Any, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        DeviceMap.from_dict(value)


def test_equality_hash_and_pickle() -> None:
    one = DeviceMap.parse("1_0_1,2_0_2")
    other = DeviceMap.from_dict({2: {"cuda:0": 2}, 1: {0: 1}})
    assert one == other and hash(one) == hash(other)
    assert one != DeviceMap.parse("1_0_1") and one != "1_0_1,2_0_2"
    assert pickle.loads(pickle.dumps(one)) == one
    with pytest.raises(AttributeError, match="immutable"):
        one.anything = 1  # type: ignore[attr-defined]


def test_what_is_handed_out_cannot_change_the_map() -> None:
    device_map = DeviceMap.parse("1_0_1")
    device_map.to_dict()[1][0] = 5
    assert device_map.to_dict()[1] == {0: 1}


def test_inverse() -> None:
    assert inverse({0: 1, 1: 0, 2: 5}) == {1: 0, 0: 1, 5: 2}
    with pytest.raises(ConfigurationError, match="no inverse"):
        inverse({0: 1, 2: 1})


# -- crossing to and from the CPU --------------------------------------------------------------------------------


def test_text_form_with_the_cpu() -> None:
    device_map = DeviceMap.parse("1_cpu_0,2_0_cpu, 2_1_0")
    assert device_map.to_dict()[1] == {"cpu": 0}
    assert device_map.to_dict()[2] == {0: "cpu", 1: 0}
    with pytest.raises(
        ConfigurationError, match=r"entry 2 \('1_cpu_1'\): the CPU is already mapped to GPU 0 of peer 1"
    ):
        DeviceMap.parse("1_cpu_0,1_cpu_1")


@pytest.mark.parametrize("pairs", [{"cpu": 0}, {torch.device("cpu"): "cuda:0"}, {" cpu": torch.device("cuda:0")}])
def test_dict_form_takes_every_way_to_name_the_cpu(pairs: dict[Any, Any]) -> None:
    assert DeviceMap.from_dict({"learner": pairs}).to_dict()["learner"] == {"cpu": 0}


def test_what_stays_on_the_cpu_needs_no_entry() -> None:
    assert not DeviceMap.from_dict({"b": {"cpu": "cpu"}})
    assert DeviceMap.from_dict({"b": {"cpu": "cpu", 0: "cpu"}}).to_dict() == {"b": {0: "cpu"}}


def test_a_map_with_the_cpu_pickles_and_compares() -> None:
    one = DeviceMap.parse("1_cpu_0")
    assert pickle.loads(pickle.dumps(one)) == one == DeviceMap.from_dict({1: {"cpu": "0"}})
    assert hash(one) == hash(DeviceMap.from_dict({1: {"cpu": 0}}))


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


@pytest.mark.parametrize(
    ("owner", "text", "said"),
    [
        ("a", {"c": {"cpu": 0}}, "device map of a to c, entry cpu -> 0: c has no GPU 0 .it sees 0"),
        ("c", {"a": {0: "cpu"}}, "device map of c to a, entry 0 -> cpu: c has no GPU 0"),
        ("a", {"b": {"cpu": 1}}, "device map of a to b, entry cpu -> 1: b has no GPU 1"),
        ("a", "0_cpu_0", "device map of a to a, entry cpu -> 0: a member maps to itself only as cpu -> cpu"),
        ("a", {"d": {"cpu": 1, 0: "cpu"}}, r"a to d, entry 0 -> cpu: CPU tensors already arrive on GPU 1 .cpu -> 1."),
        ("a", {"d": {0: "cpu", "cpu": 1}}, r"a to d, entry 0 -> cpu: CPU tensors already arrive on GPU 1 .cpu -> 1."),
    ],
)
def test_validate_names_what_cannot_cross(owner: str, text: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        check({owner: text}, {"a": 2, "b": 1, "c": 0, "d": 2})


def test_validate_accepts_what_crosses() -> None:
    members = {"a": 2, "b": 1, "c": 0}
    check({"c": DeviceMap.parse("0_cpu_1,1_cpu_0"), "a": DeviceMap.parse("2_0_cpu,2_1_cpu,1_cpu_0,1_0_0")}, members)


def test_given_maps_may_cross_and_the_others_are_generated() -> None:
    maps = resolve(GroupConfig(device_maps={"actor": {"learner": {"cpu": 0}}}), ["actor", "learner"],
                   {"actor": 0, "learner": 1})  # fmt: skip
    assert maps["actor"].to_dict() == {"learner": {"cpu": 0}}
    assert maps["learner"].to_dict() == {"learner": {0: 0}}


# -- generated maps ------------------------------------------------------------------------------------------


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
    ],
)
def test_auto(local: int, peer: int, local_devices: tuple[int, ...] | None, expected: dict[int, int]) -> None:
    device_map = DeviceMap.auto(local, {"peer": peer}, local_devices=local_devices)
    assert device_map.to_dict().get("peer", {}) == expected


def test_auto_leaves_out_an_actor_that_asked_for_no_gpu_but_sees_some() -> None:
    seeing = member(0, cuda=True, gpus=a100s(2), wants_gpu=False)
    using = member(1, cuda=True, gpus=a100s(2))
    assert DeviceMap.auto(using, {"seeing": seeing}).to_dict().get("seeing") is None
    assert DeviceMap.auto(seeing, {"using": using}).to_dict().get("using") is None


# -- validation ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("owner", "text", "said"),
    [
        ("a", {"b": {2: 0}}, "device map of a to b, entry 2 -> 0: a has no GPU 2 .it sees 2"),
        ("a", {"b": {0: 1}}, "device map of a to b, entry 0 -> 1: b has no GPU 1 .it sees 1"),
        ("a", "1_0_1", "device map of a to b, entry 0 -> 1: b has no GPU 1"),
        ("b", {"a": {0: 0}, "c": {0: 0}}, "device map of b to c.*c has no GPU 0"),
        ("a", {"d": {0: 0, 1: 0}}, "device map of a to d, entry 1 -> 0: GPU 0 of d is already the target"),
        (
            "a",
            {"nobody": {0: 0}},
            "device map of a: 'nobody' is not in the group; its members: a .0., b .1., c .2., d .3.",
        ),
        ("a", "4_0_0", "device map of a: 4 is not in the group"),
        ("a", {"a": {0: 1}}, "device map of a to a, entry 0 -> 1: a member maps to itself only as 0 -> 0"),
        ("nobody", {"a": {0: 0}}, "device_maps: 'nobody' is not in the group; its members: a"),
    ],
)
def test_validate_names_member_peer_and_entry(owner: str, text: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        check({owner: text}, {"a": 2, "b": 1, "c": 0, "d": 2})


def test_validate_accepts_names_ranks_and_the_identity() -> None:
    check({"a": DeviceMap.parse("0_0_0,0_1_1,1_1_0"), "b": DeviceMap.from_dict({"a": {0: 1}})}, {"a": 2, "b": 1})


def test_validate_says_when_the_actor_asked_for_no_gpu() -> None:
    members = {"a": 1, "b": member(1, cuda=True, gpus=a100s(1), wants_gpu=False)}
    with pytest.raises(ConfigurationError, match=r"b has no GPU 0 \(its actor asked Ray for no GPU\)"):
        check({"a": DeviceMap.parse("1_0_0")}, members)


# -- resolution ----------------------------------------------------------------------------------------------


def test_resolve_generates_a_map_for_every_pair() -> None:
    maps = resolve(GroupConfig(), ["a", "b", "c"], {"a": 2, "b": 1, "c": 0})
    assert maps["a"].to_dict() == {"a": {0: 0, 1: 1}, "b": {0: 0}}
    assert maps["b"].to_dict() == {"a": {0: 0}, "b": {0: 0}}
    assert not maps["c"]


def test_resolve_takes_every_form_and_leaves_the_others_generated() -> None:
    config = GroupConfig(device_maps={"a": "1_0_1", "b": DeviceMap.parse("0_0_1"), "c": {"0": {"0": "cuda:1"}}})
    maps = resolve(config, ["a", "b", "c", "d"], dict.fromkeys("abcd", 2))
    assert maps["a"].to_dict() == {"b": {0: 1}}
    assert maps["b"].to_dict() == {"a": {0: 1}}
    assert maps["c"].to_dict() == {"a": {0: 1}}
    assert maps["d"].to_dict()["a"] == {0: 0, 1: 1}


def test_a_name_that_looks_like_a_rank_is_a_name() -> None:
    maps = resolve(GroupConfig(device_maps={"1": {"0": {0: 1}}}), ["1", "0"], {"1": 1, "0": 2})
    assert maps["1"].to_dict() == {"0": {0: 1}}


def test_both_directions_may_differ() -> None:
    # A result takes the inverse of its request's map, so these two never meet.
    maps = resolve(GroupConfig(device_maps={"a": "1_0_1", "b": "0_0_0"}), ["a", "b"], {"a": 1, "b": 2})
    assert (maps["a"].to_dict()["b"], maps["b"].to_dict()["a"]) == ({0: 1}, {0: 0})


def test_resolve_limits_generated_maps_to_local_devices() -> None:
    maps = resolve(GroupConfig(local_devices=(1,)), ["a", "b"], {"a": 2, "b": 2})
    assert maps["a"].to_dict()["b"] == {1: 1}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"device_maps": {"x": "0_0_0"}}, "device_maps: 'x' is not in the group; its members: a .0., b .1."),
        ({"device_maps": {"a": "1_0"}}, r"device_maps\['a'\]: device map entry 1 .'1_0'. is malformed"),
        ({"device_maps": {"a": 7}}, r"device_maps\['a'\]: .*not 7"),
        ({"device_maps": {"a": "1_0_3"}}, "device map of a to b, entry 0 -> 3: b has no GPU 3"),
        ({"device_maps": {"a": "1_0_0", "0": "1_0_0"}}, "'a' is given twice"),
        ({"device_maps": {"a": {"b": {0: 0}, "1": {0: 1}}}}, "GPU 0 is mapped to both GPU 0 and GPU 1 of b"),
        ({"local_devices": (5,)}, "local_devices=.5,.: no member has GPU 5 .the most any of them sees is 2"),
    ],
)
def test_resolve_refuses_what_cannot_work(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        resolve(GroupConfig(**values), ["a", "b"], {"a": 2, "b": 2})
