"""Plans a pull: which region of which publisher's tensors goes to which region of the model's.

Pure: global indices in, regions out. Every element comes from one publisher, so no byte moves that is not needed.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
import itertools
import operator
import re
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from raytorchrpc.errors import ConfigurationError
from raytorchrpc.patterns.weights.conversions import (
    FP8,
    SOURCES,
    BlockFp8,
    Convert,
    blocks_in,
    converts_blocks,
    scales_of,
)
from raytorchrpc.patterns.weights.shards import Box, PlaceInWhole, Region, Row, Shard, region_of
from raytorchrpc.patterns.weights.snapshots import Place, TensorSpec, converted_specs, lay_out
from raytorchrpc.tensors.dtypes import DTYPE_NAMES, DTYPES

#: How many mismatches an error names.
_SHOWN = 10


def check_fits(
    store: str, wrong: Sequence[str], lacking: Collection[str] = (), unpublished: Collection[str] = ()
) -> None:
    """Raise ConfigurationError for mismatches. ``lacking``: in the model; ``unpublished``: names of the model."""
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        shown = "; ".join(wrong[:_SHOWN]) + more + _remedy_for_names(lacking, unpublished)
        raise ConfigurationError(f"the weights of {store!r} do not fit: {shown}")


def _remedy_for_names(lacking: Collection[str], unpublished: Collection[str]) -> str:
    if not lacking and not unpublished:
        return ""
    if part := _additional_part(unpublished, lacking):
        if all(name.startswith(part) for name in unpublished):
            return f". The model's names begin with {part!r}: pull into the module inside, such as model.{part[:-1]}"
        renamed = f"mapping={{name: name.replace({part!r}, '') for name in model.state_dict()}}"
        return f". The model's names have {part!r} inside: pull with {renamed}"
    if part := _additional_part(lacking, unpublished):
        if all(name.startswith(part) for name in lacking):
            return f". The published names begin with {part!r}: publish the module inside, such as model.{part[:-1]}"
        renamed = f"{{name.replace({part!r}, ''): tensor for name, tensor in model.state_dict().items()}}"
        return f". The published names have {part!r} inside: publish {renamed}"
    return ". mapping= gives other names, and strict=False pulls only the names that both have"


def _additional_part(longer: Collection[str], shorter: Collection[str]) -> str | None:
    """What all names of one side have, up to a dot, and the other's lack; None if they differ in another way."""
    if not longer or len(longer) != len(shorter):
        return None
    *parts, _ = next(iter(longer)).split(".")
    prefixes = [".".join(parts[: count + 1]) for count in range(len(parts))]
    for part in (f"{part}." for part in (*prefixes, *parts)):
        if {name.replace(part, "", 1) for name in longer} == set(shorter):
            return part
    return None


#: The argument ``only``: a glob, or several.
Only = str | Sequence[str]
#: The argument ``mapping``: names of the model -> the published name, or those of the parts of a fused parameter, in
#: order.
Renamed = Mapping[str, str | Sequence[str]]


def globs_of(only: Only | None) -> tuple[str, ...]:
    """Return the globs of the argument ``only``; none for None, which selects all names. Raises ConfigurationError."""
    if only is None:
        return ()
    given: Any = [only] if isinstance(only, str) else only
    globs: tuple[Any, ...] = tuple(given) if isinstance(given, Iterable) else ()
    if not globs or not all(isinstance(glob, str) for glob in globs):
        raise ConfigurationError(f"only={only!r} has to be a glob such as 'lora_*', or several")
    return globs


def selects(globs: tuple[str, ...], name: str) -> bool:
    """Whether a name matches one of the globs, or there are none."""
    return not globs or _pattern(globs).match(name) is not None


@functools.lru_cache(64)
def _pattern(globs: tuple[str, ...]) -> re.Pattern[str]:
    literal = [rf"{re.escape(glob)}\Z" for glob in globs if "[" in glob]  # a name such as layers[0].weight
    return re.compile("|".join([*map(fnmatch.translate, globs), *literal]))


