"""The settings of a group, validated before any process is contacted."""

from __future__ import annotations

import functools
import ipaddress
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from raytorchrpc.errors import ConfigurationError
from raytorchrpc.lanes import registry
from raytorchrpc.text import did_you_mean, explain, nearest, read_bytes

if TYPE_CHECKING:
    from pydantic import BaseModel, BeforeValidator, Field

    Bytes = Annotated[int, BeforeValidator(read_bytes)]

ENV_PREFIX = "RAYTORCHRPC_"


@dataclass(frozen=True, init=False)
class GroupConfig:
    """Settings of one group; immutable, the same on every member.

    Every field can be set in the environment as ``RAYTORCHRPC_<FIELD>`` (see ``from_env``), so a submitted job can be
    tuned without a change to its code.

    Examples:
        >>> config = rtr.GroupConfig(rpc_timeout_s=30, shm_bytes="4GiB")
        >>> config.shm_bytes
        4294967296
    """

    rpc_timeout_s: Annotated[float, Field(gt=0, le=86400)] = 60.0
    """Default deadline of a call, in seconds."""

    lanes: tuple[str, ...] | None = None
    """Lanes a route may use; None lets routing choose among raytorchrpc's own. A name with a leading ``-`` forbids that
    lane. A lane of another distribution (docs/howto/write-a-lane.md) is used only if it is named here, and is then
    preferred."""

    device_maps: dict[Any, Any] | None = None
    """Device maps by member: a ``DeviceMap``, its text form, or ``{peer: {local gpu: peer gpu}}``. Members and peers
    are names, ranks or actor handles. ``{"actor": {"learner": {"cpu": 0}}}`` has the actor's CPU tensors arrive on the
    learner's ``cuda:0``, ``{"actor": {"learner": {0: "cpu"}}}`` its CUDA tensors on the learner's CPU. None generates
    one for every pair."""

    local_devices: tuple[int, ...] | None = None
    """Local CUDA indices that generated device maps may use. None: all visible devices."""

    shm_bytes: Annotated[Bytes, Field(ge=1 << 20)] | None = None
    """The most memory that a member uses for CPU tensors in transit, for shm and for nixl each: a number of bytes, or
    text with a unit, such as ``"4GiB"`` (powers of 1024) or ``"4GB"`` (powers of 1000). None: a quarter of the memory
    that the process may use. It is allocated when needed and kept until the group ends."""

    near_adapters: bool = True
    """Have nixl use the one of several RDMA adapters that is nearest to a member's GPU, unless ``lanes`` names nixl or
    ``UCX_NET_DEVICES`` is set. False: UCX chooses."""

    copy_threads: Annotated[int, Field(ge=1, le=64)] | None = None
    """Threads that copy a CPU tensor of 8 MiB or more together. None: half the cores, 2 to 4."""

    max_calls_in_flight: Annotated[int, Field(ge=1)] = 10_000
    """Calls that a member may have in flight to one peer. ``when_full`` says what happens to further calls."""

    max_bytes_in_flight: Annotated[Bytes, Field(ge=1)] | None = None
    """Bytes of arguments in flight to one peer: a number, or text such as ``"64MiB"``. None: a quarter of the memory
    that the process may use. A larger call is sent when nothing else is in flight."""

    when_full: Literal["block", "reject"] = "block"
    """``block``: the caller's thread blocks until a call has been answered, at most until the deadline; on an event
    loop, which must not block, the call is rejected. ``reject``: raise PeerBusy at once."""

    interface: str | None = None
    """Network interface that torchrpc listens on. None: the one with the Ray node's address."""

    torchrpc: Literal["when needed", "at once"] = "when needed"
    """When torchrpc starts in a member: ``when needed``, for the first RRef, use of torch's own API or message over
    torchrpc, here or in a peer that connects, which takes about 0.1 s; or ``at once``, when the member joins."""

    torchrpc_from: tuple[str, ...] = ()
    """Addresses or networks (CIDR) from which torchrpc and gloo accept connections without asking whose they are.
    Otherwise they accept only connections that a member confirms to have made. A member behind address translation
    (NAT) cannot confirm its own, so list the translated addresses here, and nothing else."""

    always_tcp: bool = False
    """Use TCP for the socket and nng lanes even where Unix sockets would work, for instance to measure the
    difference."""

    across_users: bool = False
    """Let members that run as different users of one host connect by Unix sockets. Otherwise such a group cannot be
    formed, and a process of another user is refused even if it has the group's secret."""

    joinable_by: Literal["nobody", "children", "cluster"] = "children"
    """Which processes may join by themselves (``raytorchrpc.join``): those that a member's process has started,
    directly or not; any process of the Ray cluster, these included; or none."""

    tls: bool = False
    """Encrypt TCP connections between members by TLS 1.3, with a key that is created for the group. Lanes that
    cannot encrypt (torchrpc, nccl, nixl) are left out between members that do not share a host's network, and with
    torchrpc RRefs and distributed autograd there. Forming the group needs ``pip install '.[tls]'`` in a checkout."""

    transports: tuple[str, ...] | None = None
    """TensorPipe transports for every member. None: routing chooses."""

    channels: tuple[str, ...] | None = None
    """TensorPipe channels for every member. None: routing chooses."""

    torchrpc_threads: Annotated[int, Field(ge=2, le=256)] = 16
    """Size of torchrpc's thread pool; the default is torch's. Methods do not run there, but functions that members send
    each other by torch's own RPC API do: with fewer threads, those that wait for each other can block them all."""

    switch_interval_s: Annotated[float, Field(ge=1e-5, le=0.1)] | None = 0.0005
    """Python's switch interval (``sys.setswitchinterval``), in seconds, in members that call or are called, until they
    have not done so for 0.1 to 0.2 s. A call to a member that runs Python code waits for one interval, or for several
    if its tensors are on a GPU. At other times, and wherever the program has set an interval of its own, it stays as it
    is. None never changes it."""

    metrics_period_s: Annotated[float, Field(ge=0, le=3600)] | None = None
    """Period, in seconds, at which members export their counters to Ray's metrics, and so to the node's Prometheus
    endpoint. None exports totals every 10 s. A number, at least 0.1, exports finer series: by method and by
    subscriber, and latencies. 0 exports nothing. ``raytorchrpc top`` and ``Group.stats`` work in any case."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(_checked(values))

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ, **overrides: Any) -> GroupConfig:
        """Read ``RAYTORCHRPC_*`` of ``environ``: plain text, comma-separated lists, JSON for ``device_maps``.

        ``overrides`` take precedence over the environment. A variable that names no field is an error: a misspelt
        setting must not be ignored.
        """
        values: dict[str, Any] = {}
        given: dict[str, str] = {}
        for variable, text in environ.items():
            if not variable.startswith(ENV_PREFIX):
                continue
            field = variable.removeprefix(ENV_PREFIX).lower()
            if field not in FIELDS:
                similar = nearest(field, FIELDS)
                known = ", ".join(ENV_PREFIX + name.upper() for name in FIELDS)
                hint = f"; known: {known}" if similar is None else f" (did you mean {ENV_PREFIX}{similar.upper()}?)"
                raise ConfigurationError(f"{variable} is not a setting{hint}")
            values[field] = _parse(variable, field, text)
            given[field] = f"{variable}={text!r}"
        for field in overrides:
            given.pop(field, None)
        return cls(**_checked(values | overrides, given))


def _refuse(config: GroupConfig, name: str, value: Any) -> None:
    raise ConfigurationError(f"GroupConfig is frozen: create another one with {name}={value!r}")


GroupConfig.__setattr__ = _refuse  # type: ignore[method-assign, assignment]
FIELDS = tuple(field.name for field in fields(GroupConfig))
#: Numbers, and true or false.
_NUMBERS = {each.name for each in fields(GroupConfig) if re.match(r"Annotated\[(float|int)|bool", str(each.type))}


def _checked(values: Mapping[str, Any], given: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The values of all fields. ``given``: see ``explain``. Raises ConfigurationError."""
    from pydantic import ValidationError

    try:
        checked = dict(_model()(**values))
    except ValidationError as error:  # pydantic's own error cannot be raised or caught as one of ours
        raise ConfigurationError(f"GroupConfig: {explain(error, FIELDS, given)}") from error
    for name, value in values.items():  # pydantic reads text, but only variables of the environment are text
        if isinstance(value, str) and name in _NUMBERS.difference(given or ()):
            raise ConfigurationError(f"GroupConfig: {name}={value!r} is text: write {name}={checked[name]!r}")
    return checked


