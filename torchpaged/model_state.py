"""ModelState: what modules are made of, and whether it is still so.

Fused layers hold weights of other modules, captured steps replay kernels at addresses, with the adapters that
were active. A part, a weight, a forward or a hook that came since would not be seen: silently wrong tokens.
"""

import copy
import functools
import hashlib
import json
import operator
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any, ParamSpec

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.module_settings import ModuleSettings, plain_settings

#: What decides of a layer of the peft library which adapters run.
_ADAPTERS = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")
#: Rotations that replace their frequencies as texts grow.
LENGTH_DEPENDENT = ("dynamic", "longrope")
#: Where hooks are from that change no number: transformers' (tests/hf/test_fuse_steps.py notices if that
#: changes; that of modeling_utils has embeddings require grad, for checkpoints of activations), the ranges of
#: a profile, the look of a fused decoder, and what counts operations.
_WATCHERS = (
    *("transformers.utils.output_capturing", "transformers.modeling_utils"),
    "torchpaged.profiling.kernel_report.trace",
    *("torchpaged.fuse.passes", "torch.utils.module_tracker"),
)
#: Of a config: what says nothing about a model's numbers that its tensors don't.
_NO_NUMBERS = ("_name_or_path", "architectures", "dtype", "transformers_version")
_AT_ONCE = 1 << 24  # numbers
#: Buffers that are not saved, and that no forward writes: Gemma's, and Falcon-H1's, of which fused
#: layers have vectors.
_FOLDED = "mup_vector"
_FIXED = frozenset({"embed_scale", _FOLDED})
_version = operator.attrgetter("_version")
#: How often `torchpaged.fuse` moved weights of any model: by which a step that replays kernels at addresses
#: knows when to look at them.
MOVES = [0]
P = ParamSpec("P")
Modules = Mapping[str, nn.Module]


#: Hooks of all modules. Not public; tests/hf/test_fuse_changes.py notices if they go.
_OF_ALL = (torch_modules._global_forward_pre_hooks, torch_modules._global_forward_hooks)


def hooks_of(module: nn.Module) -> list[Any]:
    """The forward hooks of a module, those of all modules among them, without those that change nothing: by
    which transformers collects hidden states and attentions, which it leaves there for ever, and those of
    `module_ranges`."""
    held = (module._forward_pre_hooks, module._forward_hooks, *_OF_ALL)
    hooks = chain.from_iterable(map(dict.values, held))
    return [hook for hook in hooks if getattr(hook, "__module__", "") not in _WATCHERS]


def _adapters(module: nn.Module) -> dict[str, str]:
    if not hasattr(module, "active_adapters") or not hasattr(module, "merged_adapters"):
        return {}
    return {name: repr(getattr(module, name, None)) for name in _ADAPTERS}


def _name_of(function: Any) -> str:
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def fingerprint(model: nn.Module) -> str:
    """A hash of a model's parameters, buffers, active adapters and config: names, shapes, dtypes, and sums by
    which a change of any number shows, made where the numbers are. And of its modules' classes, hooks and
    numbers such as a norm's epsilon; what a hook or a forward computes can't be told."""
    digest = hashlib.sha256()
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype} {_sum_of(tensor)};".encode())
    for name, module in model.named_modules():
        hooks = [_name_of(hook) for hook in hooks_of(module)]
        theirs = [hook for hook in hooks if not hook.startswith("torchpaged.")]
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        settings = sorted(plain_settings(module).items())
        digest.update(f"{name} {kind} {theirs} {settings} {_adapters(module)};".encode())
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_diff_dict"):
        kept = {key: value for key, value in config.to_diff_dict().items() if key not in _NO_NUMBERS}
        digest.update(json.dumps(kept, sort_keys=True, default=str).encode())
    return digest.hexdigest()


@torch.no_grad()
def _sum_of(tensor: Tensor) -> int:
    """Of all numbers' bits, each times an odd number of its own, modulo 2**64."""
    numbers, total = tensor.detach().flatten(), 0
    numbers = torch.view_as_real(numbers).flatten() if numbers.is_complex() else numbers
    for begin in range(0, numbers.shape[0], _AT_ONCE):
        part = numbers[begin : begin + _AT_ONCE]
        bits = part.double().view(torch.int64) if part.is_floating_point() else part.long()
        places = torch.arange(begin, begin + bits.shape[0], device=bits.device)
        total += int((bits * (2 * places + 1)).sum())
    return total % 2**64


