"""Products of few tokens with large weights on a CPU, by ops in the place of torch's: ``linear``, and
``apply_experts`` for the experts of mixtures that transformers' interface of experts runs.

A step of decoding reads every weight for a token or some. On processors that its library does not know best,
torch reads them at half the speed of memory (docs/log/products_cpu.md). Sums are of the weights' dtype or
wider and of one order, however many tokens there are.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack  # not public; tests/hf/test_few_tokens.py calls vmap
from torch.autograd.forward_ad import unpack_dual
from torch.nn import functional as F

from torchpaged.activations import name_of_activation
from torchpaged.custom_ops import BACKEND_OPS, native_status
from torchpaged.custom_ops.experts.limits import MAX_TOP_K

#: Tokens, at most: prompts go on in torch.
MAX_TOKENS = 32
#: Numbers of a weight, at least: below, a call of an op costs more than is saved.
MIN_NUMBERS = 1 << 18
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Where forwards of their classes are defined, or what decorates them.
_HOMES = ("torch.", "transformers.", "kernels.")
#: Beginnings of the names of functions beside a module's class that fused layers compute in their own way.
_ROTATIONS = ("apply_rotary", "rotate_half")
#: The module that has transformers' interface of experts, whose names there are private.
_INTERFACE = "transformers.integrations.moe"


def _is_plain(input: Tensor) -> bool:
    """Whether an op may take a tensor: nothing traces, differentiates, maps or casts what is computed."""
    return not (
        torch.compiler.is_compiling()
        or torch.is_grad_enabled()
        or unpack_dual(input).tangent is not None  # forward-mode derivatives go on under no_grad
        or peek_interpreter_stack() is not None  # vmap and its like, which have no rule for the op
        or torch.is_autocast_enabled("cpu")
        or type(input) is not Tensor
        or not input.is_cpu
        or input.layout != torch.strided
        or input.dtype not in DTYPES
    )


def _takes(weight: Any, dtype: torch.dtype) -> bool:
    """Whether an op takes a parameter together with inputs of that dtype."""
    return (
        type(weight) is nn.Parameter
        and weight.is_cpu
        and weight.layout == torch.strided
        and weight.dtype == dtype
        and weight.is_contiguous()
    )


def forward(self: Any, input: Tensor) -> Tensor:
    """Of an ``nn.Linear``, whose parameters or class others may have replaced since. A pickle of it, by this
    name, is its class's."""
    if type(self) is not nn.Linear:
        return type(self).forward(self, input)
    # A step comes here for every layer, and a module's attributes are slow to ask for.
    found = self.__dict__
    own = found["_parameters"]
    weight: Any = None if "weight" in found or "bias" in found else own.get("weight")
    bias: Any = own.get("bias", self)  # a tensor in its place is no parameter
    if (
        not _is_plain(input)
        or not _takes(weight, input.dtype)
        or input.shape[-1:] != weight.shape[1:]
        or input.numel() > MAX_TOKENS * weight.shape[1]
        or not (bias is None or (type(bias) is nn.Parameter and bias.is_contiguous()))
        or not (bias is None or bias.shape == weight.shape[:1])  # torch repeats one that is shorter
    ):
        return F.linear(input, self.weight, self.bias)
    rows, width = weight.shape
    out = input.new_empty((*input.shape[:-1], rows))
    x = input.reshape(-1, width).contiguous()
    BACKEND_OPS["cpu"].linear(x, weight, out.view(-1, rows), bias=bias)
    return out


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Of the experts of a mixture, as transformers' interface of experts has them. Whatever else its modules
    and options compute runs as the model's experts implementation says."""
    x = hidden_states
    activation = name_of_activation(self.act_fn)
    if (
        not _is_plain(x)
        or not _has_known_experts(self)
        or activation is None
        or not (_takes(self.gate_up_proj, x.dtype) and _takes(self.down_proj, x.dtype))
        or x.shape[1:] != self.gate_up_proj.shape[2:]
        or not 0 < x.shape[0] <= MAX_TOKENS
        or top_k_index.shape[1] > MAX_TOP_K
        or top_k_index.shape != top_k_weights.shape
    ):
        out: Tensor = type(self).forward(self, hidden_states, top_k_index, top_k_weights)
        return out
    x, ids, weights = x.contiguous(), top_k_index.int().contiguous(), top_k_weights.float().contiguous()
    out = torch.empty_like(x)
    BACKEND_OPS["cpu"].apply_experts(
        x, self.gate_up_proj, self.down_proj, ids, weights, out, activation=activation
    )
    return out


experts_forward.__name__ = "forward"  # by which a bound method is pickled: then it is its class's
FORWARDS = (forward, experts_forward)


def _has_known_experts(module: Any) -> bool:
    """Whether a module's class has the forward of that interface, computes what ``apply_experts`` does, and
    leaves it to the default of the model's experts implementations."""
    its = getattr(getattr(type(module), "forward", None), "__globals__", {})
    return (
        its.get("__name__") == _INTERFACE  # not a subclass's own
        and its["ALL_EXPERTS_FUNCTIONS"]["grouped_mm"] is its["grouped_mm_experts_forward"]  # nor a user's
        and module.config._experts_implementation == "grouped_mm"
        and module.has_gate
        and module.is_concatenated
        and not (module.has_bias or module.is_transposed or getattr(module, "has_post_expert_norm", False))
        and type(module)._apply_gate.__module__ == _INTERFACE  # no gate of its own
    )


def of_few_tokens(module: Any) -> tuple[str, Any] | None:
    """What a module gets, see `torchpaged.hf.families.Maker`: large products of a CPU one of `FORWARDS`."""
    if own_forward(module) is not None or not native_status()[0]:
        return None
    given: Any = None
    if type(module) is nn.Linear:
        weights, given = [module.weight], forward
    elif _has_known_experts(module):
        weights, given = [module.gate_up_proj, module.down_proj], experts_forward
    if given is None or not all(each.dtype in DTYPES and _takes(each, each.dtype) for each in weights):
        return None
    numbers = weights[-1].shape[-2:].numel()  # of one expert
    return ("forward", given) if numbers >= MIN_NUMBERS else None


def takes_few_tokens(module: nn.Module) -> bool:
    """Whether a module runs one of `FORWARDS`, which is its class's but for the order of sums; or, from a
    pickle of one of ours, its class's."""
    own = getattr(vars(module).get("forward"), "__func__", None)
    return own is not None and own in (*FORWARDS, type(module).forward)  # a scripted module's class has none


def own_forward(module: Any) -> Any:
    """The forward that a module has in its class's place, that of few tokens left out; or the one that others
    gave its class, which is torch's or transformers'. None: it has neither."""
    forward = None if takes_few_tokens(module) else vars(module).get("forward")
    if forward is not None or torch.compiler.is_compiling():
        return forward
    kind = type(module)
    return kind.forward if kind.__module__.startswith(_HOMES) and is_foreign(kind.forward) else None


def rotations_beside(kind: type) -> dict[str, Any]:
    """The functions of rotations in the file of a class, by name."""
    functions = vars(sys.modules[kind.__module__]).items() if kind.__module__ in sys.modules else ()
    return {name: function for name, function in functions if name.startswith(_ROTATIONS)}


def is_foreign(forward: Any) -> bool:
    """Whether a function, or one that it decorates, is neither torch's nor transformers', nor of the library
    of kernels by which that decorates its own."""
    home = getattr(forward, "__globals__", {}).get("__name__", "")
    decorated = getattr(forward, "__wrapped__", None)
    return not home.startswith(_HOMES) or (decorated is not None and is_foreign(decorated))
