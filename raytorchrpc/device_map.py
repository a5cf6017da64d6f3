"""Device maps: which of my GPUs lands on which of a peer's when a CUDA tensor is sent there.

torchrpc sends the arguments of a call through the caller's map and its result through the inverse of that
same map. The callee's own map plays no part in it, so the two directions of a pair may differ freely:
``a: {b: {0: 1}}`` together with ``b: {a: {0: 0}}`` is no contradiction.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from raytorchrpc.config import GroupConfig
from raytorchrpc.errors import ConfigurationError
from raytorchrpc.topology import Endpoint

Peer = str | int
Pairs = tuple[tuple[int, int], ...]

_ENTRY = re.compile(r"(\d+)_(\d+)_(\d+)")
_SHAPE = "expected <peer rank>_<local gpu>_<peer gpu>, e.g. 1_0_1"


class DeviceMap:
    """One member's maps, peer -> {local GPU: peer GPU}. Immutable, hashable, picklable.

    Peers are member names or ranks; ``named`` turns all of them into names.
    """

    __slots__ = ("_entries",)
    _entries: tuple[tuple[Peer, Pairs], ...]

    def __init__(self, entries: Mapping[Any, Mapping[int, int]] | None = None) -> None:
        fixed = tuple((peer, tuple(pairs.items())) for peer, pairs in (entries or {}).items() if pairs)
        object.__setattr__(self, "_entries", fixed)

    @classmethod
    def parse(cls, text: str) -> DeviceMap:
        """Read ``<peer rank>_<local gpu>_<peer gpu>,...``; spaces around commas are allowed, "" is no map.

        Raises ConfigurationError naming the entry, its position (from 1) and what was expected.
        """
        entries: dict[Peer, dict[int, int]] = {}
        if not isinstance(text, str):
            raise ConfigurationError(f"a device map's text form is a str, not {text!r}")
        for position, raw in enumerate(text.split(",") if text.strip() else (), start=1):
            entry = raw.strip()
            match = _ENTRY.fullmatch(entry)
            if not match:
                raise ConfigurationError(f"device map entry {position} ({entry!r}) is malformed: {_SHAPE}")
            peer, local, target = (int(part) for part in match.groups())
            if local in entries.setdefault(peer, {}):
                raise ConfigurationError(
                    f"device map entry {position} ({entry!r}): GPU {local} is already mapped to GPU "
                    f"{entries[peer][local]} of peer {peer}; one local GPU goes to one GPU of a peer"
                )
            entries[peer][local] = target
        return cls(entries)

    @classmethod
    def from_dict(cls, value: Mapping[Any, Any]) -> DeviceMap:
        """Read ``{peer name or rank: {local gpu: peer gpu}}``; a GPU is 0, "0", "cuda:0" or torch.device.

        Raises ConfigurationError naming the peer and the entry.
        """
        entries: dict[Peer, dict[int, int]] = {}
        for peer, pairs in value.items():
            if isinstance(peer, bool) or not isinstance(peer, (str, int)):
                raise ConfigurationError(f"device map: peer {peer!r} is neither a member's name nor its rank")
            if not isinstance(pairs, Mapping):
                raise ConfigurationError(
                    f"device map for peer {peer!r}: expected {{local gpu: peer gpu}}, got {pairs!r}"
                )
            mapped = entries.setdefault(peer, {})
            for local, target in pairs.items():
                index = _cuda_index(local, peer)
                if index in mapped:
                    raise ConfigurationError(f"device map for peer {peer!r}: GPU {index} is mapped twice")
                mapped[index] = _cuda_index(target, peer)
        return cls(entries)

    @classmethod
    def of(cls, value: Any) -> DeviceMap:
        """A DeviceMap from any form that ``GroupConfig.device_maps`` accepts."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            return cls.parse(value)
        if isinstance(value, Mapping):
            return cls.from_dict(value)
        raise ConfigurationError(
            f"a device map is a DeviceMap, its text form or {{peer: {{local gpu: peer gpu}}}}, not {value!r}"
        )

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

        torchrpc refuses two local GPUs mapped onto one GPU of a peer. Where this side has more of them
        than the peer, the lowest local index keeps the target and the rest stay unmapped for that peer:
        a tensor on one of those has to be moved, or a map be given, before it is sent. A side with no
        GPU, or whose actor asked Ray for none, has no map.
        """
        count = gpu_count(local)
        usable = [i for i in range(count) if local_devices is None or i in local_devices]
        entries: dict[Peer, dict[int, int]] = {}
        for peer, endpoint in peers.items():
            targets = gpu_count(endpoint)
            taken: dict[int, int] = {}
            for index in usable if targets else ():
                taken.setdefault(index % targets, index)
            entries[peer] = inverse(taken)
        return cls(entries)

    @property
    def peers(self) -> tuple[Peer, ...]:
        """Peers that have at least one GPU mapped, in the order given."""
        return tuple(peer for peer, _ in self._entries)

    def for_peer(self, peer: Peer) -> dict[int, int]:
        """{local GPU: peer GPU} for this peer; empty where nothing is mapped."""
        return {local: target for name, pairs in self._entries if name == peer for local, target in pairs}

    def to_dict(self) -> dict[Peer, dict[int, int]]:
        """The dict form that ``from_dict`` reads."""
        return {peer: dict(pairs) for peer, pairs in self._entries}

    def to_text(self, members: Sequence[str] = ()) -> str:
        """The text form that ``parse`` reads. ``members`` (in rank order) is needed if peers are names."""
        parts: list[str] = []
        for peer, pairs in self._entries:
            rank = peer if isinstance(peer, int) else _rank(peer, members)
            parts.extend(f"{rank}_{local}_{target}" for local, target in pairs)
        return ",".join(parts)

    def named(self, members: Sequence[str], owner: str = "") -> DeviceMap:
        """The same map with every rank replaced by the member's name.

        Raises ConfigurationError naming ``owner``, the peer and the known members if there is none such.
        """
        entries: dict[str, dict[int, int]] = {}
        for peer, pairs in self._entries:
            name = _member(peer, members)
            if name is None:
                raise ConfigurationError(f"device map of {owner or 'a member'}: no member {peer!r} ({_known(members)})")
            mapped = entries.setdefault(name, {})
            for local, target in pairs:
                if mapped.setdefault(local, target) != target:
                    raise ConfigurationError(
                        f"device map of {owner or 'a member'}: GPU {local} is mapped to both GPU "
                        f"{mapped[local]} and GPU {target} of {name} (given by name and by rank)"
                    )
        return DeviceMap(entries)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"DeviceMap is immutable; cannot set {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return (DeviceMap, (self.to_dict(),))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DeviceMap):
            return NotImplemented
        return self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        # The order in which entries were written makes no difference to what they mean.
        return hash(frozenset((peer, frozenset(pairs)) for peer, pairs in self._entries))

    def __bool__(self) -> bool:
        return bool(self._entries)

    def __repr__(self) -> str:
        return f"DeviceMap({self.to_dict()!r})"


def inverse(mapping: Mapping[int, int]) -> dict[int, int]:
    """{peer GPU: local GPU} of one peer's map: the way results take. Raises if two GPUs share a target."""
    turned = {target: local for local, target in mapping.items()}
    if len(turned) != len(mapping):
        raise ConfigurationError(f"device map {dict(mapping)!r} sends two GPUs to one and has no inverse")
    return turned


