"""FusionReport: what `fuse` did and did not, and how many kernels a decode step launches before and after
(`Launches`), by counting op calls.

    launches = count_launches(model)    # one token over a paged cache
    launches.layers                     # per decoder layer

An op call that makes or writes numbers counts as one launch, whatever its kernel does inside; views and
allocations don't count."""

import dataclasses
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from torchpaged.backends import Limits
from torchpaged.custom_ops.errors import UnsupportedModelError
from torchpaged.custom_ops.words import counted, repr_of_fields
from torchpaged.fuse.fusible import PASSES
from torchpaged.hf.attention import NAME
from torchpaged.hf.model_classes import uses_attention_interface
from torchpaged.hf.packed_mixers import pack_mixers
from torchpaged.hf.step_cache import StepCache
from torchpaged.hf.switch import Settings


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

    __repr__ = repr_of_fields

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


#: Ops that give memory or another view of it, and launch nothing; views are known by their schema.
_WITHOUT_KERNEL = (
    "empty empty_like empty_strided new_empty new_empty_strided _unsafe_view lift_fresh detach "
    "_local_scalar_dense is_same_size sym_size item"
)


def launches_kernel(func: Any) -> bool:
    """Whether an op writes or makes numbers, by its schema: views and allocations do not."""
    if func.namespace == "aten" and func._schema.name.split("::")[1] in _WITHOUT_KERNEL.split():
        return False
    returns = func._schema.returns
    return not (returns and all(r.alias_info is not None and not r.alias_info.is_write for r in returns))


class _Counting(TorchDispatchMode):
    """Notes the ops that launch, by the decoder layer (``where``; -1 = outside)."""

    def __init__(self) -> None:
        super().__init__()
        self.where = -1
        self.calls: dict[int, list[str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if launches_kernel(func):
            self.calls.setdefault(self.where, []).append(str(func))
        return func(*args, **(kwargs or {}))


def count_launches(model: PreTrainedModel) -> Launches | None:
    """Count one decode step of one token over a paged cache, in eager mode; None for models that can't
    run it."""
    config = model.config.get_text_config(decoder=True)
    if not uses_attention_interface(type(model)) or model.device.type == "meta":
        return None
    settings = Settings(model)
    try:
        cache = StepCache(config, Limits(num_blocks=2, block_size=16), 16, "auto")
        pack_mixers(model, cache.states)
    except UnsupportedModelError:
        settings.give_back()
        return None
    step, counting = cache.padding_step(model.device), _Counting()
    handles = []
    layers: Any = model.get_decoder().layers

    def enter(index: int) -> Any:
        return lambda *_: setattr(counting, "where", index)

    model.eval().set_attn_implementation(NAME)
    try:
        with torch.no_grad():
            cache.run(model, *step)  # makes the pools
            for index, layer in enumerate(layers):
                handles += [
                    layer.register_forward_pre_hook(enter(index)),
                    layer.register_forward_hook(enter(-1)),
                ]
            with torch.compiler.set_stance("force_eager"), counting:  # a mode sees no compiled layers
                cache.run(model, *step)
    finally:
        for handle in handles:
            handle.remove()
        settings.give_back()
    names = tuple(tuple(counting.calls.get(index, ())) for index in range(len(layers)))
    return Launches(tuple(map(len, names)), len(counting.calls.get(-1, ())), names)
