from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest

import raytorchrpc as rtr
from raytorchrpc.calls.options import takes_timeout
from raytorchrpc.config import GroupConfig
from raytorchrpc.errors import ConfigurationError, RayTorchRpcError


def test_is_immutable_and_survives_a_pickle() -> None:
    config = GroupConfig(lanes=("-socket",), rpc_timeout_s=3, device_maps={"a": "1_0_0"})
    assert pickle.loads(pickle.dumps(config)) == config
    assert replace(config, rpc_timeout_s=4) == GroupConfig(**{**vars(config), "rpc_timeout_s": 4})
    with pytest.raises(ConfigurationError, match=r"GroupConfig is frozen: create another one with rpc_timeout_s=5$"):
        config.rpc_timeout_s = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"rpc_timeout_s": 0}, "rpc_timeout_s.*greater than 0"),
        ({"rpc_timeout_s": "soon"}, "rpc_timeout_s.*number"),
        ({"rpc_timeout_s": "30s"}, "rpc_timeout_s='30s' must be a valid number"),
        ({"torchrpc_threads": 1}, "torchrpc_threads=1 must be greater than or equal to 2"),
        ({"copy_threads": 1.5}, "copy_threads=1.5 must be a valid integer"),
        ({"metrics_period_s": 0.001}, "metrics_period_s=0.001 must be 0, or at least 0.1"),
        ({"tls": "maybe"}, "tls='maybe' must be a valid boolean"),
        ({"when_full": "drop"}, "when_full='drop' must be 'block' or 'reject'"),
        ({"device_maps": "1_0_0"}, "device_maps='1_0_0' must be a valid dict"),
        ({"lanes": ()}, r"lanes=\(\) must name a lane, or be None"),
        ({"lanes": "-shm"}, r"lanes='-shm' must be a list: write lanes=\[\"-shm\"\]"),
        ({"lanes": "socket, shm"}, r"write lanes=\[\"socket\", \"shm\"\]"),
        ({"lanes": [1]}, r"lanes\[0\]=1 must be a valid string"),
        ({"lanes": ["-smh"]}, r"unknown lane '-smh' \(did you mean 'shm'\?\); known lanes: socket, "),
        ({"lanes": ("carrier-pigeon",)}, "unknown lane 'carrier-pigeon'; known lanes: .*torchrpc"),
        ({"lanes": ("-pigeon",)}, "unknown lane '-pigeon'"),
        ({"lanes": ("socket", "-socket")}, "'socket' is both asked for and forbidden"),
        ({"local_devices": (0, -1)}, "-1 is not a CUDA device index"),
        ({"local_devices": ("gpu",)}, r"local_devices\[0\]='gpu' must be a valid integer"),
        ({"local_devices": "0,1"}, r"write local_devices=\[0, 1\]"),
        ({"local_devices": 0}, r"write local_devices=\[0\]"),
        ({"timeout": 3}, r"no setting is named 'timeout' \(did you mean 'rpc_timeout_s'\?\)$"),
        ({"shm": 3, "lane": 1}, r"'shm' \(did you mean 'shm_bytes'\?\); .*'lane' \(did you mean 'lanes'\?\)"),
        ({"zzz": 3}, "no setting is named 'zzz'; known: rpc_timeout_s, lanes, "),
        ({"shm_bytes": "lots"}, "shm_bytes='lots' must be a number of bytes, or text with a unit, such as '512MiB'"),
        ({"shm_bytes": "1KB"}, "shm_bytes='1KB' must be greater than or equal to 1048576"),
    ],
)
def test_bad_values_name_the_field_and_the_problem(values: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as caught:
        GroupConfig(**values)
    assert isinstance(caught.value, RayTorchRpcError) and isinstance(caught.value, ValueError)
    assert "Input should" not in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "size"),
    [("1GiB", 1 << 30), ("1.5 gib", 3 << 29), ("4GB", 4 * 10**9), ("512M", 512 * 10**6), ("2097152", 2 << 20)],
)
def test_sizes_may_have_units(text: str, size: int) -> None:
    assert GroupConfig(shm_bytes=text, max_bytes_in_flight=text) == GroupConfig(
        shm_bytes=size, max_bytes_in_flight=size
    )
    assert GroupConfig.from_env({"RAYTORCHRPC_SHM_BYTES": text}).shm_bytes == size


def test_from_env_reads_every_form() -> None:
    config = GroupConfig.from_env(
        {
            "RAYTORCHRPC_RPC_TIMEOUT_S": "2.5",
            "RAYTORCHRPC_LANES": "torchrpc, -socket",
            "RAYTORCHRPC_LOCAL_DEVICES": "0,2",
            "RAYTORCHRPC_INTERFACE": "eth1",
            "RAYTORCHRPC_DEVICE_MAPS": '{"learner": "1_0_1", "1": {"learner": {"0": 1}}}',
            "RAYTORCHRPC_TORCHRPC_THREADS": "8",
            "PATH": "/usr/bin",
        }
    )
    assert config == GroupConfig(
        rpc_timeout_s=2.5,
        lanes=("torchrpc", "-socket"),
        local_devices=(0, 2),
        interface="eth1",
        device_maps={"learner": "1_0_1", "1": {"learner": {"0": 1}}},
        torchrpc_threads=8,
    )


