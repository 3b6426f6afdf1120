"""A kernel report: runs and times of kernels by their place in the model, equal layers as one group, and all
of it as plain data."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from torchpaged.custom_ops.words import repr_of_fields

#: The layer's own module, in the names relative to a layer.
ITSELF = "(itself)"
#: In place of ``Between.after``: compiled code launched it, called by the module that ``before`` names, or
#: from outside the model.
COMPILED = "(compiled code)"
_LAYER = re.compile(r"(.*?)\.(\d+)(?:\.(.*))?")


class Between(NamedTuple):
    """Where an unmatched kernel ran: the module of the last matched kernel before it and of the next one; ""
    where there is none."""

    after: str | None
    before: str | None


@dataclass
class Runs:
    """Runs of one kernel or of several: how many, and their time in microseconds."""

    count: int = 0
    total_us: float = 0.0

    def __add__(self, other: "Runs") -> "Runs":
        return Runs(self.count + other.count, self.total_us + other.total_us)


#: The module that launched a kernel, without its children; None: launched outside the model; `Between`: its
#: module can't be told.
Place: TypeAlias = "str | Between | None"


class Row(dict[str, Runs]):
    """Kernels of one place by name, in order of their first run."""

    def add(self, more: Mapping[str, Runs]) -> None:
        """Count these, too."""
        for name, runs in more.items():
            self[name] = self.get(name, Runs()) + runs

    @property
    def total(self) -> Runs:
        """All of them."""
        return sum(self.values(), Runs())


class Rows(dict[Any, Row]):
    """Kernels by `Place`, in order of their first run."""

    def at(self, place: Place) -> Row:
        """The row of a place, empty at first."""
        return self.setdefault(place, Row())

    @property
    def total(self) -> Runs:
        """All kernels."""
        return sum((row.total for row in self.values()), Runs())

    @property
    def modules(self) -> dict[str | None, Row]:
        """Those whose module is known."""
        return {place: row for place, row in self.items() if not isinstance(place, Between)}

    @property
    def unmatched(self) -> dict[Between, Row]:
        """Those whose module is not known, by their neighbours."""
        return {place: row for place, row in self.items() if isinstance(place, Between)}


@dataclass
class LayerGroup:
    """Layers with the same kernels in the same modules, or a single module outside the layers.

    Attributes:
        prefix: what the layers have in common, such as "model.layers"; a module's own name if there is
            no layer.
        indices: the layers; empty outside them.
        rows: kernels by module, named relative to the layer, and unmatched ones between two modules of the
            same layer; added up over the layers.
        steps: of the report.
    """

    prefix: str | None
    indices: list[int]
    steps: int
    rows: Rows = field(default_factory=Rows)

    @property
    def name(self) -> str:
        """Such as "model.layers.0-2,4"."""
        return (
            f"{self.prefix}.{_ranges(self.indices)}" if self.indices else self.prefix or "(outside the model)"
        )

    @property
    def kernels_each(self) -> float:
        """Kernels per layer and step."""
        return self.rows.total.count / (max(1, len(self.indices)) * self.steps)

    @property
    def unmatched_each(self) -> float:
        """Of these, kernels without a module."""
        count = sum(row.total.count for row in self.rows.unmatched.values())
        return count / (max(1, len(self.indices)) * self.steps)


@dataclass
class KernelReport:
    """Kernels by module.

    Attributes:
        kind: "kernel", or "op" where no GPU took part.
        steps: steps, or launches of a graph, that the counts and times add up.
        rows: kernels by place.
        missing: kernels that the eager run had and the replay does not have, by module; once per kind
            of launch.
    """

    kind: str
    steps: int = 1
    rows: Rows = field(default_factory=Rows)
    missing: Rows = field(default_factory=Rows)

    __repr__ = repr_of_fields

    @property
    def is_complete(self) -> bool:
        """Whether every kernel found its module and none of the eager run's is missing."""
        return not self.rows.unmatched and not self.missing

    def to_dict(self) -> dict[str, Any]:
        """As plain data; ``share`` is of ``total_us``, ``kernels_each`` of a layer group is per layer
        and step."""
        total = self.rows.total.total_us

        def sums(runs: Runs) -> dict[str, Any]:
            return {**vars(runs), "share": runs.total_us / total if total else 0.0}

        def row(kernels: Row) -> dict[str, Any]:
            listed = [{"name": name, **vars(runs)} for name, runs in kernels.items()]
            return {**sums(kernels.total), "kernels": listed}

        return {
            "kind": self.kind,
            "steps": self.steps,
            **vars(self.rows.total),
            "complete": self.is_complete,
            "layers": [
                {
                    "layers": group.name,
                    "num_layers": len(group.indices),
                    "kernels_each": group.kernels_each,
                    "unmatched_each": group.unmatched_each,
                    **sums(group.rows.total),
                }
                for group in layer_groups(self)
                if group.indices
            ],
            "modules": [{"module": module, **row(found)} for module, found in self.rows.modules.items()],
            "unmatched": [
                {**between._asdict(), **row(found)} for between, found in self.rows.unmatched.items()
            ],
            "missing": [
                {"module": module, "kernels": [{"name": n, "count": k.count} for n, k in found.items()]}
                for module, found in self.missing.items()
            ],
        }