def selected(globs: tuple[str, ...], names: Collection[str], store: str, *, strict: bool = True) -> list[str]:
    """Return the names that match.

    Raises ConfigurationError, which names the nearest, for a glob that matches none; unless ``strict``, only if all do.
    """
    found = [name for name in names if selects(globs, name)]
    idle = [glob for glob in globs if glob not in names and not any(fnmatch.fnmatchcase(name, glob) for name in found)]
    if idle and (strict or not found):
        nearest = [near for glob in idle for near in difflib.get_close_matches(glob.strip("*"), names, 3, 0.0)]
        hint = f"; the nearest are {', '.join(map(repr, dict.fromkeys(nearest)))}" if nearest else ""
        raise ConfigurationError(
            f"only={idle} matches none of the {len(names)} names of the weights for {store!r}{hint}"
        )
    return found


def renames(mapping: Renamed | None) -> dict[str, tuple[str, ...]]:
    """Return the parts of each name in the argument ``mapping``. Raises ConfigurationError."""
    given: Any = {} if mapping is None else mapping
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"mapping={mapping!r} has to be a dict: the published name, or names, by each name")
    found: dict[str, tuple[str, ...]] = {}
    for name, parts in given.items():
        listed = (parts,) if isinstance(parts, str) else tuple(parts) if isinstance(parts, Sequence) else ()
        if not listed or not all(isinstance(part, str) for part in listed):
            raise ConfigurationError(
                f"mapping={{{name!r}: {parts!r}}} has to give the published name, or a list of the names of its parts"
            )
        found[name] = listed
    return found


_CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Kind:
    """What a shard that a publisher has is like. The layers of a model share these: they are compared by identity."""

    dtype: str  # as published, or after ``conversion``
    global_shape: tuple[int, ...]
    box: Box
    conversion: str | None = None
    """That its publisher makes before, if it is not the one to the model's dtype; see ``conversions``."""


@functools.lru_cache(4096)
def _kind_of(dtype: str, shape: tuple[int, ...], place: PlaceInWhole | None) -> Kind:
    """See ``Row``."""
    whole, offset = (shape, (0,) * len(shape)) if place is None else place
    return Kind(dtype, whole, Box(offset, shape))


class Held(NamedTuple):
    """A shard that a publisher has."""

    source: int  # which publisher
    publisher: str  # its name
    place: int  # in its layout
    kind: Kind


class Published:
    """What publishers have of each tensor."""

    def __init__(self, publishers: Sequence[str], layouts: Sequence[KnownLayout]) -> None:
        self._publishers = publishers
        self.kinds = [{name: _kind_of(*kind) for name, *kind in layout.rows} for layout in layouts]
        self.places = [dict(zip(kinds, range(len(kinds)), strict=True)) for kinds in self.kinds]
        """For each publisher, by the tensor's name."""
        self.names = dict.fromkeys(itertools.chain.from_iterable(self.kinds))

    def held(self, name: str) -> list[Held]:
        its = enumerate(zip(self._publishers, self.places, self.kinds, strict=True))
        return [Held(source, by, places[name], kinds[name]) for source, (by, places, kinds) in its if name in kinds]

    def make(self, name: str, of: Held, kind: Kind) -> None:
        """Note that a publisher makes a tensor of one that it has."""
        self.names[name], self.places[of.source][name], self.kinds[of.source][name] = None, of.place, kind


@dataclass(frozen=True, eq=False)
class Wanted:
    """A box of a published tensor that goes to a region of one of the model's tensors. Shared like ``Kind``."""

    dtype: str
    shape: tuple[int, ...]  # of the model's tensor
    begin: tuple[int, ...]  # where the region begins in it
    global_shape: tuple[int, ...]
    box: Box


@functools.lru_cache(4096)
def _box_for(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    whole: tuple[int, ...],
    offset: tuple[int, ...],
    extents: tuple[int, ...] | None = None,
    begin: tuple[int, ...] | None = None,
) -> Wanted:
    """What a tensor of the model wants. ``extents``: of the box, if it is not the whole tensor's."""
    shape = tuple(shape)
    return Wanted(DTYPE_NAMES[dtype], shape, begin or (0,) * len(shape), whole, Box(offset, extents or shape))