@functools.cache
def _model() -> type[BaseModel]:
    """Checks the settings by pydantic, which takes as long to load as the whole of raytorchrpc: only the process that
    forms a group needs it.
    """
    from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, create_model

    names = {"Field": Field, "Bytes": Annotated[int, BeforeValidator(read_bytes)]}
    types = get_type_hints(GroupConfig, {**globals(), **names}, include_extras=True)
    checks: dict[str, Callable[[Any], Any]]
    checks = {"lanes": _known_lanes, "local_devices": _cuda_indices, "torchrpc_from": _networks}
    checks |= {"metrics_period_s": _period}
    types |= {name: Annotated[types[name], AfterValidator(check)] for name, check in checks.items()}
    types |= {name: Annotated[types[name], BeforeValidator(_no_bool)] for name in FIELDS if name.endswith("_s")}
    values: dict[str, Any] = {field.name: (types[field.name], field.default) for field in fields(GroupConfig)}
    return create_model("GroupConfig", __config__=ConfigDict(extra="forbid"), **values)


def _known_lanes(lanes: tuple[str, ...] | None) -> tuple[str, ...] | None:
    if lanes == ():
        raise ValueError("must name a lane, or be None, which lets routing choose")
    for lane in lanes or ():
        if not registry.is_known(lane.removeprefix("-")):
            known = registry.names()
            meant = did_you_mean(lane.removeprefix("-"), known)
            raise ValueError(f"unknown lane {lane!r}{meant}; known lanes: {', '.join(known)}")
        if not lane.startswith("-") and f"-{lane}" in (lanes or ()):
            raise ValueError(f"lane {lane!r} is both asked for and forbidden")
    return lanes


def _networks(texts: tuple[str, ...]) -> tuple[str, ...]:
    for text in texts:
        try:
            ipaddress.ip_network(text, strict=False)
        except ValueError:
            raise ValueError(f"{text!r} is neither an address nor a network such as 10.0.0.0/8") from None
    return texts


def _cuda_indices(devices: tuple[int, ...] | None) -> tuple[int, ...] | None:
    for index in devices or ():
        if index < 0:
            raise ValueError(f"{index} is not a CUDA device index")
    return devices


def _no_bool(seconds: Any) -> Any:
    if isinstance(seconds, bool):  # pydantic would take it for 0 or 1
        raise ValueError("must be a number of seconds")
    return seconds


def _period(seconds: float | None) -> float | None:
    if seconds and seconds < 0.1:
        raise ValueError("must be 0, or at least 0.1")  # a shorter one keeps a core busy in each member
    return seconds


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