def layer_of(module: str | None) -> tuple[str, int, str] | None:
    """``("model.layers", 3, "mlp.up_proj")`` of "model.layers.3.mlp.up_proj"; None outside a
    numbered layer."""
    found = _LAYER.fullmatch(module or "")
    return (found[1], int(found[2]), found[3] or "") if found else None


def layer_groups(report: KernelReport) -> list[LayerGroup]:
    """The report's modules, in their order, with equal layers as one group. Unmatched kernels outside layers
    are left out."""
    layers: dict[tuple[str | None, int], LayerGroup] = {}
    for module, row in report.rows.modules.items():
        prefix, index, rest = layer_of(module) or (module, -1, "")
        group = LayerGroup(prefix, [index] if index >= 0 else [], report.steps)
        layers.setdefault((prefix, index), group).rows.at(rest or ITSELF).add(row)
    for between, row in report.rows.unmatched.items():
        after, before = layer_of(between.after), layer_of(between.before)
        if after is not None and before is not None and after[:2] == before[:2]:
            layers[after[:2]].rows.at(Between(after[2] or ITSELF, before[2] or ITSELF)).add(row)
    folded: dict[object, LayerGroup] = {}
    for group in layers.values():
        same = tuple((place, _counts(row)) for place, row in group.rows.items())
        first = folded.setdefault((group.prefix, bool(group.indices), same), group)
        if first is not group:
            first.indices += group.indices
            for place, row in group.rows.items():
                first.rows[place].add(row)
    return list(folded.values())


def unmatched_outside_layers(report: KernelReport) -> dict[Between, Row]:
    """Unmatched kernels outside layers; those between one layer and the next added up over layers with the
    same ones."""
    folded: dict[Any, tuple[list[int], Row]] = {}
    for between, row in report.rows.unmatched.items():
        after, before = layer_of(between.after), layer_of(between.before)
        key: Any = between
        if after is not None and before is not None:
            if after[:2] == before[:2]:
                continue
            if (after[0], after[1] + 1) == before[:2]:
                key = (after[0], after[2], before[2], _counts(row))
        indices, sums = folded.setdefault(key, ([], Row()))
        sums.add(row)
        if after is not None:
            indices.append(after[1])
    found: dict[Between, Row] = {}
    for key, (indices, sums) in folded.items():
        if not isinstance(key, Between):
            last, first = (f".{rest}" if rest else "" for rest in key[1:3])
            key = Between(f"{key[0]}.{_ranges(indices)}{last}", f"the next layer's {first or 'own'}")
        found[key] = sums
    return found


def _counts(row: Row) -> tuple[tuple[str, int], ...]:
    return tuple((name, runs.count) for name, runs in row.items())


def _ranges(indices: list[int]) -> str:
    """ "0-2,4" of [0, 1, 2, 4]."""
    runs: list[list[int]] = []
    for index in sorted(indices):
        if runs and runs[-1][1] == index - 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