class Transfer(NamedTuple):
    """One region of a published tensor that goes to a region of one of the model's."""

    place: Place
    region: Region  # of the published tensor, after its conversion
    offset: int  # where the region begins in the memory of a snapshot (bytes)
    nbytes: int
    target: str  # name of the model's tensor
    begin: tuple[int, ...] | None  # where in the model's tensor; None: the region fills all of it


class KnownLayout:
    """A layout, as a home told a reader."""

    def __init__(self, number: int, rows: Sequence[Row]) -> None:
        self.number, self.rows = number, rows
        self._offsets: dict[str | None, list[int]] = {}

    def offsets(self, conversion: str | None) -> list[int]:
        """Where each tensor begins in the memory of a snapshot that has all tensors on one device (bytes)."""
        if (found := self._offsets.get(conversion)) is None:
            kinds = [(_bytes_of(dtype, shape, conversion), _CPU) for _, dtype, shape, _ in self.rows]
            found = self._offsets[conversion] = lay_out(kinds)[0]
        return found


@functools.lru_cache(4096)
def _bytes_of(dtype: str, shape: tuple[int, ...], conversion: str | None) -> int:
    """Of a tensor after a conversion."""
    spec = TensorSpec(DTYPES[dtype], shape, _CPU)
    return (spec if conversion is None else converted_specs([spec], conversion)[0]).nbytes


class Options(NamedTuple):
    """See ``WeightStore.pull``."""

    mapping: Mapping[str, tuple[str, ...]]
    convert: Convert
    strict: bool
    only: tuple[str, ...] = ()  # globs; none for all

    @staticmethod
    def of(
        mapping: Renamed | None = None, convert: Convert = False, strict: bool = True, only: Only | None = None
    ) -> Options:
        """Of the arguments of a pull. Raises ConfigurationError."""
        converts_blocks(convert)  # which checks it
        return Options(renames(mapping), convert, strict, globs_of(only))

    @property
    def form(self) -> Hashable:
        """What a tensor of a model gets from a version: a model has the version in this form."""
        return tuple(self.mapping.items()), self.convert


class Request(NamedTuple):
    """What a pull is to bring, and how."""

    store: str
    targets: Mapping[str, Shard]
    options: Options
    publishers: Sequence[str]  # their names
    elsewhere: frozenset[str] = frozenset()
    """Published names of what goes to tensors of the model that ``options.only`` does not select."""

    @staticmethod
    def of(store: str, model: Mapping[str, Shard], options: Options, publishers: Sequence[str]) -> Request:
        """For the tensors of a model that ``options.only`` selects, with their scales. Raises ConfigurationError."""
        if not options.only:
            return Request(store, model, options, publishers)
        names = set(selected(options.only, model, store, strict=options.strict))
        if isinstance(options.convert, BlockFp8):
            names |= {name + options.convert.suffix for name in names}
        mapping = {name: parts for name, parts in options.mapping.items() if name in names or name not in model}
        targets = {name: shard for name, shard in model.items() if name in names}
        others = (options.mapping.get(name, (name,)) for name in model if name not in names)
        elsewhere = frozenset(part for parts in others for part in parts)
        return Request(store, targets, options._replace(mapping=mapping), publishers, elsewhere)


