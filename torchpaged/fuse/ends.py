"""The ends of a fused step: the embedding before the layers, the final norm and lm_head behind them.
`torchpaged.hf.fuse` gives them out.

Their forwards run the ops of the backend while a paged forward of the causal LM lasts, and what they did
before at any other time.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchpaged.custom_ops.checks import refuse_grad
from torchpaged.custom_ops.errors import TorchpagedError
from torchpaged.few_tokens import own_forward
from torchpaged.fuse.architectures import Architecture
from torchpaged.fuse.families import ARCHITECTURES
from torchpaged.fuse.fusible import norm_of
from torchpaged.fuse.layers import paged_owner
from torchpaged.fuse.report import FusionReport
from torchpaged.hf.cache_argument import cache_of
from torchpaged.hf.owner import PagedOwner
from torchpaged.model_state import ModelState, hooks_of

_DECODER, _NORM, _HEAD = "decoder", "final norm", "lm_head"
_BEHIND = {_DECODER: _NORM, _NORM: _HEAD, _HEAD: "none"}
_waiting: dict[int, "Ends"] = {}  # for whose paged forward a thread waits
_looking = threading.Lock()


class Ends:
    """What comes before and after the layers: ``owner`` is set for the time of one paged forward, in which
    the ops of its backend run.

    The final norm and lm_head become one: the norm hands its input on, and lm_head norms it. Where logits of
    some tokens of a packed batch are wanted, they are kept until a layer or the norm has taken them (`take`):
    the last layer drops the others behind its attention.

    Threads may share a model: a paged forward waits for that of another thread, and other forwards see none.
    Compiled ones must not overlap.
    """

    def __init__(self) -> None:
        self._owner: PagedOwner | None = None
        self._keep: Tensor | None = None
        self._thread: int | None = None  # whose forward it is; None of a compiled one, too
        self._next = _DECODER  # which part of it comes next
        self._lock = threading.RLock()
        self.norm: nn.Module | None = None
        self.offset = 0.0
        self.state: ModelState

    def __getstate__(self) -> dict[str, Any]:
        """For copies, which have a lock of their own."""
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.RLock())

    @property
    def owner(self) -> PagedOwner | None:
        """Of the paged forward that runs in this thread; None: none does."""
        mine = torch.compiler.is_compiling() or self._thread in (None, threading.get_ident())
        return self._owner if mine else None

    def take(self) -> Tensor | None:
        """The tokens whose logits are wanted, once: the caller goes on with these alone."""
        if self.owner is None:
            return None
        keep, self._keep = self._keep, None
        return keep

    def reach(self, part: str) -> None:
        """``part`` of the paged forward runs, each once and in turn: what the norm gives is lm_head's alone.

        Raises:
            TorchpagedError: it was called by something else, as a hook, before or behind that.
        """
        if self.norm is not None and self._next != part:
            raise TorchpagedError(
                f"the {part} of a fused model was called by itself inside a paged forward of the model (in a "
                "hook?), where the final norm is a part of lm_head; call the whole model there, or the parts "
                'behind the forward, or fuse without the pass "lm_head"'
            )
        self._next = _BEHIND[part]

    def run(self, owner: PagedOwner | None, keep: Tensor | None, forward: Callable[[], Any]) -> Any:
        """``forward()`` as the paged forward of ``owner``, None: as no paged one; the logits of ``keep`` are
        wanted, None: all."""
        if torch.compiler.is_compiling():
            return self._run(owner, keep, forward)
        if not self._lock.acquire(blocking=False):
            self._wait(threading.get_ident())
        outer = self._thread, self._owner, self._keep, self._next
        self._thread = threading.get_ident()
        try:
            return self._run(owner, keep, forward)
        finally:
            self._thread, self._owner, self._keep, self._next = outer
            self._lock.release()

    def _wait(self, me: int) -> None:
        """Take the lock from another thread, unless that waits for a forward of this one."""
        with _looking:
            ends: Ends | None = self
            while ends is not None:
                if ends._thread == me:
                    raise TorchpagedError(
                        "two threads wait for each other: hooks of fused models run other fused models; run "
                        "these in one thread, or call torchpaged.hf.unfuse on one"
                    )
                ends = None if ends._thread is None else _waiting.get(ends._thread)
            _waiting[me] = self
        try:
            self._lock.acquire()
        finally:
            del _waiting[me]

    def _run(self, owner: PagedOwner | None, keep: Tensor | None, forward: Callable[[], Any]) -> Any:
        self._owner, self._keep, self._next = owner, keep, _DECODER
        try:
            return forward()
        finally:
            self._owner = self._keep = None

    def enter(self, owner: PagedOwner | None) -> None:
        """The decoder runs, over the cache of ``owner``.

        Raises:
            ArgumentError: as `require_unchanged`, where it runs by itself.
            TorchpagedError: as `reach`.
        """
        if self.owner is not None:
            self.reach(_DECODER)
        elif owner is not None:
            self.require_unchanged()

    def require_unchanged(self) -> None:
        """Refuse a step over weights, modules and forwards that are the model's no longer."""
        if not torch.compiler.is_compiling():
            self.state.require_unchanged(
                "fuse() found", "call torchpaged.hf.unfuse(model), then torchpaged.hf.fuse(model) again"
            )


