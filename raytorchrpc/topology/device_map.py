"""Device maps: the device on which a tensor arrives when it is sent to a peer.

The arguments of a call use the caller's map, and its result uses the inverse of that map. The callee's own map is not
used, so the two directions of a pair are independent: ``a: {b: {0: 1}}`` and ``b: {a: {0: 0}}`` do not contradict each
other.

An entry maps a GPU to a GPU, or crosses between a GPU and the CPU. A CPU tensor that the map does not mention stays
a CPU tensor. So the inverse for a result is:

* from a GPU of the peer: to the local GPU that is mapped to it, else to the CPU if ``"cpu"`` is mapped to it;
* from the peer's CPU: always to the CPU.

``{"cpu": 0}`` therefore returns a CUDA result on the peer's ``cuda:0`` as a CPU tensor. ``{0: "cpu"}`` changes no
result: a CPU tensor on the peer may also come from a CPU tensor here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raytorchrpc.config import GroupConfig
from raytorchrpc.errors import ConfigurationError, NotAMember
from raytorchrpc.tensors.devices import CPU, Device
from raytorchrpc.topology.endpoint import Endpoint

Peer = Any  # a member's name, its rank, an actor handle or a Member
#: The map of one pair of members.
PairMap = dict[Device, Device]

_ENTRY = re.compile(r"(\d+)_(\d+|cpu)_(\d+|cpu)")
_SHAPE = "expected <peer rank>_<local gpu>_<peer gpu>, e.g. 1_0_1, with cpu in place of one GPU to cross"


@dataclass(frozen=True, init=False, repr=False)
class DeviceMap:
    """The maps of one member: peer -> {local GPU: peer GPU}, with "cpu" in place of a GPU to cross.

    In ``entries``, peers are names, ranks, actor handles or Members; a group replaces them by names. Immutable,
    hashable, picklable.

    Examples:
        >>> rtr.DeviceMap({"learner": {0: 1}})  # this member's GPU 0 sends to the learner's GPU 1
        DeviceMap({'learner': {0: 1}})
    """

    _entries: dict[Peer, PairMap]

    def __init__(self, entries: Mapping[Any, Mapping[Any, Device]] | None = None) -> None:
        crossing = {  # a tensor that stays on the CPU needs no entry
            peer: {local: target for local, target in pairs.items() if (local, target) != (CPU, CPU)}
            for peer, pairs in (entries or {}).items()
        }
        object.__setattr__(self, "_entries", {peer: pairs for peer, pairs in crossing.items() if pairs})

    @classmethod
    def parse(cls, text: str) -> DeviceMap:
        """Read the text ``<peer rank>_<local gpu>_<peer gpu>,...``; spaces around commas are fine, "" is the empty map.

        ``cpu`` in place of a GPU crosses: with ``1_cpu_0``, CPU tensors arrive on rank 1's GPU 0; with ``1_0_cpu``,
        CUDA tensors of GPU 0 arrive at rank 1 as CPU tensors.

        Raises ConfigurationError naming the entry, its position (from 1) and what was expected.
        """
        if not isinstance(text, str):
            raise ConfigurationError(f"a device map's text form is a str, not {text!r}")
        entries: list[_Entry] = []
        for position, raw in enumerate(text.split(",") if text.strip() else (), start=1):
            where = f"device map entry {position} ({raw.strip()!r})"
            match = _ENTRY.fullmatch(raw.strip())
            if not match:
                raise ConfigurationError(f"{where} is malformed: {_SHAPE}")
            peer = int(match[1])
            entries.append((where, peer, _device(match[2], peer), _device(match[3], peer)))
        return cls(_collected(entries))

    @classmethod
    def from_dict(cls, value: Mapping[Any, Any]) -> DeviceMap:
        """Read a value ``{peer: {local gpu: peer gpu}}``; a GPU is 0, "0", "cuda:0" or torch.device.

        In place of a GPU, "cpu" crosses: ``{"learner": {"cpu": 0}}``, ``{"learner": {0: "cpu"}}``.

        Raises ConfigurationError naming the peer and the entry.
        """
        if not isinstance(value, Mapping):
            raise ConfigurationError(
                f"a device map is a DeviceMap, its text form or {{peer: {{local gpu: peer gpu}}}}, not {value!r}"
            )
        entries: list[_Entry] = []
        for peer, pairs in value.items():
            where = f"device map for peer {peer!r}"
            if not isinstance(pairs, Mapping):
                raise ConfigurationError(f"{where}: expected {{local gpu: peer gpu}}, got {pairs!r}")
            entries += ((where, peer, _device(local, peer), _device(target, peer)) for local, target in pairs.items())
        return cls(_collected(entries))

    @classmethod
    def of(cls, value: Any) -> DeviceMap:
        """Make one from a value in any form that ``GroupConfig.device_maps`` takes. Raises ConfigurationError."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            return cls.parse(value)
        return cls.from_dict(value)

    @classmethod
    def auto(
        cls,
        local: Endpoint | int,
        peers: Mapping[str, Endpoint | int],
        *,
        local_devices: Sequence[int] | None = None,
    ) -> DeviceMap:
        """Map every visible local GPU to the same index, modulo the peer's count.

        Args:
            local: this member's endpoint, or its number of GPUs.
            peers: the same for each peer, by name.
            local_devices: local GPUs that may be used; those this member does not have are skipped.

        torchrpc rejects a map of two local GPUs to one GPU of a peer. If this side has more GPUs than the peer, the
        lowest local index keeps the target and the others stay unmapped for that peer: before a tensor on one of them
        is sent, move it or give a map. A side without a GPU, or whose actor asked Ray for none, has no map.
        """
        count = gpu_count(local)
        usable = [i for i in range(count) if local_devices is None or i in local_devices]
        entries: dict[Peer, Mapping[Any, Device]] = {}
        for peer, endpoint in peers.items():
            targets = gpu_count(endpoint)
            taken: dict[int, int] = {}
            for index in usable if targets else ():
                taken.setdefault(index % targets, index)
            entries[peer] = inverse(taken)
        return cls(entries)

    @property
    def peers(self) -> tuple[Peer, ...]:
        """Peers that have at least one entry, in the order given."""
        return tuple(self._entries)

    def to(self, peer: Peer) -> dict[Device, Device]:
        """The entries for one peer."""
        return dict(self._entries.get(peer, {}))

    def to_dict(self) -> dict[Peer, dict[Device, Device]]:
        """The dict form that ``from_dict`` reads."""
        return {peer: dict(pairs) for peer, pairs in self._entries.items()}

    def named(self, name_of: Callable[[Any], str], owner: str = "") -> DeviceMap:
        """The same map with the name of each peer, ``name_of(peer)``. Raises ConfigurationError naming ``owner``."""
        where = f"device map of {owner or 'a member'}"
        named = ((_name(peer, name_of, where), pairs) for peer, pairs in self._entries.items())
        return DeviceMap(_collected((where, name, *pair) for name, pairs in named for pair in pairs.items()))

    def __hash__(self) -> int:
        # The order of entries has no meaning.
        return hash(frozenset((peer, frozenset(pairs.items())) for peer, pairs in self._entries.items()))

    def __bool__(self) -> bool:
        return bool(self._entries)

    def __repr__(self) -> str:
        return f"DeviceMap({self.to_dict()!r})"


