"""Model passes for decode: fewer, larger kernels, switched on by one call.

    report = torchpaged.hf.fuse(model)                              # every pass that applies, in place
    report = torchpaged.hf.fuse(model, passes=("qkv", "gate_up"))   # or some
    print(report)
    torchpaged.hf.unfuse(model)                                     # as it was, bit for bit

Parameters stay where they are in ``state_dict``; those of one product share memory. Only steps over paged
caches change; fuse last, after loading, moving, adapters and quantisation. docs/fusion.md has the passes and
the launches per layer.
"""

import types
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from torchpaged.custom_ops.checks import switch
from torchpaged.custom_ops.errors import ArgumentError, UnsupportedModelError
from torchpaged.few_tokens import of_few_tokens, takes_few_tokens
from torchpaged.fuse.attention_layers import AttentionPlan
from torchpaged.fuse.ends import Ends, end_forwards
from torchpaged.fuse.families import ARCHITECTURES, WITHIN
from torchpaged.fuse.fusible import PASSES, why_changed, why_not, why_unknown
from torchpaged.fuse.latent_layers import LatentPlan
from torchpaged.fuse.layers import FusedPart, LayerPlan, fused_forward, paged_owner
from torchpaged.fuse.mixers import NO_ROTATION, MixerPlan
from torchpaged.fuse.report import FusionReport, count_launches
from torchpaged.fuse.rope_table import lazy_forward
from torchpaged.fuse.rotations import Rotations
from torchpaged.fuse.state_layers import STATE_PLANS
from torchpaged.hf.attached import FUSED, drop, put_in, take_out
from torchpaged.hf.cache_argument import cache_of
from torchpaged.hf.model_classes import unwrapped
from torchpaged.hf.packed_mixers import pack_mixer
from torchpaged.hf.row_refusals import require_new, require_no_weights
from torchpaged.hf.switch import is_attached
from torchpaged.model_state import MOVES, ModelState


class _Fusion(FusedPart):
    """What was done to a model, so that it can be undone."""

    def __init__(self, base: nn.Module, report: FusionReport, rotations: Rotations) -> None:
        self.base, self.report, self.rotations = base, report, rotations
        self.plans: list[LayerPlan] = []
        self.changed: list[tuple[nn.Module, str, Any]] = []
        self.ends: Ends
        self.state: ModelState
        self.handles: list[Any] = []

    def give(self, module: nn.Module, name: str, value: Any) -> None:
        """Set an attribute of one instance; functions become methods."""
        if name == "forward" and takes_few_tokens(module):
            drop(module, name)
        setattr(
            module, name, types.MethodType(value, module) if isinstance(value, types.FunctionType) else value
        )
        self.changed.append((module, name, value))

    def overlaid(self) -> bool:
        """Whether a forward that was replaced here has been replaced again since, as by `compile_layers`."""
        return any(
            getattr(vars(m).get(name), "__func__", None) is not value
            for m, name, value in self.changed
            if name == "forward"
        )

    def look(self, model: nn.Module) -> None:
        """Remember what the fused layers and ends of ``model`` are made of."""
        around = {model, self.base, self.base.layers, *(plan.layer for plan in self.plans)}
        inside = {part for plan in self.plans for part in plan.layer.modules()} - around
        given = {module for module, name, _ in self.changed if name == "forward"} - around
        turning = {table.rotary for table in self.rotations.tables.values()}
        paths = {module: path for path, module in model.named_modules()}
        parts, code, weights = (
            {path: module for module, path in paths.items() if module in chosen}
            for chosen in (around | inside, given | inside | turning, inside | turning)
        )
        self.state = self.ends.state = ModelState(parts, code, weights, {"config": self.base.config})

    def refresh(self) -> None:
        """After the model was moved or loaded into. One that holds anything else now keeps what it was, and
        its next step is refused."""
        if self.state.changed_but_weights() or any(why_changed(plan.layer) for plan in self.plans):
            return
        for plan in self.plans:
            plan.refresh()
        self.rotations.refresh()
        self.state.renew()