def plan(request: Request, layouts: Sequence[KnownLayout], near: Sequence[int], turn: int) -> list[list[Transfer]]:
    """For each publisher, what to bring from it. Raises ConfigurationError, which names up to ten tensors.

    What several have comes from the nearest; ``turn`` spreads readers over equally near ones.
    """
    published = Published(request.publishers, layouts)
    wrong: list[str] = []
    lacking, unpublished = list[str](), list[str]()
    if isinstance(request.options.convert, BlockFp8):
        request = _quantize(request, request.options.convert, published)
    transfers: list[list[Transfer]] = [[] for _ in layouts]
    known: dict[Hashable, _Divided] = {}  # the layers of a model are alike
    for number, (name, target, wanted) in enumerate(_wanted(request, published, wrong, unpublished)):
        alike, shift = (wanted, *[kinds.get(name) for kinds in published.kinds]), (number + turn) % len(layouts)
        divided = known.get(alike) or known.get((alike, shift))
        if divided is None:
            held = published.held(name)
            if (mismatch := _mismatch(name, wanted, held, request.options.convert)) is not None:
                wrong.append(mismatch)
                continue
            ranks = [(near[source], (source + shift) % len(layouts)) for source in range(len(layouts))]
            divided = _divide(wanted, sorted(held, key=lambda one: ranks[one.source]))
            known[(alike, shift) if divided.depends_on_order else alike] = divided
        for source, conversion, region, first, nbytes, begin in divided.pieces:
            place = published.places[source][name]
            offset = layouts[source].offsets(conversion)[place] + first
            transfers[source].append(Transfer((place, conversion), region, offset, nbytes, target, begin))
        if missing := divided.missing:
            wrong.append(
                f"{name!r}: {' and '.join(map(str, missing[:3]))} of {wanted.global_shape} were not published "
                f"(published: {_shown(published.held(name))}; the model wants {wanted.box})"
            )
    if request.options.strict:
        used = {part for name in request.targets for part in request.options.mapping.get(name, (name,))}
        used |= request.elsewhere
        lacking = [name for name in published.names if name not in used and selects(request.options.only, name)]
        wrong += [f"the model has no {name!r}, which was published" for name in lacking]
    check_fits(request.store, wrong, lacking, unpublished)
    return transfers


def _wanted(
    request: Request, published: Published, wrong: list[str], unpublished: list[str]
) -> list[tuple[str, str, Wanted]]:
    """What is wanted of each published name, and for which tensor of the model.

    Adds what is amiss to ``wrong`` and ``unpublished``.
    """
    found: list[tuple[str, str, Wanted]] = []
    for target, shard in request.targets.items():
        names = request.options.mapping.get(target, (target,))
        unknown = [name for name in names if name not in published.names]
        if unknown:
            if request.options.strict or len(unknown) < len(names):
                what = f", which {target!r} is to be made of," if target in request.options.mapping else " of the model"
                wrong += [f"{name!r}{what} was not published" for name in unknown]
                unpublished += [] if target in request.options.mapping else unknown
            continue
        if len(names) == 1:
            tensor, whole, offset = shard
            wanted = _box_for(tensor.dtype, tensor.shape, whole, offset)
            found.append((names[0], target, wanted))
        else:
            parts = [(name, published.held(name)[0].kind.global_shape) for name in names]
            found += [(name, target, part) for name, part in _fused(target, shard, parts, wrong)]
    wrong += [
        f"mapping names {name!r}, which the model does not have (the model's name comes first, then what was published)"
        for name in request.options.mapping
        if name not in request.targets
    ]
    return found


def _quantize(request: Request, fp8: BlockFp8, published: Published) -> Request:
    """Put the values and scales that publishers make in the place of their source; the request for both."""
    mapping, wrong = dict(request.options.mapping), list[str]()
    made: dict[str, list[Held]] = {}
    for target, shard in request.targets.items():
        names = mapping.get(target, (target,))
        if shard.tensor.dtype is not FP8 or any(name not in published.names for name in names):
            continue
        parts = {name: published.held(name) for name in names}
        if all(one.kind.dtype == DTYPE_NAMES[FP8] for held in parts.values() for one in held):
            continue  # published in fp8
        obstacles = [text for name, held in parts.items() for text in _unquantizable(name, held, fp8)]
        wrong += obstacles or _misfits_of_scales(target, request.targets, parts, fp8)
        mapping[target + fp8.suffix] = tuple(name + fp8.suffix for name in names)
        for name, held in parts.items():
            if name + fp8.suffix in published.names:
                wrong.append(f"{name + fp8.suffix!r} was published, but convert=BlockFp8 makes it of {name!r}")
            elif not obstacles:
                made[name] = held
    check_fits(request.store, wrong)
    for name, held in made.items():
        for one in held:
            values, scales = _quantized(one.kind, fp8)
            published.make(name, one, values)
            published.make(name + fp8.suffix, one, scales)
    return request._replace(options=request.options._replace(mapping=mapping))