#: Where an entry is given, a peer, a device here, and the device of the peer.
_Entry = tuple[str, Peer, Device, Device]


def _collected(entries: Iterable[_Entry]) -> dict[Peer, PairMap]:
    """The entries by peer. Raises ConfigurationError if a device is mapped to two devices of a peer."""
    maps: dict[Peer, PairMap] = {}
    for where, peer, local, target in entries:
        if (first := maps.setdefault(peer, {}).setdefault(local, target)) != target:
            raise ConfigurationError(
                f"{where}: {_label(local)} is mapped to both {_label(first)} and {_label(target)} of peer {peer!r}"
            )
    return maps


def gpu_pairs(mapping: Mapping[Device, Device]) -> dict[int, int]:
    """The entries of one peer's map from GPU to GPU, which torchrpc and the lanes use."""
    return {local: target for local, target in mapping.items() if isinstance(local, int) and isinstance(target, int)}


def way_back(mapping: Mapping[Device, Device]) -> dict[Device, Device]:
    """{peer GPU: local GPU or "cpu"} of one peer's map: where CUDA results arrive."""
    crossing: dict[Device, Device] = {mapping[CPU]: CPU} if CPU in mapping else {}
    return {**crossing, **{target: local for local, target in gpu_pairs(mapping).items()}}  # a GPU takes precedence


def inverse(mapping: Mapping[int, int]) -> dict[int, int]:
    """{peer GPU: local GPU} of a map from GPU to GPU. Raises ConfigurationError if two GPUs share a target."""
    turned = {target: local for local, target in mapping.items()}
    if len(turned) != len(mapping):
        raise ConfigurationError(f"device map {dict(mapping)!r} sends two GPUs to one and has no inverse")
    return turned


def gpu_count(side: Endpoint | int) -> int:
    """The number of GPUs that a member may map; 0 for an actor that asked Ray for none, even if it sees some."""
    if isinstance(side, int):
        return side
    return len(side.gpus) if side.wants_gpu else 0


