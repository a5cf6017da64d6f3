"""What one pull of weights is to bring, and into which tensors."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple

import torch

from raytorchrpc.errors import ConfigurationError, NotFound
from raytorchrpc.lanes.base import Part
from raytorchrpc.patterns.weights.published import Look, Row
from raytorchrpc.patterns.weights.snapshots import Kind, converted_kinds, laid_out
from raytorchrpc.tensors.dtypes import DTYPE_NAMES, DTYPES

#: Moves tensors by other means than the group's lanes: ``carry(version, tensors)`` fills them at those who pull, and
#: sends them at the one that published. A collective fits.
Carry = Callable[[int, Sequence[torch.Tensor]], None]

#: A module, or its tensors by name.
Model = torch.nn.Module | Mapping[str, torch.Tensor]

_CPU = torch.device("cpu")
#: Of so many stores, so many versions: those pulled last.
_STORES, _VERSIONS = 64, 1024


class Pulled:
    """The versions that this process has pulled, by the life of their store. Thread-safe.

    A number alone does not say of which life it is: another store of the same name has the same numbers.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._versions: OrderedDict[int, OrderedDict[int, None]] = OrderedDict()

    def add(self, life: int, version: int) -> None:
        """That one has been pulled."""
        with self._lock:
            versions = self._versions.setdefault(life, OrderedDict())
            self._versions.move_to_end(life)
            versions[version] = None
            versions.move_to_end(version)
            if len(versions) > _VERSIONS:
                versions.popitem(last=False)
            if len(self._versions) > _STORES:
                self._versions.popitem(last=False)

    def has(self, life: int, version: int) -> bool:
        """Whether a model of this process may have that version."""
        with self._lock:
            return version in self._versions.get(life, ())

    def forget(self, life: int) -> None:
        """A pull has failed, and left a model with tensors of several versions."""
        with self._lock:
            self._versions.pop(life, None)


class Known(NamedTuple):
    """A layout, as a reader was told of it."""

    number: int
    rows: list[Row]
    offsets: list[int]
    """Of each, in the memory of a snapshot that has all of them on one device."""
    kind: str | None = None
    """See Pull, of the last one."""

    @staticmethod
    def of(number: int, rows: list[Row]) -> Known:
        """What was told."""
        return Known(number, rows, laid_out(_kinds(rows))[0])


class Wanted(NamedTuple):
    """Places in the layout, as which dtypes (None: as they are), into what."""

    places: list[tuple[int, str | None]]
    targets: list[torch.Tensor]

    def chunks(self, size: int) -> list[Wanted]:
        """What goes by one message each: so many bytes, or one tensor that has more."""
        chunks: list[Wanted] = []
        begin = filled = 0
        for place, target in enumerate(self.targets):
            if place > begin and filled + target.nbytes > size:
                chunks.append(Wanted(self.places[begin:place], self.targets[begin:place]))
                begin, filled = place, 0
            filled += target.nbytes
        return [*chunks, Wanted(self.places[begin:], self.targets[begin:])]

    def rows(self, rows: Sequence[Row]) -> list[Row]:
        """What the targets are, of a layout with these."""
        return [(rows[place][0], name or rows[place][1], rows[place][2]) for place, name in self.places]

    def kinds(self, rows: Sequence[Row]) -> list[Kind]:
        """Likewise, and where."""
        kinds = zip(_kinds(self.rows(rows)), self.targets, strict=True)
        return [kind._replace(device=target.device) for kind, target in kinds]

    def parts(self, known: Known) -> list[list[Part]]:
        """What they get out of the memory of a snapshot, one piece for each dtype's name; see Snapshot.wholes."""
        offsets: dict[str | None, list[int]] = {None: known.offsets}
        parts: dict[str | None, list[Part]] = {}
        for (place, name), target in zip(self.places, self.targets, strict=True):
            if name not in offsets:
                offsets[name] = laid_out(converted_kinds(_kinds(known.rows), DTYPES[name]))[0]  # type: ignore[index]
            parts.setdefault(name, []).append(Part(offsets[name][place], target))
        return list(parts.values())

    def signature(self, look: Look) -> str:
        """The same for pulls of one version that bring the same, to the same kind of device."""
        text = repr((look.layout, self.places, [target.device.type for target in self.targets]))
        return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def _kinds(rows: Sequence[Row]) -> list[Kind]:
    return [Kind(DTYPES[dtype], shape, _CPU) for _, dtype, shape in rows]