@functools.lru_cache(4096)
def _quantized(kind: Kind, fp8: BlockFp8) -> tuple[Kind, Kind]:
    """The values and the scales."""
    box = scales_of(kind.box, kind.global_shape, fp8.block)
    assert box is not None  # see _unquantizable
    scales = Kind("float32", blocks_in(kind.global_shape, fp8.block), box, fp8.scales)
    return replace(kind, dtype=DTYPE_NAMES[FP8], conversion=fp8.values), scales


def _unquantizable(name: str, held: Sequence[Held], fp8: BlockFp8) -> list[str]:
    """Why publishers cannot convert a tensor to fp8."""
    dtype, shape = held[0].kind.dtype, held[0].kind.global_shape
    if (difference := differing(name, held)) is not None:
        return [difference]
    if dtype not in SOURCES:
        return [f"{name!r} is {dtype} as published, and BlockFp8 converts {', '.join(sorted(SOURCES))}"]
    if len(shape) != 2:
        return [f"{name!r} has shape {shape}, and BlockFp8 converts matrices, which have two dimensions"]
    return [
        f"{name!r}: the shard {one.kind.box} of {shape} by {one.publisher!r} cuts a block of {fp8}: publish shards "
        f"that begin at multiples of a block and end there, or with the tensor"
        for one in held
        if scales_of(one.kind.box, shape, fp8.block) is None
    ]


def _misfits_of_scales(
    target: str, targets: Mapping[str, Shard], parts: Mapping[str, Sequence[Held]], fp8: BlockFp8
) -> list[str]:
    """What is amiss with the scales that the model has for one of its tensors."""
    shard, scales, name = targets[target], targets.get(target + fp8.suffix), target + fp8.suffix
    if len(shard.global_shape) != 2:
        return []  # another shape than the published one
    *others, last = ((part, held[0].kind.global_shape[0]) for part, held in parts.items())
    for part, rows in others if shard.is_whole else (*others, last) if others else ():
        if rows % fp8.block[0]:
            return [f"{target!r} is made of {part!r}, whose {rows} rows are not a multiple of a block of {fp8}"]
    box, whole = scales_of(shard.box, shard.global_shape, fp8.block), blocks_in(shard.global_shape, fp8.block)
    if box is None:
        return [f"{target!r}: the model's shard {shard.box} of {shard.global_shape} cuts a block of {fp8}"]
    needed = f"float32 {box.shape}" + ("" if shard.is_whole else f" at {box.offset} of {whole}")
    if scales is None:
        return [f"the model has no {name!r} for the scales of {target!r}: {needed}, one for each block of {fp8}"]
    its = f"{DTYPE_NAMES[scales.tensor.dtype]} {tuple(scales.tensor.shape)}"
    if scales.tensor.dtype is not DTYPES["float32"] or scales.global_shape != whole or scales.box != box:
        shown = its if scales.is_whole else f"{its} at {scales.offset} of {scales.global_shape}"
        return [f"{name!r} is {shown} in the model, and the scales of {target!r} are {needed}"]
    return []


def _fused(
    target: str, shard: Shard, parts: Sequence[tuple[str, tuple[int, ...]]], wrong: list[str]
) -> list[tuple[str, Wanted]]:
    """Divide a fused tensor, or the same share of each part, along its first dimension."""
    whole = shard.global_shape
    inner = {shape[1:] for _, shape in parts} | {whole[1:]}
    if not all((whole, *(shape for _, shape in parts))) or len(inner) > 1 or sum(s[0] for _, s in parts) != whole[0]:
        shapes = " + ".join(str(shape) for _, shape in parts)
        wrong.append(f"{target!r} is {whole} in the model, and made of {shapes}, one after the other along dimension 0")
        return []
    dtype, extents, (first, *rest_of_offset) = shard.tensor.dtype, tuple(shard.tensor.shape), shard.offset
    found: list[tuple[str, Wanted]] = []
    begin = 0
    for name, shape in parts:
        share, rest = divmod(shape[0] * extents[0], whole[0])
        offset, odd = divmod(shape[0] * first, whole[0])
        if rest or odd:
            wrong.append(
                f"{target!r} has {extents[0]} rows from {first} on of {whole[0]}, which is no whole number of rows of "
                f"{name!r} {shape}: pull into a Shard of each part"
            )
            return []
        box = (offset, *rest_of_offset), (share, *extents[1:])
        found.append((name, _box_for(dtype, extents, shape, *box, (begin,) + (0,) * (len(whole) - 1))))
        begin += share
    return found