def _embedding_forward(self: Any, input_ids: Tensor) -> Tensor:
    owner = self._torchpaged_ends.owner
    # A first forward has no backend until its first keys show device and dtype. With gradients on, the layers
    # must see and refuse them.
    if owner is None or not owner.ready or (torch.is_grad_enabled() and self.weight.requires_grad):
        result: Tensor = type(self).forward(self, input_ids)
        return result
    out = self.weight.new_empty(input_ids.numel(), self.embedding_dim)
    owner.backend.ops.embedding(
        input_ids.reshape(-1).long().contiguous(), self.weight, out, scale=getattr(self, "embed_scale", None)
    )
    return out.view(*input_ids.shape, self.embedding_dim)


def _norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    ends: Ends = self._torchpaged_ends
    if ends.owner is None:
        result: Tensor = type(self).forward(self, hidden_states)
        return result
    ends.reach(_NORM)
    keep = ends.take()  # still there where the last layer is not fused
    return hidden_states if keep is None else hidden_states[:, keep]


def _head_forward(self: Any, hidden_states: Tensor) -> Tensor:
    ends: Ends = self._torchpaged_ends
    owner = ends.owner
    if owner is None:
        result: Tensor = type(self).forward(self, hidden_states)
        return result
    ends.reach(_HEAD)
    weight, eps, offset = norm_of(ends.norm, ends.offset)
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    out = x.new_empty(x.shape[0], self.out_features)
    owner.backend.ops.linear(
        x, self.weight, out, bias=self.bias, norm_weight=weight, norm_eps=eps, norm_offset=offset
    )
    return out.view(*hidden_states.shape[:-1], self.out_features)


