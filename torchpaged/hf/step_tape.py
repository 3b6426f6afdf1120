"""StepTape: decode steps of a fused model on a CPU as the list of their ops, without the Python between them.

    tape = StepTape(model)
    logits = tape.run(input_ids, metadata, ops, plain)      # plain() runs the model

With few requests this Python takes as long as half of the ops. A step is recorded twice over the same
tensors; if both recordings are the same, later steps over these run its ops. A recording holds known ops
alone, whose numbers all come from memory that stays or from ops before them: a step in which anything else
computes, or reads a value on the host, goes on from Python. So does a model in which a module has a hook, or
a forward that is neither transformers' nor of `torchpaged.fuse`: no code of a user's is left out. What is
left out is what the replay of a CUDA graph leaves out, too.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchpaged.custom_ops import BACKEND_OPS, BackendOps
from torchpaged.few_tokens import own_forward
from torchpaged.hf.call import autocasts
from torchpaged.metadata import AttentionMetadata
from torchpaged.model_state import ModelState, holders_of_hooks
from torchpaged.profiling.ranges import is_on as is_profiling

#: Tokens, at most: what a recording makes stays, and with more of them Python is little.
MAX_TOKENS = 8
_RECORDINGS = 3  # the first may be the one that makes what others find
_MEMORY = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"}
#: Those of the last line do not always give a view.
_VIEWS = {
    *("view", "split", "split_with_sizes", "chunk", "unbind", "slice", "select", "narrow", "expand", "alias"),
    *("squeeze", "unsqueeze", "transpose", "permute", "t", "unflatten", "detach", "as_strided"),
    *("reshape", "flatten", "contiguous", "to"),
}
#: Functions that stand between ours in a family's steps, such as a scale of its logits.
_FUNCTIONS = {"mul", "div", "tanh", "index_select"}
_CALL = nn.Module.__call__  # some profilers give it another one


def _flat(values: Iterable[Any]) -> list[Any]:
    """Arguments or results of an op, whose lists have no lists."""
    found: list[Any] = []
    for value in values:
        found += value if isinstance(value, list | tuple) else (value,)
    return found


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _copied(out: Tensor, func: Any, args: tuple[Any, ...], **kwargs: Any) -> None:
    out.copy_(func(*args, **kwargs))


class _Recording(TorchDispatchMode):
    """A step's ops.

    Attributes:
        calls: those that compute, with their arguments, which they keep alive.
        described: of each its arguments in a form that can be compared with another recording's. While both
            are kept, no address is that of two of their tensors.
        why_not: what else there was; None: nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
        self.described: list[list[Any]] = []
        self.why_not: str | None = None
        self._made: dict[int, tuple[int, Tensor]] = {}  # by address, its number
        self._written: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, (space, name) = kwargs or {}, func._schema.name.split("::")
        out = func(*args, **kwargs)
        if space == "torchpaged" and out is None:
            self._note(func, args, kwargs)
        elif space != "aten":
            self._refuse(func)
        elif name in _MEMORY:
            self._make(out)
        elif name in _FUNCTIONS:
            self._make(out)
            self._note(func, args, kwargs)
            self.calls[-1] = _copied, (out, func, args), kwargs
            self._written.add(_memory(out))
        elif name not in _VIEWS or {*map(_memory, _flat([out]))} != {_memory(args[0])}:
            self._refuse(func)
        return out

    def _refuse(self, what: Any) -> None:
        self.why_not = self.why_not or str(what)

    def _make(self, out: Tensor) -> None:
        if _memory(out) in self._made:
            self._refuse("an op that gives memory of another one")
        self._made[_memory(out)] = len(self._made), out

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = func._schema.arguments
        writes = {each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write}
        given = dict(zip((each.name for each in arguments), args, strict=False)) | kwargs
        described, written = [func], set[int]()
        for name, value in given.items():
            for each in _flat([value]):
                described += name, self._described(each)
                if isinstance(each, Tensor) and (place := _memory(each)) in self._made:
                    if name in writes:
                        written.add(place)
                    elif place not in self._written:
                        self._refuse(f"{func} of memory that no known op wrote")
        self._written |= written
        self.described.append(described)
        self.calls.append((func, args, kwargs))

    def _described(self, each: Any) -> Any:
        if not isinstance(each, Tensor):
            return each
        place = _memory(each)
        where = self._made[place][0] if place in self._made else (place,)
        return where, each.dtype, each.shape, each.stride(), each.storage_offset()

    def gives(self, output: Tensor) -> bool:
        """Whether it is whole, and ``output`` is of its ops."""
        return self.why_not is None and _memory(output) in self._written