def gpu_count(side: Endpoint | int) -> int:
    """GPUs a member may map: none for an actor that asked Ray for none, whatever it sees."""
    if isinstance(side, int):
        return side
    return len(side.gpus) if side.wants_gpu else 0


def validate(maps: Mapping[str, DeviceMap], members: Mapping[str, Endpoint | int]) -> None:
    """Check every map against the GPUs both sides have.

    Args:
        maps: by member; peers may be names or ranks.
        members: every member's endpoint or GPU count, in rank order.

    Raises ConfigurationError naming the member, the peer and the entry: an unknown member or peer, a GPU
    that does not exist on either side, two GPUs sent to one, a map to oneself that is not the identity.
    """
    names = list(members)
    for owner, device_map in maps.items():
        if owner not in members:
            raise ConfigurationError(f"device map for {owner!r}: no such member ({_known(names)})")
        for peer, pairs in device_map.named(names, owner).to_dict().items():
            _validate_pair(owner, str(peer), pairs, members)


def given_maps(config: GroupConfig, members: Sequence[str]) -> dict[str, DeviceMap]:
    """The maps that the configuration gives, read and with peers by name; needs no evidence.

    Raises ConfigurationError for a malformed map (where), an unknown member or one that is given twice.
    """
    given: dict[str, DeviceMap] = {}
    for key, value in (config.device_maps or {}).items():
        owner = _member(key, members)
        if owner is None:
            raise ConfigurationError(f"device_maps: no member {key!r} ({_known(members)})")
        if owner in given:
            raise ConfigurationError(f"device_maps: {owner!r} is given twice, by name and by rank")
        try:
            given[owner] = DeviceMap.of(value).named(members, owner)
        except ConfigurationError as error:
            raise ConfigurationError(f"device_maps[{key!r}]: {error}") from error
    return given