def differing(name: str, held: Sequence[Held]) -> str | None:
    """What is amiss if publishers disagree on a tensor's global shape or dtype."""
    if len(held) > 1 and len({(one.kind.global_shape, one.kind.dtype) for one in held}) > 1:
        return f"{name!r} differs between publishers: {_shown(held)}"
    return None


def _mismatch(name: str, wanted: Wanted, held: Sequence[Held], convert: Convert) -> str | None:
    if (difference := differing(name, held)) is not None:
        return difference
    shape, dtype = held[0].kind.global_shape, held[0].kind.dtype
    if shape != wanted.global_shape:
        is_whole = wanted.box.shape == wanted.global_shape and len(shape) == len(wanted.global_shape)
        may_be_part = is_whole and all(map(operator.le, wanted.global_shape, shape))
        remedy = " (for a part of it, pull a Shard or a DTensor)" if may_be_part else ""
        return f"{name!r} is {shape} as published, and {wanted.global_shape} in the model{remedy}"
    if dtype == wanted.dtype:
        return None
    if held[0].kind.conversion is not None:
        return (
            f"{name!r} is {wanted.dtype} in one tensor of the model, and {dtype} in another: BlockFp8 makes one of them"
        )
    is_floating = DTYPES[dtype].is_floating_point and DTYPES[wanted.dtype].is_floating_point
    if convert and is_floating:
        return None
    remedy = "convert=True converts it" if is_floating else "only floating dtypes are converted"
    return f"{name!r} is {dtype} as published, and {wanted.dtype} in the model ({remedy})"


def _shown(held: Sequence[Held]) -> str:
    return ", ".join(f"{its.dtype} {its.global_shape} {its.box} by {publisher!r}" for _, publisher, _, its in held[:4])


#: A piece of what is wanted: (publisher that has it, its conversion, the region there, the bytes before it there, its
#: bytes, where it begins in the model's tensor (None: it fills all of that)).
_Piece = tuple[int, str | None, Region, int, int, tuple[int, ...] | None]


class _Divided(NamedTuple):
    """How what is wanted comes from those that have parts of it."""

    pieces: Sequence[_Piece]
    missing: Sequence[Box]  # what none has
    depends_on_order: bool  # because several have the same


def _divide(wanted: Wanted, held: Iterable[Held]) -> _Divided:
    """``held``: in the order in which they are asked for what they have."""
    pieces: list[_Piece] = []
    missing, itemsize, common_size = [wanted.box] if wanted.box.size else [], DTYPES[wanted.dtype].itemsize, 0
    for source, _, _, kind in held:
        if (whole := wanted.box.intersection(kind.box)) is None:
            continue
        common_size += whole.size
        left: list[Box] = []
        conversion = kind.conversion or (None if kind.dtype == wanted.dtype else wanted.dtype)
        for box in missing:
            common = whole if box is wanted.box else box.intersection(kind.box)
            if common is None:
                left.append(box)
                continue
            inside = tuple(map(operator.sub, common.offset, kind.box.offset))
            steps = zip(wanted.begin, common.offset, wanted.box.offset, strict=True)
            begin = None if common.shape == wanted.shape else tuple(own + at - first for own, at, first in steps)
            first, strides = region_of(kind.box.shape, inside, common.shape)
            region = first, common.shape, strides
            pieces.append((source, conversion, region, first * itemsize, common.size * itemsize, begin))
            left += box.without(common)
        missing = left
    return _Divided(pieces, missing, common_size > wanted.box.size - sum(box.size for box in missing))
