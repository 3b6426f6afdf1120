"""ModuleSettings: the plain attributes of modules and configs (numbers, flags, names, lists of them and
functions) and the forwards of modules, and whether they are still those. Fused layers hold what some of them
were, captured steps have run with all of them.
"""

import copy
import functools
import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from torchpaged.few_tokens import own_forward, rotations_beside

_PLAIN = bool | int | float | str | None
_FUNCTIONS = types.FunctionType | types.BuiltinFunctionType | functools.partial
#: Ends of names of what a forward notes itself, and of what no step over a cache depends on.
_IGNORED = ("training", "gradient_checkpointing", "max_seq_len_cached", "name_or_path", "model_tags")
#: The same of a config, with what is asked for call by call.
_IGNORED_OF_CONFIGS = (
    *(*_IGNORED, "architectures", "dtype", "transformers_version", "id2label", "label2id", "problem_type"),
    *("return_dict", "use_cache", "output_hidden_states", "output_router_logits", "token_id", "token_ids"),
)


def _is_value(value: Any) -> bool:
    """Whether it is plain, or a list of such."""
    if isinstance(value, dict):
        return all(map(_is_value, value.values()))
    return all(map(_is_value, value)) if isinstance(value, tuple | list) else isinstance(value, _PLAIN)


def _differ(now: Any, before: Any) -> bool:
    """But for tensors where nothing was, which forwards leave in modules."""
    left = before is None and isinstance(now, Tensor)
    same = now is before or left or (type(now) is type(before) and now == before)
    return not same


def _unlike(now: list[Any], before: list[Any]) -> bool:
    try:
        return now != before
    except RuntimeError:  # a tensor of several numbers in the place of one
        return True


def _counts(holder: Any, name: str) -> bool:
    ignored = _IGNORED if isinstance(holder, nn.Module) else _IGNORED_OF_CONFIGS
    return not name.startswith("_") and not name.endswith(ignored)


def plain_settings(module: nn.Module) -> dict[str, bool | int | float | str | None]:
    """Those that are no list and no function."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, _PLAIN) and _counts(module, name)
    }


class ModuleSettings:
    """Attributes as they are now.

    Args:
        holders: modules and configs, by their paths.
        coded: the paths of those whose forward is looked at.
    """

    def __init__(self, holders: Mapping[str, Any], coded: Iterable[str]) -> None:
        self._holders, self._coded = dict(holders), tuple(coded)
        self._settings = [
            (path, name)
            for path, holder in self._holders.items()
            for name, value in vars(holder).items()
            if _counts(holder, name) and (_is_value(value) or isinstance(value, _FUNCTIONS))
        ]
        self._settings += [(path, "forward") for path in self._coded]
        self._forwards = {path: own_forward(self._holders[path]) for path in self._coded}
        # of classes, to which other libraries give theirs
        modules = (holder for holder in self._holders.values() if isinstance(holder, nn.Module))
        self._classes = list({type(module) for module in modules})
        files = {kind.__module__: kind for kind in self._classes}
        self._beside = [
            (file, name, function)
            for file, kind in files.items()
            for name, function in rotations_beside(kind).items()
        ]
        self._of_classes = self._class_forwards()
        self._known = {path: frozenset(vars(holder)) for path, holder in self._holders.items()}
        self._hold()
        self._before = [copy.deepcopy(x) if isinstance(x, list | dict) else x for x in self._now()]
        self._sizes = self._sizes_now()

    def _hold(self) -> None:
        """In a form that is compared without a call for each: `changed` runs in every eager step of a fused
        model."""
        self._all = [vars(holder) for holder in self._holders.values()]
        self._owners = [vars(self._holders[path]) for path, _ in self._settings]
        self._names = [name for _, name in self._settings]

    def _now(self) -> list[Any]:
        return list(map(dict.get, self._owners, self._names))

    def _sizes_now(self) -> list[int]:
        return list(map(len, self._all))

    def _class_forwards(self) -> list[Any]:
        # a file that is no module any more is as it was
        beside = [getattr(sys.modules.get(file), name, was) for file, name, was in self._beside]
        return [*(kind.forward for kind in self._classes), *beside]

    def changed(self) -> str | None:
        """What is not as it was, None if all is."""
        now, sizes, forwards = self._now(), self._sizes_now(), self._class_forwards()
        found = self._changed_settings(now) if _unlike(now, self._before) else None
        if forwards != self._of_classes:
            words = [f"the class {kind.__name__} has another forward" for kind in self._classes]
            words += [f"{file} has another {name}" for file, name, _ in self._beside]
            trios = zip(words, forwards, self._of_classes, strict=True)
            found = found or next(said for said, now, was in trios if now != was)
        if sizes != self._sizes:
            found = found or self._shadowed()
            self._sizes = sizes if found is None else self._sizes
        return found

    def _changed_settings(self, now: list[Any]) -> str | None:
        trios = zip(self._settings, now, self._before, strict=True)
        for index, ((path, name), value, was) in enumerate(trios):
            if name == "forward" and path in self._forwards:
                if own_forward(self._holders[path]) is not self._forwards[path]:
                    return f"{path or 'the model'} has another forward"
                self._before[index] = value
            elif _differ(value, was):
                return f"{path or 'the model'} has {name} {value}, before {was}"
        return None

    def _shadowed(self) -> str | None:
        """An attribute that came since, in the place of its class's."""
        for path, holder in self._holders.items():
            for name in sorted(vars(holder).keys() - self._known[path]):
                value, before = vars(holder)[name], getattr(type(holder), name, holder)
                if _counts(holder, name) and _is_value(value) and _is_value(before) and value != before:
                    return f"{path or 'the model'} has {name} {value}, before {before}"
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModuleSettings":
        """Of copies of the holders."""
        copied = memo[id(self)] = object.__new__(ModuleSettings)
        of_classes = {"_beside": self._beside, "_of_classes": self._of_classes}  # which are the copies', too
        made = ("_all", "_owners", "_names", *of_classes)
        kept = {name: x for name, x in vars(self).items() if name not in made}
        vars(copied).update(copy.deepcopy(kept, memo) | of_classes)
        copied._hold()
        return copied
