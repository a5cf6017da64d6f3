from __future__ import annotations

import pickle

import pytest

from raytorchrpc.config import GroupConfig
from raytorchrpc.errors import ConfigurationError, RayTorchRpcError


def test_defaults_need_nothing() -> None:
    config = GroupConfig()
    assert config.rpc_timeout_s == 60
    assert config.lanes is None and config.device_maps is None and config.transports is None


def test_is_immutable_and_survives_a_pickle() -> None:
    config = GroupConfig(lanes=("-socket",), rpc_timeout_s=3, device_maps={"a": "1_0_0"})
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(ValueError, match="frozen"):
        config.rpc_timeout_s = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"rpc_timeout_s": 0}, "rpc_timeout_s.*greater than 0"),
        ({"rpc_timeout_s": "soon"}, "rpc_timeout_s.*number"),
        ({"torchrpc_threads": 1}, "torchrpc_threads.*greater than or equal to 2"),
        ({"lanes": ("carrier-pigeon",)}, "unknown lane 'carrier-pigeon'; known lanes: .*torchrpc"),
        ({"lanes": ("-pigeon",)}, "unknown lane '-pigeon'"),
        ({"lanes": ("socket", "-socket")}, "'socket' is both asked for and forbidden"),
        ({"local_devices": (0, -1)}, "-1 is not a CUDA device index"),
        ({"local_devices": ("gpu",)}, "local_devices.*integer"),
        ({"timeout": 3}, "timeout.*not permitted"),
    ],
)
def test_bad_values_name_the_field_and_the_problem(values: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as caught:
        GroupConfig(**values)
    assert isinstance(caught.value, RayTorchRpcError) and isinstance(caught.value, ValueError)


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


def test_from_env_reads_the_process_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYTORCHRPC_RPC_TIMEOUT_S", "7")
    assert GroupConfig.from_env().rpc_timeout_s == 7


def test_code_wins_over_the_environment() -> None:
    assert GroupConfig.from_env({"RAYTORCHRPC_RPC_TIMEOUT_S": "2"}, rpc_timeout_s=9).rpc_timeout_s == 9


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (
            {"RAYTORCHRPC_TIMEOUT": "3"},
            "RAYTORCHRPC_TIMEOUT is not a setting; known: .*RAYTORCHRPC_RPC_TIMEOUT_S",
        ),
        ({"RAYTORCHRPC_DEVICE_MAPS": "1_0_1"}, "RAYTORCHRPC_DEVICE_MAPS is not JSON"),
        ({"RAYTORCHRPC_LOCAL_DEVICES": "0;1"}, "local_devices"),
        ({"RAYTORCHRPC_RPC_TIMEOUT_S": "never"}, "rpc_timeout_s"),
    ],
)
def test_bad_environment_is_refused(environ: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        GroupConfig.from_env(environ)