def resolve(
    config: GroupConfig, members: Sequence[str], endpoints: Mapping[str, Endpoint | int]
) -> dict[str, DeviceMap]:
    """Every member's device map, validated, with peers by name.

    Args:
        config: ``device_maps`` (by member name or rank) and ``local_devices``.
        members: names in rank order.
        endpoints: each member's endpoint, or its number of GPUs.

    A member named in ``config.device_maps`` gets exactly what is written there: a peer left out has no
    GPU mapped. The others get generated maps (``DeviceMap.auto``), to themselves included. Giving only
    one direction of a pair, or two that are not each other's inverse, is fine: a result always goes back
    through the inverse of the map its request came by.
    """
    sides = {name: endpoints[name] for name in members}
    given = given_maps(config, members)
    _check_local_devices(config, given, sides)
    maps = {
        name: given[name] if name in given else DeviceMap.auto(sides[name], sides, local_devices=config.local_devices)
        for name in members
    }
    validate(maps, sides)
    return maps


def _check_local_devices(
    config: GroupConfig, given: Mapping[str, DeviceMap], sides: Mapping[str, Endpoint | int]
) -> None:
    generated = [name for name in sides if name not in given]
    most = max((gpu_count(sides[name]) for name in generated), default=0)
    missing = [index for index in config.local_devices or () if not 0 <= index < most]
    if missing and generated:
        raise ConfigurationError(
            f"local_devices={config.local_devices}: no member has GPU {missing[0]} "
            f"(the most any of them sees is {most})"
        )


def _validate_pair(owner: str, peer: str, pairs: Mapping[int, int], members: Mapping[str, Endpoint | int]) -> None:
    where = f"device map of {owner} to {peer}"
    seen: dict[int, int] = {}
    for local, target in pairs.items():
        entry = f"entry {local} -> {target}"
        for side, index in ((owner, local), (peer, target)):
            if not 0 <= index < gpu_count(members[side]):
                raise ConfigurationError(f"{where}, {entry}: {side} has no GPU {index} ({_has(members[side])})")
        if target in seen:
            raise ConfigurationError(
                f"{where}, {entry}: GPU {target} of {peer} is already the target of GPU {seen[target]}; "
                f"torchrpc takes one local GPU per GPU of a peer"
            )
        if owner == peer and local != target:
            raise ConfigurationError(f"{where}, {entry}: a member maps to itself only as {local} -> {local}")
        seen[target] = local


def _has(side: Endpoint | int) -> str:
    count = gpu_count(side)
    if count == 0 and not isinstance(side, int) and not side.wants_gpu:
        return "its actor asked Ray for no GPU"
    return f"it sees {count}"


def _cuda_index(device: Any, peer: Peer) -> int:
    """The index of 0, "0", "cuda:0" or a torch.device; torch itself is not needed to read one."""
    kind, index = getattr(device, "type", None), getattr(device, "index", None)
    if kind == "cuda" and isinstance(index, int) and not isinstance(device, str):
        return index
    if isinstance(device, int) and not isinstance(device, bool) and device >= 0:
        return device
    if isinstance(device, str):
        match = re.fullmatch(r"(?:cuda:)?(\d+)", device.strip())
        if match:
            return int(match[1])
    raise ConfigurationError(
        f"device map for peer {peer!r}: {device!r} is not a CUDA device with an index (0, 'cuda:0')"
    )


def _member(key: Peer, members: Sequence[str]) -> str | None:
    """A member's name from its name or rank. A name wins over a rank spelt the same way (JSON has both
    as text)."""
    if isinstance(key, str):
        if key in members:
            return key
        if not key.isdecimal():
            return None
        key = int(key)
    return members[key] if 0 <= key < len(members) else None


def _rank(peer: str, members: Sequence[str]) -> int:
    if peer not in members:
        raise ConfigurationError(f"the text form needs ranks, and {peer!r} has none ({_known(members)})")
    return members.index(peer)


def _known(members: Iterable[str]) -> str:
    names = list(members)
    shown = ", ".join(f"{rank}: {name}" for rank, name in enumerate(names[:16]))
    rest = f", ... {len(names) - 16} more" if len(names) > 16 else ""
    return f"members: {shown}{rest}" if names else "no members are known"
