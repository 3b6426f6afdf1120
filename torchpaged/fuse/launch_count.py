"""How many kernels a decode step launches, by counting op calls.

    launches = count_launches(model)    # one token over a paged cache
    launches.layers                     # per decoder layer

An op call that makes or writes numbers counts as one launch, whatever its kernel does inside; views and
allocations don't count.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from torchpaged.backends import Limits
from torchpaged.custom_ops.errors import UnsupportedModelError
from torchpaged.fuse.report import Launches
from torchpaged.hf.attention import NAME
from torchpaged.hf.model_classes import uses_attention_interface
from torchpaged.hf.packed_mixers import pack_mixers
from torchpaged.hf.step_cache import StepCache
from torchpaged.hf.switch import Settings

#: Ops that give memory or another view of it, and launch nothing; views are known by their schema.
_WITHOUT_KERNEL = frozenset(
    {
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "_unsafe_view",
        "lift_fresh",
        "detach",
        "_local_scalar_dense",
        "is_same_size",
        "sym_size",
        "item",
    }
)


def launches_kernel(func: Any) -> bool:
    """Whether an op writes or makes numbers, by its schema: views and allocations do not."""
    if func.namespace == "aten" and func._schema.name.split("::")[1] in _WITHOUT_KERNEL:
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
            with counting:
                cache.run(model, *step)
    finally:
        for handle in handles:
            handle.remove()
        settings.give_back()
    names = tuple(tuple(counting.calls.get(index, ())) for index in range(len(layers)))
    return Launches(tuple(map(len, names)), len(counting.calls.get(-1, ())), names)
