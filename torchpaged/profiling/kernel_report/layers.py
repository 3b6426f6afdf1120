"""Equal layers of a kernel report, folded into one: "model.layers.0-31: 9 kernels each"."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from torchpaged.profiling.kernel_report.data import (
    Between,
    KernelTime,
    ModuleKernels,
    Totals,
    UnmatchedKernels,
)

#: The layer's own module, in the names relative to a layer.
ITSELF = "(itself)"
_LAYER = re.compile(r"(.*?)\.(\d+)(?:\.(.*))?")


@dataclass
class LayerGroup(Totals):
    """Layers with the same kernels in the same modules, or a single module outside the layers.

    Attributes:
        prefix: what the layers have in common, such as "model.layers"; a module's own name if there is
            no layer.
        indices: the layers; empty outside them.
        modules: kernels by module, named relative to the layer; added up over the layers.
        unmatched: kernels between two matched ones of the same layer: the layer's, though no module of it
            is known.
        steps: of the report.
    """

    prefix: str | None
    indices: list[int]
    modules: list[ModuleKernels] = field(default_factory=list)
    unmatched: list[UnmatchedKernels] = field(default_factory=list)
    steps: int = 1

    @property
    def name(self) -> str:
        """Such as "model.layers.0-2,4"."""
        return (
            f"{self.prefix}.{_ranges(self.indices)}" if self.indices else self.prefix or "(outside the model)"
        )

    @property
    def kernels_each(self) -> float:
        """Kernels per layer and step."""
        return self.count / (max(1, len(self.indices)) * self.steps)

    @property
    def unmatched_each(self) -> float:
        """Of these, kernels without a module."""
        return sum(row.count for row in self.unmatched) / (max(1, len(self.indices)) * self.steps)


def layer_of(module: str | None) -> tuple[str, int, str] | None:
    """``("model.layers", 3, "mlp.up_proj")`` of "model.layers.3.mlp.up_proj"; None outside a
    numbered layer."""
    found = _LAYER.fullmatch(module or "")
    return (found[1], int(found[2]), found[3] or "") if found else None


def layer_groups(report: Totals) -> list[LayerGroup]:
    """The report's modules, in their order, with equal layers as one group. Unmatched kernels outside layers
    are left out."""
    layers: dict[tuple[str | None, int], LayerGroup] = {}
    for entry in report.modules:
        prefix, index, rest = layer_of(entry.module) or (entry.module, -1, "")
        group = layers.setdefault(
            (prefix, index), LayerGroup(prefix, [index] if index >= 0 else [], steps=report.steps)
        )
        group.modules.append(ModuleKernels(rest or ITSELF, entry.kernels))
    for unplaced in report.unmatched:
        place = home_of(unplaced.between)
        if place is not None:
            after, before = (layer_of(module) for module in unplaced.between)
            assert after is not None and before is not None
            between = Between(after[2] or ITSELF, before[2] or ITSELF)
            layers[place].unmatched.append(UnmatchedKernels(between, unplaced.kernels))
    folded: dict[object, LayerGroup] = {}
    for group in layers.values():
        key = (group.prefix, bool(group.indices), _kernels(group.modules), _kernels(group.unmatched))
        if key in folded:
            _fold(folded[key], group)
        else:
            folded[key] = group
    return list(folded.values())


def home_of(between: Between) -> tuple[str, int] | None:
    """The layer that both neighbours of an unmatched kernel are in."""
    after, before = layer_of(between.after), layer_of(between.before)
    return after[:2] if after is not None and before is not None and after[:2] == before[:2] else None


def unmatched_groups(report: Totals) -> list[UnmatchedKernels]:
    """Unmatched kernels outside layers; those between one layer and the next folded over layers with the
    same ones."""
    folded: dict[object, tuple[list[int], UnmatchedKernels]] = {}
    for row in report.unmatched:
        if home_of(row.between) is not None:
            continue
        after, before = layer_of(row.between.after), layer_of(row.between.before)
        key: object = row.between
        if after is not None and before is not None and (after[0], after[1] + 1) == before[:2]:
            key = (after[0], after[2], before[2], _kernels([UnmatchedKernels(Between("", ""), row.kernels)]))
        indices, first = folded.setdefault(key, ([], UnmatchedKernels(row.between, row.kernels)))
        if first.kernels is not row.kernels:
            first.kernels = _added(first.kernels, row.kernels)
        if after is not None and before is not None and key != row.between:
            indices.append(after[1])
            names = [f".{rest}" if rest else "" for rest in (after[2], before[2])]
            first.between = Between(
                f"{after[0]}.{_ranges(indices)}{names[0]}", f"the next layer's {names[1] or 'own'}"
            )
    return [row for _, row in folded.values()]


def _kernels(rows: Iterable[ModuleKernels | UnmatchedKernels]) -> tuple[object, ...]:
    return tuple(
        (
            row.module if isinstance(row, ModuleKernels) else row.between,
            *((kernel.name, kernel.count) for kernel in row.kernels),
        )
        for row in rows
    )


def _fold(group: LayerGroup, other: LayerGroup) -> None:
    group.indices += other.indices
    for rows, more in ((group.modules, other.modules), (group.unmatched, other.unmatched)):
        for row, added in zip(rows, more, strict=True):
            row.kernels = _added(row.kernels, added.kernels)


def _added(kernels: list[KernelTime], more: list[KernelTime]) -> list[KernelTime]:
    return [
        KernelTime(a.name, a.count + b.count, a.total_us + b.total_us)
        for a, b in zip(kernels, more, strict=True)
    ]


def _ranges(indices: list[int]) -> str:
    """ "0-2,4" of [0, 1, 2, 4]."""
    runs: list[list[int]] = []
    for index in sorted(indices):
        if runs and runs[-1][1] == index - 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
