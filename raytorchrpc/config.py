"""What a user may choose about a group, checked before any process is touched."""

from __future__ import annotations

import ipaddress
import json
import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from raytorchrpc.errors import ConfigurationError
from raytorchrpc.lanes import registry

ENV_PREFIX = "RAYTORCHRPC_"


class GroupConfig(BaseModel):
    """Settings of one group; immutable, the same on every member.

    Every field can be given in the environment as ``RAYTORCHRPC_<FIELD>`` (see ``from_env``), so that a
    submitted job can be tuned without touching its code.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rpc_timeout_s: Annotated[float, Field(gt=0, le=86400)] = 60.0
    """Deadline of a call that names none, in seconds."""

    lanes: tuple[str, ...] | None = None
    """Lanes a route may use; None lets routing choose among raytorchrpc's own. A name with a leading ``-`` forbids that
    lane. A lane of another distribution (docs/howto/write-a-lane.md) is used only if it is named here, and is then
    preferred."""

    device_maps: dict[str, Any] | None = None
    """Device maps by member name: a ``DeviceMap``, its text form, or ``{peer: {local gpu: peer gpu}}``.
    ``{"actor": {"learner": {"cpu": 0}}}`` has the actor's CPU tensors arrive on the learner's ``cuda:0``,
    ``{"actor": {"learner": {0: "cpu"}}}`` its CUDA tensors on the learner's CPU. None generates one for every pair."""

    local_devices: tuple[int, ...] | None = None
    """Local CUDA indices that generated device maps may use; None means every visible one."""

    shm_bytes: Annotated[int, Field(ge=1 << 20)] | None = None
    """Most memory a member uses for CPU tensors on their way, in bytes, by shm and by nixl each; None takes a quarter
    of what it may use. Memory is taken as it is needed and kept warm until the group ends."""

    copy_threads: Annotated[int, Field(ge=1, le=64)] | None = None
    """Threads that share the copy of a large CPU tensor; None takes half the cores, 2 to 4."""

    max_calls_in_flight: Annotated[int, Field(ge=1)] = 10_000
    """Calls that a member may have under way to one peer: sent, and not answered. ``when_full`` says what happens to
    one more."""

    max_bytes_in_flight: Annotated[int, Field(ge=1)] | None = None
    """Bytes of their arguments, likewise; None takes a quarter of the memory that the member may use. A larger call
    goes when nothing else is under way."""

    when_full: Literal["block", "reject"] = "block"
    """``block``: the caller's thread waits until something has been answered, by the call's deadline at most; on an
    event loop, which must not wait, the call is rejected. ``reject``: PeerBusy at once."""

    interface: str | None = None
    """Network interface torchrpc listens on; None takes the one that holds the Ray node's address."""

    torchrpc_from: tuple[str, ...] = ()
    """Further addresses or networks (CIDR) from which torchrpc's listener takes connections. It asks nobody who he is,
    so it takes them from the members' hosts alone; ``("0.0.0.0/0", "::/0")`` is everybody. Needed where the network
    shows a member under an address that it does not have itself (NAT)."""

    always_tcp: bool = False
    """The socket and nng lanes use TCP also between members that Unix sockets could join: to see what that costs."""

    across_users: bool = False
    """Let members that run as different users of one host connect by Unix sockets. Without it, forming such a group
    fails, and a process of another user is refused there even if it has the group's secret."""

    tls: bool = False
    """Encrypt what members send each other over TCP, by TLS 1.3 with a key that the group makes for itself. Lanes that
    cannot encrypt (torchrpc, nccl, nixl) are left out between members that do not share a host's network, and with
    torchrpc RRefs and distributed autograd there. Forming the group needs ``pip install 'raytorchrpc[tls]'``."""

    transports: tuple[str, ...] | None = None
    """TensorPipe transports, forced on every member; None lets routing choose from evidence."""

    channels: tuple[str, ...] | None = None
    """TensorPipe channels, forced on every member; None lets routing choose from evidence."""

    torchrpc_threads: Annotated[int, Field(ge=2, le=256)] = 4
    """Size of torchrpc's own pool. It only carries messages; methods never run there."""

    metrics_period_s: Annotated[float, Field(ge=0.1, le=3600)] | None = None
    """How often, in seconds, what the members count is put where others see it: into Ray's metrics, from where the
    node's Prometheus endpoint has it, and for ``raytorchrpc top``. None: never. It costs each member a thread, and Ray
    a series for each pair and lane, which grows with the square of the group; so it is not on by itself."""

    @field_validator("lanes")
    @classmethod
    def _lanes_are_known(cls, lanes: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for lane in lanes or ():
            if not registry.is_known(lane.removeprefix("-")):
                raise ValueError(f"unknown lane {lane!r}; known lanes: {', '.join(registry.names())}")
            if not lane.startswith("-") and f"-{lane}" in (lanes or ()):
                raise ValueError(f"lane {lane!r} is both asked for and forbidden")
        return lanes

    @field_validator("torchrpc_from")
    @classmethod
    def _networks_are_valid(cls, texts: tuple[str, ...]) -> tuple[str, ...]:
        for text in texts:
            try:
                ipaddress.ip_network(text, strict=False)
            except ValueError:
                raise ValueError(f"{text!r} is neither an address nor a network such as 10.0.0.0/8") from None
        return texts

    @field_validator("local_devices")
    @classmethod
    def _local_devices_are_indices(cls, devices: tuple[int, ...] | None) -> tuple[int, ...] | None:
        for index in devices or ():
            if index < 0:
                raise ValueError(f"{index} is not a CUDA device index")
        return devices

    def __init__(self, **values: Any) -> None:
        # pydantic's own error is a ValueError subclass that cannot be raised or caught as one of ours.
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigurationError(_explain(error)) from error

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ, **overrides: Any) -> GroupConfig:
        """Read ``RAYTORCHRPC_*``: plain text, comma-separated lists, JSON for ``device_maps``.

        ``overrides`` win over the environment. A variable that names no field is an error, because a
        misspelt setting that is silently ignored costs more than it saves.
        """
        values: dict[str, Any] = {}
        for variable, text in environ.items():
            if not variable.startswith(ENV_PREFIX):
                continue
            field = variable.removeprefix(ENV_PREFIX).lower()
            if field not in cls.model_fields:
                known = ", ".join(ENV_PREFIX + name.upper() for name in cls.model_fields)
                raise ConfigurationError(f"{variable} is not a setting; known: {known}")
            values[field] = _parse(variable, field, text)
        return cls(**{**values, **overrides})


_LIST_FIELDS = {"lanes", "local_devices", "transports", "channels", "torchrpc_from"}


def _parse(variable: str, field: str, text: str) -> Any:
    if field in _LIST_FIELDS:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if field == "device_maps":
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigurationError(f"{variable} is not JSON: {error}") from error
    return text


def _explain(error: ValidationError) -> str:
    problems = (f"{'.'.join(map(str, item['loc'])) or 'config'}: {item['msg']}" for item in error.errors())
    return "GroupConfig: " + "; ".join(problems)