class StepTape:
    """The tape of a model's steps over the last tensors that came.

    Args:
        model: of transformers.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._base = model, model.get_decoder()
        self._fusion: Any = None
        self._state: ModelState | None = None  # where it is known
        self._forget([])

    def _forget(self, over: list[Any]) -> None:
        self._over, self._tries = over, 0
        self._before: _Recording | None = None
        self._calls: list[Any] = []
        self._output: Tensor | None = None

    def run(
        self, input_ids: Tensor, step: AttentionMetadata, ops: BackendOps, plain: Callable[[], Tensor]
    ) -> Tensor:
        """Logits of a step.

        Args:
            input_ids: ``[num_tokens]``.
            step: the batch.
            ops: of the backend.
            plain: runs the model over it.
        """
        if step.max_query_len != 1 or input_ids.shape[0] > MAX_TOKENS or step.prefixes is not None:
            return plain()
        if ops != BACKEND_OPS["cpu"] or not self._may_run(input_ids):
            return plain()
        over = [input_ids, *vars(step).values()]
        if len(over) != len(self._over) or any(x is not y for x, y in zip(over, self._over, strict=True)):
            self._forget(over)
            return plain()
        if self._output is None:
            return plain() if self._tries == _RECORDINGS else self._record(plain)
        for func, args, kwargs in self._calls:
            func(*args, **kwargs)
        return self._output.clone()

    def _record(self, plain: Callable[[], Tensor]) -> Tensor:
        before, self._before = self._before, None
        self._tries += 1
        with _Recording() as recording:
            output = plain()
        if not recording.gives(output):
            self._tries = _RECORDINGS
        elif before is not None and before.described == recording.described:
            self._calls, self._output = recording.calls, output
        elif self._tries < _RECORDINGS:
            self._before = recording
        return output.clone()

    def _may_run(self, input_ids: Tensor) -> bool:
        """Whether Python has nothing to do in a step but what fuse() and transformers want. Once a model has
        changed, it has: it refuses the step, or takes what came."""
        if vars(self._base).get("_torchpaged_fusion") is not self._fusion:
            self._look()
        if self._state is not None and self._state.changed() is not None:
            self._state = None
            self._forget([])  # it may hold weights that are the model's no longer
        return (
            self._state is not None
            and torch.is_inference_mode_enabled()
            and not (is_profiling() or autocasts(input_ids))
            and not any(self._hooks)
            and len(self._base._forward_pre_hooks) == 1  # fuse()'s
            and nn.Module.__call__ is _CALL
            and not any(module.training for module in self._modules)
        )

    def _look(self) -> None:
        """A model that was fused or unfused."""
        self._forget([])
        self._fusion = vars(self._base).get("_torchpaged_fusion")
        self._modules: list[nn.Module] = list(self._model.modules())
        held = {id(hooks): hooks for module in self._modules for hooks in holders_of_hooks(module)}
        held.pop(id(self._base._forward_pre_hooks))
        self._hooks = list(held.values())
        known = self._fusion is not None and all(map(_is_known, self._modules))
        self._state = ModelState.of(self._model) if known else None


def _is_known(module: nn.Module) -> bool:
    """Whether a module's code is transformers', torch's or ours."""
    home = getattr(getattr(own_forward(module), "__func__", None), "__globals__", {})
    is_plain = type(module).__module__.startswith(("torch.nn.", "transformers."))
    compiled = getattr(module, "_compiled_call_impl", None) is not None
    ours = own_forward(module) is None or str(home.get("__name__")).startswith("torchpaged.")
    return is_plain and ours and not compiled