def _model_forward(model: Any) -> Any:
    """The causal LM's forward, with the signature of the model's own, which generate() reads. Asked for
    hidden states, it keeps the final norm: the last of them is normed. So it does where hooks of the decoder
    see them, or a forward in its class's place. With another decoder than the fused one it has no ends."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        ends: Ends = self._torchpaged_ends
        wants = kwargs.get("output_hidden_states")
        if wants is None:
            wants = getattr(self.config, "output_hidden_states", False)
        fusion = getattr(self.model, "_torchpaged_fusion", None)
        plain = args or wants or fusion is None or fusion.ends is not ends or _is_seen(self.model)
        owner = None if plain else paged_owner(cache_of(kwargs))
        if owner is None:
            if ends.owner is None:
                return type(self).forward(self, *args, **kwargs)
            # Inside a paged one, whose rows these are not.
            return ends.run(None, None, lambda: type(self).forward(self, *args, **kwargs))
        ends.require_unchanged()
        if ends.norm is not None and torch.is_grad_enabled():  # the op of both would drop their gradients
            for name, module in (("the final norm", ends.norm), ("lm_head", self.lm_head)):
                refuse_grad(**{f"{name}'s {part}": each for part, each in module.named_parameters()})
        picks = ends.norm is not None and _picks(**kwargs)
        keep = kwargs.pop("logits_to_keep") if picks else None
        return ends.run(owner, keep, lambda: type(self).forward(self, **kwargs))

    forward.__wrapped__ = type(model).forward  # type: ignore[attr-defined]
    return forward


def _is_seen(base: Any) -> bool:
    """Whether something behind the final norm and ahead of lm_head takes what the norm gives."""
    hooks = base._forward_hooks
    return bool(hooks and (torch.compiler.is_compiling() or hooks_of(base))) or "forward" in vars(base)


def _picks(input_ids: Any = None, logits_to_keep: Any = 0, **_: Any) -> bool:
    """Whether fewer tokens than a packed batch has are named one by one."""
    packed = isinstance(input_ids, Tensor) and input_ids.shape[0] == 1 and isinstance(logits_to_keep, Tensor)
    return packed and logits_to_keep.dim() == 1 and logits_to_keep.numel() < input_ids.shape[1]


def _why_no_ends(model: Any, base: Any) -> str | None:
    """Why neither lm_head nor the embedding can be known."""
    if getattr(model, "model", None) is not base or not type(model).__name__.endswith("ForCausalLM"):
        return f"{type(model).__name__} is no causal LM of the known kind"
    if _final_norm(base) is None:
        norm: Any = getattr(base, "norm", None)
        return f"the final norm is a {type(norm).__name__}, expected one of the known families'"
    return "the model has a forward of its own" if "forward" in vars(model) else None


def _final_norm(base: Any) -> tuple[Any, Architecture] | None:
    """The norm behind the layers, and its family."""
    for architecture in ARCHITECTURES.values():
        norm = getattr(base, architecture.names.final_norm, None)
        is_theirs = type(norm).__module__.startswith("transformers.models.")
        if is_theirs and type(norm).__name__ == f"{architecture.family}RMSNorm":
            return norm, architecture
    return None


def _why_no_head(model: Any, norm: Any, architecture: Architecture) -> str | None:
    head: Any = getattr(model, "lm_head", None)
    if architecture.scales_head:
        return f"{type(model).__name__} scales what the final norm gives"
    if type(head) is not nn.Linear or type(head.weight.data) is not Tensor:
        return f"lm_head is a {type(head).__name__}, expected a plain Linear"
    if norm.weight.dtype not in (head.weight.dtype, torch.float32):
        return f"the final norm is {norm.weight.dtype}, lm_head {head.weight.dtype}"
    return _why_occupied("lm_head or the final norm", head, norm)


def _why_no_embedding(base: Any) -> str | None:
    table: Any = base.get_input_embeddings()
    families = [architecture.family for architecture in ARCHITECTURES.values()]
    scaled = {f"{family}{text}ScaledWordEmbedding" for family in families for text in ("", "Text")}
    known = type(table) is nn.Embedding or (
        type(table).__name__ in scaled and type(table).__module__.startswith("transformers.models.")
    )
    if not known or type(table.weight.data) is not Tensor:
        return f"the embedding is a {type(table).__name__}, expected a plain one or its family's scaled one"
    if table.max_norm is not None:
        return "the embedding renormalises its rows (max_norm)"
    scale = getattr(table, "embed_scale", None)
    if scale is not None and not scale.is_floating_point():
        return f"the embedding's scale is {scale.dtype}, which the op does not take"
    if not table.weight.is_floating_point() or table.weight.device.type == "meta":
        return f"the embedding is {table.weight.dtype} on {table.weight.device}, which the op does not take"
    return _why_occupied("the embedding", table)


def _why_occupied(what: str, *modules: Any) -> str | None:
    if any(hooks_of(module) for module in modules):
        return f"{what} has forward hooks"
    owns = any(own_forward(module) is not None for module in modules)
    return f"{what} has a forward of its own" if owns else None


def end_forwards(
    model: Any, base: Any, passes: Sequence[str], report: FusionReport
) -> tuple[Ends, list[tuple[nn.Module, Any]]]:
    """The forwards that "lm_head" and "embedding" of ``passes`` give to modules, none where they don't apply,
    and what these share.

    Args:
        model: the causal LM.
        base: its decoder.
        passes: those asked for.
        report: gets which apply, and why others do not.
    """
    forwards: list[tuple[nn.Module, Any]] = []
    ends, reason, final = Ends(), _why_no_ends(model, base), _final_norm(base)
    if "lm_head" in passes:
        why = reason if final is None or reason else _why_no_head(model, *final)
        report.note("lm_head", "lm_head", why)
        if why is None and final is not None:
            ends.norm, ends.offset = final[0], final[1].norm_offset
            forwards += [(final[0], _norm_forward), (model.lm_head, _head_forward)]
    if "embedding" in passes:
        why = reason or _why_no_embedding(base)
        report.note("embedding", "embed_tokens", why)
        if why is None:
            forwards.append((base.get_input_embeddings(), _embedding_forward))
    return ends, [*forwards, (model, _model_forward(model))] if forwards else []
