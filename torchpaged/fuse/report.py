"""FusionReport: what `fuse` did and did not, and how many kernels a decode step launches before and
after (`Launches`)."""

import dataclasses
from collections import Counter
from typing import Any

from torchpaged.custom_ops.words import counted, repr_of_fields
from torchpaged.fuse.fusible import PASSES


@dataclasses.dataclass(frozen=True)
class Launches:
    """Op calls with a kernel in one decode step: ``layers`` per decoder layer, ``rest`` in the
    remaining model."""

    layers: tuple[int, ...]
    rest: int
    names: tuple[tuple[str, ...], ...]

    def per_layer(self) -> str:
        """``"6"``, or ``"6-8"`` where layers differ."""
        low, high = min(self.layers), max(self.layers)
        return str(low) if low == high else f"{low}-{high}"


@dataclasses.dataclass
class FusionReport:
    """What `fuse` did.

    Attributes:
        model: the model's class.
        num_layers: decoder layers.
        passes: the passes asked for.
        replaced: pass -> names of the modules it changed.
        skipped: pass -> module -> the reason why not.
        before, after: launches of a decode step, or None where they were not counted.
    """

    model: str
    num_layers: int
    passes: tuple[str, ...]
    replaced: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    skipped: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    before: Launches | None = None
    after: Launches | None = None

    def __repr__(self) -> str:
        return repr_of_fields(self)

    @property
    def complete(self) -> bool:
        """Whether every pass there is was asked for and none was left out anywhere."""
        return set(self.passes) == set(PASSES) and not any(self.skipped.values())

    def to_dict(self) -> dict[str, Any]:
        """The report for JSON; launches as numbers, without the ops' names."""
        launches = {
            name: x and {"layers": list(x.layers), "rest": x.rest}
            for name, x in (("before", self.before), ("after", self.after))
        }
        return {
            "model": self.model,
            "num_layers": self.num_layers,
            "passes": list(self.passes),
            "complete": self.complete,
            "replaced": self.replaced,
            "skipped": self.skipped,
            "launches": launches,
        }

    def note(self, name: str, module: str, why: str | None) -> None:
        """Pass ``name`` changed ``module``, or did not because of ``why``."""
        if why is None:
            self.replaced.setdefault(name, []).append(module)
        else:
            self.skipped.setdefault(name, {})[module] = why

    def _launch_lines(self) -> list[str]:
        if self.before is None or self.after is None:
            return ["launches per decode step: not counted"]
        layers, rest = (self.before.per_layer(), self.after.per_layer()), (self.before.rest, self.after.rest)
        total = (sum(self.before.layers) + rest[0], sum(self.after.layers) + rest[1])
        return [
            f"launches per decode step: layer {layers[0]} -> {layers[1]}, outside the layers {rest[0]} -> "
            f"{rest[1]}, "
            f"all {total[0]} -> {total[1]}"
        ]

    def __str__(self) -> str:
        lines = [
            f"{self.model}, {counted(self.num_layers, 'layer')}",
            f"{'pass':<10}{'replaced':>9}{'skipped':>9}  reasons",
        ]
        for name in self.passes:
            reasons = Counter(self.skipped.get(name, {}).values())
            text = "; ".join(
                f"{reason} ({count})" if count > 1 else reason for reason, count in reasons.items()
            )
            lines.append(
                f"{name:<10}{len(self.replaced.get(name, ())):>9}{sum(reasons.values()):>9}  {text}".rstrip()
            )
        return "\n".join(lines + self._launch_lines())