def _apply_and_refresh(self: Any, fn: Any, recurse: bool = True) -> nn.Module:
    """``nn.Module._apply``: what ``to()``, ``cuda()`` and ``half()`` call; private, and
    tests/hf/test_fuse_changes.py notices its change."""
    result: nn.Module = type(self)._apply(self, fn, recurse)
    self._torchpaged_fusion.refresh()
    return result


def _refresh_after_load(module: Any, _keys: Any) -> None:
    module._torchpaged_fusion.refresh()


def _require_unchanged(base: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before a forward of the decoder. Of the whole model `end_forwards` looks for changes."""
    cache = args[3] if len(args) > 3 else cache_of(kwargs)
    fusion, owner = base._torchpaged_fusion, paged_owner(cache)
    fusion.ends.enter(owner)
    if owner is not None and owner.rows is not None and not torch.compiler.is_compiling():
        tokens = args[0] if args else kwargs.get("input_ids")
        tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
        require_no_weights(kwargs)
        if tokens is not None:
            require_new(owner.rows, tokens.shape[1], written=False, options=kwargs)
    collected = kwargs.get("output_router_logits", getattr(base.config, "output_router_logits", False))
    if collected and fusion.report.replaced.get("experts") and owner is not None:
        raise ArgumentError(
            "output_router_logits",
            "False: fused experts keep no scores of their router",
            "True",
            'fuse without the pass "experts"',
        )


def _fuse_layer(fusion: _Fusion, layer: Any, name: str, passes: Sequence[str], report: FusionReport) -> None:
    reason, rope = why_unknown(layer), None
    architecture = None if reason else ARCHITECTURES[type(layer).__name__]
    mixers = [] if architecture is None else architecture.mixers_of(layer)
    attends = [mixer for mixer in mixers if architecture is not None and mixer is not architecture.state]
    left_out, taken = ["lm_head", "embedding", *([] if attends or architecture is None else ["rope"])], []
    if architecture is not None and not architecture.mixes_and_feeds:
        left_out += ["gate_up"] if mixers else ["qkv"]
    left_out.append("gate_up" if architecture is not None and architecture.has_experts(layer) else "experts")
    for each in passes:
        if each in left_out:
            continue
        why = reason or why_not(layer, each)
        if why is None and each == "rope":
            rope, why = fusion.rotations.of(layer)
        report.note(each, name, why)
        if why is None:
            taken.append(each)
    if not taken or architecture is None:
        return
    plans: list[MixerPlan] = []
    for mixer in mixers:
        kind: type[MixerPlan] = LatentPlan if architecture.rotation else AttentionPlan
        if mixer is architecture.state:
            kind = STATE_PLANS[mixer.kind]
            # now, or the engine's doing so would be a change that steps refuse
            pack_mixer(getattr(layer, mixer.name), FUSED)
        plans.append(kind(architecture, layer, mixer, taken, rope if mixer in attends else NO_ROTATION))
    plan = LayerPlan(layer, taken, plans)
    fusion.plans.append(plan)
    fusion.give(layer, "_torchpaged_plan", plan)
    fusion.give(layer, "forward", fused_forward)


def fuse(model: PreTrainedModel, passes: Sequence[str] | None = None, *, count: bool = True) -> FusionReport:
    """Fuse the decoder layers of ``model`` in place, for steps over paged caches; everything else runs
    as before.

    Args:
        model: a causal LM of transformers (or its base model, or a ``PeftModel`` of it), loaded and on its
            device.
        passes: some of "qkv" (one product for q, k and v), "rope" (q/k norm, rotation and cache write in one
            kernel), "norm" (RMSNorm and residual adds inside the products), "gate_up" (gate, up and
            activation in one product), "experts" (router, experts and shared expert of up to 64 tokens in two
            ops), "lm_head" (the final norm inside lm_head), "embedding" (a kernel that
            starts early); default: all. One that does not apply to a layer is left out there, and the report
            says why.
        count: run one token before and after, to count the launches per layer for the report.

    Returns:
        The `FusionReport`; ``print(report)`` gives a table.

    Raises:
        ArgumentError: an unknown pass, a ``count`` that is no switch, or a model that is fused already.
        UnsupportedModelError: a model without decoder layers.
    """
    switch("count", count)
    chosen = PASSES if passes is None else tuple(passes) if isinstance(passes, Iterable) else (passes,)
    unknown = [each for each in chosen if each not in PASSES]
    if unknown or isinstance(passes, str):
        raise ArgumentError("passes", f"a sequence of {', '.join(PASSES)}", repr(passes))
    model = unwrapped(model)
    base: Any = model.get_decoder()
    if not isinstance(getattr(base, "layers", None), nn.ModuleList):
        raise UnsupportedModelError(f"{type(model).__name__} has no decoder layers that fuse() could find")
    if hasattr(base, "_torchpaged_fusion"):
        raise ArgumentError(
            "model", "a model that is not fused", "a fused one", "call torchpaged.hf.unfuse(model) first"
        )
    config = model.config.get_text_config(decoder=True)
    report = FusionReport(type(model).__name__, len(base.layers), tuple(x for x in PASSES if x in chosen))
    report.before = count_launches(model) if count else None
    fusion = _Fusion(base, report, Rotations(base, config, sees_images=model.config is not config))
    for index, layer in enumerate(base.layers):
        name, (part, rest, why) = f"layers.{index}", WITHIN.get(type(layer).__name__, ("", "", ""))
        if part:
            for each in report.passes:
                if each in ("qkv", "rope", "norm", "gate_up"):
                    report.note(each, f"{name}.{rest}", why)
            layer, name = getattr(layer, part), f"{name}.{part}"
        _fuse_layer(fusion, layer, name, report.passes, report)
    if (
        len(fusion.plans) == len(base.layers)
        and all(mixer.rope is not None for plan in fusion.plans for mixer in plan.mixers)
        and fusion.rotations.tables
    ):
        rotary = next(iter(fusion.rotations.tables.values())).rotary
        fusion.give(rotary, "forward", lazy_forward)  # its result is no longer used
    fusion.ends, forwards = end_forwards(model, base, chosen, report)
    last = getattr(base.layers[-1], "_torchpaged_plan", None) if len(base.layers) else None
    if last is not None:
        last.ends = fusion.ends
    for module, forward in forwards:
        fusion.give(module, "_torchpaged_ends", fusion.ends)
        fusion.give(module, "forward", forward)
    fusion.give(base, "_torchpaged_fusion", fusion)
    fusion.give(base, "_apply", _apply_and_refresh)
    fusion.handles.append(base.register_load_state_dict_post_hook(_refresh_after_load))
    fusion.handles.append(base.register_forward_pre_hook(_require_unchanged, with_kwargs=True))
    fusion.look(model)
    MOVES[0] += 1
    report.after = count_launches(model) if count else None
    return report


def unfuse(model: PreTrainedModel) -> None:
    """Undo `fuse`: forwards as before, every parameter in memory of its own, values unchanged.

    Raises:
        ArgumentError: the model is not fused, or something else changed its forwards since.
    """
    base: Any = unwrapped(model).get_decoder()
    fusion: _Fusion | None = getattr(base, "_torchpaged_fusion", None)
    if fusion is None:
        raise ArgumentError("model", "a fused model", "one that is not fused")
    if fusion.overlaid():
        raise ArgumentError(
            "model",
            "forwards as fuse() left them",
            "forwards changed since",
            "undo that first, as with uncompile_layers(model)",
        )
    for module, name, _ in fusion.changed:
        delattr(module, name)
    take_out(unwrapped(model), FUSED)
    if is_attached(unwrapped(model)):
        put_in({module: of_few_tokens(module) for module, *_ in fusion.changed})
    for handle in fusion.handles:
        handle.remove()
    with torch.no_grad():
        for plan in fusion.plans:
            plan.separate()
    MOVES[0] += 1