def test_code_wins_over_the_environment() -> None:
    assert GroupConfig.from_env({"RAYTORCHRPC_RPC_TIMEOUT_S": "2"}, rpc_timeout_s=9).rpc_timeout_s == 9


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (
            {"RAYTORCHRPC_TIMEOUT": "3"},
            r"RAYTORCHRPC_TIMEOUT is not a setting \(did you mean RAYTORCHRPC_RPC_TIMEOUT_S\?\)",
        ),
        ({"RAYTORCHRPC_SHM": "1GiB"}, r"did you mean RAYTORCHRPC_SHM_BYTES\?"),
        ({"RAYTORCHRPC_ZZZ": "3"}, "RAYTORCHRPC_ZZZ is not a setting; known: .*RAYTORCHRPC_RPC_TIMEOUT_S"),
        ({"RAYTORCHRPC_DEVICE_MAPS": "1_0_1"}, "RAYTORCHRPC_DEVICE_MAPS is not JSON"),
        ({"RAYTORCHRPC_LOCAL_DEVICES": "0;1"}, "RAYTORCHRPC_LOCAL_DEVICES='0;1': item '0;1' must be a valid integer"),
        ({"RAYTORCHRPC_LANES": "sockt"}, "RAYTORCHRPC_LANES='sockt': unknown lane 'sockt'"),
        ({"RAYTORCHRPC_RPC_TIMEOUT_S": "never"}, "RAYTORCHRPC_RPC_TIMEOUT_S='never' must be a valid number"),
    ],
)
def test_bad_environment_is_refused(environ: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        GroupConfig.from_env(environ)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rtr.init_group([], timeout_s=10), r"init_group takes timeout= in seconds, not timeout_s="),
        (
            lambda: rtr.init_group([], rpc_timeout_s=1),
            r"takes timeout= .*, not rpc_timeout_s=; GroupConfig has rpc_time",
        ),
        (lambda: rtr.rpc_sync("peer", timeout_s=10), r"rpc_sync takes timeout= "),
        (lambda: rtr.rpc_async("peer", rpc_timeout_s=10), r"rpc_async takes timeout= "),
        (lambda: rtr.Group.process_group(None, "gloo", collective_timeout_s=1), r"takes collective_timeout= "),
        (lambda: rtr.wait([], timeout_s=1), r"wait takes timeout= "),
    ],
)
def test_another_spelling_of_a_timeout_names_the_right_one(call: Callable[[], object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rtr.remote(rtr.Queue), r"remote decorates neither .* with @ray\.remote, .* with @raytorchrpc\.method"),
        (
            lambda: rtr.rpc_sync("peer", "update", 1),
            r"write rpc_sync\(target\)\.method\(\.\.\.\): .* @raytorchrpc",
        ),
        (lambda: rtr.rpc_async("peer", args=(1,)), r"'args'.*: write rpc_async\(target\)\.method\(\.\.\.\)"),
        (lambda: rtr.init_group("a", "b"), r"pass the actors in one list or dict, init_group\(\[a, b\]\)"),
        (lambda: rtr.Future(None).get(), r"no attribute 'get': use result\(\), wait\(\) or await"),
        (lambda: rtr.queue, r"no attribute 'queue' \(did you mean 'Queue'\?\)"),
        (lambda: GroupConfig(rpc_timeout_s="60"), r"rpc_timeout_s='60' is text: write rpc_timeout_s=60\.0"),
        (lambda: GroupConfig(tls="yes"), r"tls='yes' is text: write tls=True"),
    ],
)
def test_an_input_that_ray_or_torch_would_take_names_the_remedy(call: Callable[[], object], message: str) -> None:
    with pytest.raises((AttributeError, ConfigurationError, TypeError), match=message):
        call()


def test_an_error_inside_of_a_function_is_not_one_of_its_arguments() -> None:
    def fails(timeout: float) -> None:
        raise TypeError("inside")

    fails.__name__ = "rpc_sync"
    with pytest.raises(TypeError, match=r"^inside$"):
        takes_timeout(fails)(1)


def test_functions_do_not_name_their_unit() -> None:
    for name in rtr.__all__:
        public = getattr(rtr, name)
        functions = [public, *vars(public).values()] if inspect.isclass(public) else [public]
        for function in filter(inspect.isfunction, functions):
            if not function.__name__.startswith("_"):
                assert not [each for each in inspect.signature(function).parameters if each.endswith("_s")], function
