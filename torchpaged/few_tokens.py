"""Products of few tokens with large weights on a CPU, by the op ``linear`` in the place of torch's.

A step of decoding reads every weight for a token or some. On processors that its library does not know best,
torch reads them at half the speed of memory (docs/log/products_cpu.md). Sums are of the weights' dtype or
wider and of one order, however many tokens there are.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack  # not public; tests/hf/test_few_tokens.py calls vmap
from torch.autograd.forward_ad import unpack_dual
from torch.nn import functional as F

from torchpaged.custom_ops import BACKEND_OPS, native_status

#: Tokens, at most: prompts go on in torch.
MAX_TOKENS = 32
#: Numbers of a weight, at least: below, a call of an op costs more than is saved.
MIN_NUMBERS = 1 << 18
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Where forwards of their classes are defined, or what decorates them.
_HOMES = ("torch.", "transformers.", "kernels.")


def forward(self: Any, input: Tensor) -> Tensor:
    """Of an ``nn.Linear``, whose parameters or class others may have replaced since. A pickle of it, by this
    name, is its class's."""
    if type(self) is not nn.Linear:
        return type(self).forward(self, input)
    weight, bias = self.weight, self.bias
    if (
        torch.compiler.is_compiling()
        or torch.is_grad_enabled()
        or unpack_dual(input).tangent is not None  # forward-mode derivatives go on under no_grad
        or peek_interpreter_stack() is not None  # vmap and its like, which have no rule for the op
        or torch.is_autocast_enabled("cpu")
        or type(input) is not Tensor
        or type(weight) is not nn.Parameter
        or not (input.is_cpu and weight.is_cpu)
        or not input.layout == weight.layout == torch.strided
        or input.dtype != weight.dtype
        or weight.dtype not in DTYPES
        or input.shape[-1:] != weight.shape[1:]
        or input.numel() > MAX_TOKENS * weight.shape[1]
        or not weight.is_contiguous()
        or not (bias is None or (type(bias) is nn.Parameter and bias.is_contiguous()))
        or not (bias is None or bias.shape == weight.shape[:1])  # torch repeats one that is shorter
    ):
        return F.linear(input, weight, bias)
    x = input.reshape(-1, weight.shape[1]).contiguous()
    out = x.new_empty(x.shape[0], weight.shape[0])
    BACKEND_OPS["cpu"].linear(x, weight, out, bias=bias)
    return out.view(*input.shape[:-1], weight.shape[0])


def of_few_tokens(module: nn.Module) -> tuple[str, Any] | None:
    """What a module of that class name gets, see `torchpaged.hf.families.Maker`."""
    if type(module) is not nn.Linear or own_forward(module) is not None or not native_status()[0]:
        return None
    weight = module.weight
    large = weight.dtype in DTYPES and weight.numel() >= MIN_NUMBERS and weight.layout == torch.strided
    return ("forward", forward) if large and weight.device.type == "cpu" and weight.is_contiguous() else None


def takes_few_tokens(module: nn.Module) -> bool:
    """Whether a module runs that forward, which is its class's but for the order of sums; or, from a pickle
    of one of ours, its class's."""
    own = getattr(vars(module).get("forward"), "__func__", None)
    return own is not None and own in (forward, type(module).forward)  # a scripted module's class has none


def own_forward(module: Any) -> Any:
    """The forward that a module has in its class's place, that of few tokens left out; or the one that others
    gave its class, which is torch's or transformers'. None: it has neither."""
    forward = None if takes_few_tokens(module) else vars(module).get("forward")
    if forward is not None or torch.compiler.is_compiling():
        return forward
    kind = type(module)
    return kind.forward if kind.__module__.startswith(_HOMES) and is_foreign(kind.forward) else None


def is_foreign(forward: Any) -> bool:
    """Whether a function, or one that it decorates, is neither torch's nor transformers', nor of the library
    of kernels by which that decorates its own."""
    home = getattr(forward, "__globals__", {}).get("__name__", "")
    decorated = getattr(forward, "__wrapped__", None)
    return not home.startswith(_HOMES) or (decorated is not None and is_foreign(decorated))