def given_maps(config: GroupConfig, name_of: Callable[[Any], str]) -> dict[str, DeviceMap]:
    """The maps that the configuration gives, read, by names of members; needs no evidence.

    ``name_of(target)``: the name of the member that a key stands for. Raises ConfigurationError for a malformed map
    (where), an unknown member or one that is given twice.
    """
    given: dict[str, DeviceMap] = {}
    for key, value in (config.device_maps or {}).items():
        owner = _name(key, name_of, "device_maps")
        if owner in given:
            raise ConfigurationError(f"device_maps: {owner!r} is given twice, by name, rank or handle")
        try:
            given[owner] = DeviceMap.of(value).named(name_of, owner)
        except ConfigurationError as error:
            raise ConfigurationError(f"device_maps[{key!r}]: {error}") from error
    return given


def check(config: GroupConfig, endpoints: Mapping[str, Endpoint | int]) -> None:
    """Check the settings of device maps against the GPUs of all members.

    Args:
        config: ``device_maps``, as ``given_maps`` returns them, and ``local_devices``.
        endpoints: each member's endpoint, or its number of GPUs.

    Raises ConfigurationError naming the member, the peer and the entry: a GPU that does not exist on either side, two
    GPUs sent to one, a map to oneself that is not the identity, a map by which CPU tensors arrive on a GPU and CUDA
    tensors on the CPU.
    """
    given = config.device_maps or {}
    generated = [name for name in endpoints if name not in given]
    most = max((gpu_count(endpoints[name]) for name in generated), default=0)
    missing = [index for index in config.local_devices or () if not 0 <= index < most]
    if missing and generated:
        raise ConfigurationError(
            f"local_devices={config.local_devices}: no member has GPU {missing[0]} "
            f"(the most any of them sees is {most})"
        )
    for owner, each in given.items():
        for peer, pairs in DeviceMap.of(each).to_dict().items():
            _check_pair(owner, str(peer), pairs, endpoints)


def between(config: GroupConfig, a: str, b: str, end_a: Endpoint | int, end_b: Endpoint | int) -> PairMap:
    """The map of a for tensors that it sends to b; settings as in ``check``.

    A member named in ``config.device_maps`` gets exactly what is written there: a peer left out has no
    GPU mapped. The others get generated maps (``DeviceMap.auto``), to themselves included. Giving only
    one direction of a pair, or two that are not each other's inverse, is fine: a result always goes back
    through the inverse of the map its request came by.
    """
    given = config.device_maps or {}
    if a in given:
        return DeviceMap.of(given[a]).to(b)
    if not gpu_count(end_a) or not gpu_count(end_b):
        return {}
    return DeviceMap.auto(end_a, {b: end_b}, local_devices=config.local_devices).to(b)


def _check_pair(owner: str, peer: str, pairs: Mapping[Device, Device], members: Mapping[str, Endpoint | int]) -> None:
    where = f"device map of {owner} to {peer}"
    seen: dict[int, int] = {}
    for local, target in pairs.items():
        entry = f"entry {local} -> {target}"
        for side, index in ((owner, local), (peer, target)):
            if index != CPU and not 0 <= index < gpu_count(members[side]):
                raise ConfigurationError(f"{where}, {entry}: {side} has no GPU {index} ({_has(members[side])})")
        if owner == peer and local != target:
            raise ConfigurationError(f"{where}, {entry}: a member maps to itself only as {local} -> {local}")
        if target == CPU and CPU in pairs:
            raise ConfigurationError(
                f"{where}, {entry}: CPU tensors already arrive on {_label(pairs[CPU])} (cpu -> {pairs[CPU]}), and what "
                f"comes from GPU {local} would be one; keep one of the two"
            )
        if isinstance(local, int) and isinstance(target, int):
            if target in seen:
                raise ConfigurationError(
                    f"{where}, {entry}: GPU {target} of {peer} is already the target of GPU {seen[target]}; "
                    f"torchrpc takes one local GPU per GPU of a peer"
                )
            seen[target] = local


def _has(side: Endpoint | int) -> str:
    count = gpu_count(side)
    if count == 0 and not isinstance(side, int) and not side.wants_gpu:
        return "its actor asked Ray for no GPU"
    return f"it sees {count}"


def _label(device: Device) -> str:
    return "the CPU" if device == CPU else f"GPU {device}"


def _device(device: Any, peer: Peer) -> Device:
    """Read 0, "0", "cuda:0", "cpu" or a torch.device, without importing torch."""
    match = re.fullmatch(r"(?:cuda:)?(\d+)|cpu", str(device).strip())
    if match is None:
        raise ConfigurationError(
            f"device map for peer {peer!r}: {device!r} is not a CUDA device with an index (0, 'cuda:0'), nor 'cpu'"
        )
    return int(match[1]) if match[1] else CPU


def _name(target: Any, name_of: Callable[[Any], str], where: str) -> str:
    try:
        return name_of(target)
    except NotAMember as error:
        raise ConfigurationError(f"{where}: {error}") from error