def _is_counted(tensor: Tensor) -> bool:
    """Whether torch counts writes into it: not if it was made in inference mode, which one whose ``data`` was
    replaced does not say of itself."""
    try:
        _version(tensor)
    except RuntimeError:
        return False
    return True


def _is_fixed_rotation(module: nn.Module) -> bool:
    """Whether it is a ``rotary_emb`` of transformers whose angles are those of positions alone."""
    kinds = getattr(module, "rope_type", None)
    kinds = list(kinds.values()) if isinstance(kinds, dict) else [kinds]
    return all(isinstance(kind, str) and not any(word in kind for word in LENGTH_DEPENDENT) for kind in kinds)


def _same(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(map(operator.is_, now, before))


def _first_changed(
    named: list[tuple[str, Tensor]], now: list[int], before: list[int], how: str
) -> str | None:
    if now == before:  # in C
        return None
    return f"{next(where for (where, _), x, y in zip(named, now, before, strict=True) if x != y)} {how}"


def undone_if_it_raises(init: Callable[P, None]) -> Callable[P, None]:
    """An ``__init__`` that calls ``self._give_back``, once that is set, where it raises: a model that it
    refuses stays as it was."""

    @functools.wraps(init)
    def made(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            init(*args, **kwargs)
        except BaseException:
            getattr(args[0], "_give_back", lambda: None)()
            raise

    return made


class ModelState:
    """Modules as they are now.

    Args:
        parts: modules by their paths, whose children and plain attributes are looked at.
        code: those whose class, forward, forward hooks, adapters, attributes, and classes of weights are.
        weights: those whose parameters and saved buffers are, and where these lie.
        configs: by their paths, whose attributes are looked at, too: forwards read them.
    """

    def __init__(
        self, parts: Modules, code: Modules, weights: Modules, configs: Mapping[str, Any] | None = None
    ) -> None:
        self._parts, self._code, self._weights = dict(parts), dict(code), dict(weights)
        # What a module holds, in a form that is compared without a call for each: `changed` runs in every
        # eager step of a fused model.
        self._dicts: list[Any] = [module._modules for module in self._parts.values() if module._modules]
        self._hooks: list[Any] = [*_OF_ALL]
        for module in self._code.values():
            self._hooks += [module._forward_pre_hooks, module._forward_hooks]
        self._kinds = {**self._parts, **self._code}
        self._loose = [module._parameters for path, module in self._code.items() if path not in self._weights]
        self._adapted = {path: found for path, module in self._code.items() if (found := _adapters(module))}
        self._settings = ModuleSettings({**self._parts, **self._code, **(configs or {})}, self._code)
        self._before, self._said = self._now(), dict(self._described())
        self.renew()

    @classmethod
    def of(cls, model: Any) -> "ModelState":
        """Of all that is in a model; what is no module has no state that is known."""
        modules = dict(model.named_modules()) if isinstance(model, nn.Module) else {}
        config: Any = getattr(model, "config", None)
        known = hasattr(config, "get_text_config")
        return cls(
            modules, modules, modules, {"config": config.get_text_config(decoder=True)} if known else None
        )

    def renew(self) -> None:
        """Take the weights as they are now: they were moved, or loaded into."""
        self._places: list[tuple[str, Any, str]] = []
        # What a rotation is made of, or a vector of multipliers: tables, cached keys and scales hold what it
        # gave, so a write shows as well.
        self._turning: list[tuple[str, Tensor]] = []
        for path, module in self._weights.items():
            # Other buffers that are not saved are the model's own business.
            turns = _is_fixed_rotation(module)
            passing = set() if turns else module._non_persistent_buffers_set - _FIXED
            for held in (module._parameters, module._buffers):
                names = [name for name in held if name not in passing]
                places = [(f"{path}.{name}" if path else name, held, name) for name in names]
                self._places += places
                self._turning += [
                    (where, found)
                    for where, held, name in places
                    if (turns or name == _FOLDED) and (found := held[name]) is not None
                ]
        self._held, self._names = [held for _, held, _ in self._places], [name for *_, name in self._places]
        self._tensors: list[Tensor | None] = [held[name] for _, held, name in self._places]
        # Subclasses (quantised ones) may have no address; that they are the same objects says enough.
        self._plain = [
            (where, found)
            for (where, *_), found in zip(self._places, self._tensors, strict=True)
            if found is not None and type(found.data) is Tensor
        ]
        self._on_device = [tensor for _, tensor in self._plain]
        self._counted = [each for each in self._tensors if each is not None and _is_counted(each)]
        self._addresses: list[int] | None = self._lie_at()
        self._turning = [(where, tensor) for where, tensor in self._turning if _is_counted(tensor)]
        self._turned: list[int] | None = self._writes()

    def _writes(self) -> list[int]:
        return [tensor._version for _, tensor in self._turning]

    def _lie_at(self) -> list[int]:
        return list(map(Tensor.data_ptr, self._on_device))

    def _now(self) -> list[Any]:
        return [
            *chain.from_iterable(map(dict.values, self._dicts)),
            *chain.from_iterable(map(dict.values, filter(None, self._hooks))),  # most are empty
            *map(type, chain.from_iterable(map(dict.values, self._loose))),
            *map(type, self._kinds.values()),
        ]

    def _described(self) -> Iterator[tuple[str, list[Any]]]:
        """The same, with what is said of a difference."""
        for path, module in self._parts.items():
            for name, child in module._modules.items():
                yield f"{path or 'the model'} has other parts: {name}", [child]
        for path, module in self._kinds.items():
            yield f"{path or 'the model'} is a {type(module).__name__}", [type(module)]
        for path, module in self._code.items():
            where = path or "the model"
            yield f"{where} has other forward hooks", hooks_of(module)
            if path not in self._weights:
                yield f"{where} has weights of another class", [*map(type, module._parameters.values())]

    @property
    def has_adapters(self) -> bool:
        """Whether layers have adapters, which can be switched to and fro."""
        return bool(self._adapted)

    def changed(self) -> str | None:
        """What is not as it was, None if all is."""
        return self.changed_but_moved() or self.moved()

    def changed_but_moved(self) -> str | None:
        """The same, of all but `moved`: at their addresses lies what this object keeps."""
        return self.changed_but_weights() or self._replaced()

    def changed_but_weights(self) -> str | None:
        """The same, of what `renew` does not take."""
        now = self._now()
        if now != self._before:  # lists ask what is identical first, in C
            found = dict(self._described())
            for words in self._said | found:
                if words not in found or not _same(found[words], self._said.get(words, [None, None])):
                    return words
            self._before = now  # hooks that change nothing
        for path, before in self._adapted.items():
            for name, value in _adapters(self._code[path]).items():
                if value != before.get(name):
                    return f"{path} has {name} {value}, before {before.get(name)}"
        return self._settings.changed()

    def _replaced(self) -> str | None:
        """The same, of what `renew` takes, by other tensors or by writes."""
        if not _same(list(map(dict.get, self._held, self._names)), self._tensors):
            pairs = zip(self._places, self._tensors, strict=True)
            moved = [where for (where, held, name), tensor in pairs if held.get(name) is not tensor]
            return f"{moved[0]} lies elsewhere"
        if torch.compiler.is_compiling():
            return None
        writes = self._writes()
        if self._turned is None:  # of a copy
            self._turned = writes
        return _first_changed(self._turning, writes, self._turned, "was written")

    def moved(self) -> str | None:
        """The same, of tensors that are as they were, by their addresses: through ``.data``."""
        if torch.compiler.is_compiling():  # code can't be traced that compares addresses
            return None
        addresses = self._lie_at()
        if self._addresses is None:  # of a copy
            self._addresses = addresses
        return _first_changed(self._plain, addresses, self._addresses, "lies elsewhere")

    def num_writes(self) -> int:
        """How often the weights were written in place so far, as far as torch counts it: not through
        ``.data``, and not in tensors that were made in inference mode."""
        # Not public; autograd relies on it (tests/engine/test_prefix_cache.py notices a change).
        return sum(map(_version, self._counted))

    def require_unchanged(
        self, by: str, fix: str, changed: "Callable[[ModelState], str | None]" = changed
    ) -> None:
        """Refuse to go on with what the modules were.

        Args:
            by: what relies on it.
            fix: what to do.
            changed: `changed`, `moved` or `changed_but_moved`.

        Raises:
            ArgumentError: with the first thing that is not as it was.
        """
        found = changed(self)
        if found is not None:
            raise ArgumentError(
                "model", f"the modules, forwards, hooks, weights, adapters, attributes that {by}", found, fix
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModelState":
        """Of copies of the modules, whose weights lie elsewhere."""
        copied: ModelState = object.__new__(ModelState)
        memo[id(self)] = copied
        memo |= {id(hooks): hooks for hooks in _OF_ALL}  # which are the copies', too
        vars(copied).update(copy.deepcopy(vars(self) | {"_addresses": None, "_turned": None}, memo))
        return copied