class Pull:
    """One pull into one model. Its tensors may be filled by the very answer that says what there is to pull."""

    def __init__(self, store: str, model: Any, known: Known | None, convert: bool, strict: bool) -> None:
        """``known``: of the pull before. The model is looked at when that is needed."""
        self._store, self._model, self.converts, self._strict = store, model, convert, strict
        self.known = known
        self.filled = False
        self.look: Look | None = None
        """What was told, as soon as it was; with a lease that has to be released."""
        self._matched: Wanted | None = None
        """All of ``known``."""
        self._parts: list[list[Part]] | None = None
        """Of that."""

    @cached_property
    def targets(self) -> dict[str, torch.Tensor]:
        """The model's tensors. Raises ConfigurationError for what is no model."""
        return tensors_of(self._model, self._store)

    @property
    def likely_kind(self) -> str | None:
        """``kind``, as it was for the last pull; then the model is not looked at."""
        return self.kind if self.known is None else self.known.kind

    @cached_property
    def kind(self) -> str | None:
        """Of the device that all tensors are on, if each can be filled as it lies there; else None."""
        tensors = list(self.targets.values())
        if len(set(map(torch.Tensor.get_device, tensors))) != 1 or not all(map(torch.Tensor.is_contiguous, tensors)):
            return None
        if any(map(torch.Tensor.is_neg, tensors)) or any(map(torch.Tensor.is_conj, tensors)):
            return None
        if any(not tensor.data_ptr() and tensor.numel() for tensor in tensors):
            return None
        return tensors[0].device.type

    def foresee(self) -> None:
        """Match the model with what is known, while the home is asked whether it is still so."""
        with suppress(ConfigurationError):  # it is raised when that is sure
            if self.known is not None and self.kind is not None:
                self._matched = self._match(self.known.rows, None)
                self._parts = self._matched.parts(self.known)

    def told(self, look: Look) -> None:
        """Take in what the home said. Raises NotFound."""
        self.look = look
        if look.lease and look.rows is not None:
            self.known, self._matched, self._parts = Known.of(look.layout, look.rows), None, None
        elif look.lease and (self.known is None or self.known.number != look.layout):
            raise NotFound(f"the home of {self._store!r} did not say what it has; pull again")

    def plan(self, pieces_kind: str | None, answer: Any) -> list[list[Part]] | None:
        """For filling.Spread, of an answer with what the home said and, if it could, all of it in one piece; that is on
        such a device.
        """
        if answer is None:
            return None
        fields, pieces = answer
        self.told(Look(*fields))
        if not pieces or self.kind != pieces_kind:
            return None
        wanted = self.wanted()
        if not wanted.targets or any(name is not None for _, name in wanted.places):
            return None
        assert self.known is not None
        self.filled = True
        return wanted.parts(self.known) if self._parts is None else self._parts

    def wanted(self) -> Wanted:
        """What is to be brought. Raises ConfigurationError, naming all that does not match."""
        assert self.known is not None and self.look is not None
        if self._matched is None or self.look.changed is not None:
            self._matched, self._parts = self._match(self.known.rows, self.look.changed), None
        return self._matched

    def remembered(self) -> Known | None:
        """For the next pull."""
        return self.known and self.known._replace(kind=self.kind)

    def carry_by(self, carry: Carry) -> None:
        """Have them moved by other means. Raises ConfigurationError."""
        wanted = self.wanted()
        assert self.known is not None and self.look is not None
        if len(wanted.targets) != len(self.known.rows) or any(name is not None for _, name in wanted.places):
            raise ConfigurationError(
                "carry= brings all tensors as they were published: the model needs each of them, under the same dtype"
            )
        with torch.no_grad():
            carry(self.look.version, wanted.targets)

    def _match(self, rows: Sequence[Row], changed: Sequence[int] | None) -> Wanted:
        targets, convert = self.targets, self.converts
        wrong: list[str] = []
        wanted = Wanted([], [])
        moved = None if changed is None else set(changed)
        for place, (name, dtype, shape) in enumerate(rows):
            target = targets.get(name)
            if target is None:
                if self._strict:
                    wrong.append(f"the model has no {name!r}, which was published")
                continue
            its = DTYPE_NAMES[target.dtype]
            may_convert = convert and target.dtype.is_floating_point and DTYPES[dtype].is_floating_point
            if tuple(target.shape) != shape:
                wrong.append(f"{name!r} is {shape} as published, and {tuple(target.shape)} in the model")
            elif its != dtype and not may_convert:
                remedy = "" if convert else " (convert=True converts floating dtypes)"
                wrong.append(f"{name!r} is {dtype} as published, and {its} in the model{remedy}")
            elif moved is None or place in moved:
                wanted.places.append((place, None if its == dtype else its))
                wanted.targets.append(target)
        if self._strict:
            published = {name for name, _, _ in rows}
            wrong += [f"{name!r} of the model was not published" for name in targets if name not in published]
        if wrong:
            shown = "; ".join(wrong[:10]) + (f"; and {len(wrong) - 10} more" if len(wrong) > 10 else "")
            raise ConfigurationError(f"the weights of {self._store!r} do not fit: {shown}")
        return wanted


def tensors_of(model: Any, store: str) -> dict[str, torch.Tensor]:
    """A model's tensors by name, without autograd. Raises ConfigurationError."""
    if isinstance(model, torch.nn.Module):
        model = model.state_dict()
    if not isinstance(model, Mapping):
        raise ConfigurationError(f"weights are a module or tensors by name, not a {type(model).__name__}")
    found: dict[str, torch.Tensor] = {}
    for name, tensor in model.items():
        if not isinstance(tensor, torch.Tensor):
            raise ConfigurationError(
                f"{name!r} of the weights for {store!r} is a {type(tensor).__name__}, not a tensor: leave it out"
            )
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
            raise ConfigurationError(f"{name!r} of the weights for {store!r} is no dense tensor with memory")
        found[str(name)] = tensor.detach()
    return found
