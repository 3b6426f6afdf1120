"""Modules with functions of ours in the place of their own, on the instance: of an attached model, and of one
that an engine runs or that is fused. Who puts one in holds it, and it goes with the last who does.

What a module ran before is kept in a form that copies of the module follow: a bound method kept in a closure
would run on the original's weights. The config of a model that was given its family's functions is
remembered, and tells a `PagedCache` what its modules can take.
"""

import copy
import functools
import types
import weakref
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

from transformers import PreTrainedModel

from torchpaged import few_tokens
from torchpaged.custom_ops.errors import ArgumentError, NotCopyableError, UnsupportedModelError
from torchpaged.few_tokens import own_forward
from torchpaged.hf.families import ATTENTION, MODULES, Function, Functions, family_of
from torchpaged.hf.row_refusals import require_left

MARK = "_torchpaged_own_attention"
#: Who holds functions.
ATTACHED, PAGED, FUSED = "attach", "an engine", "fuse"
#: What a module may keep with it, as long as it is attached: its slopes, whether its latents pass, and, of
#: the model, `_Given`.
SLOPES, PASSES, _CONFIG = "_torchpaged_slopes", "_torchpaged_passes", "_torchpaged_given"
# What attached models with functions of their family hold, by the id of their config, which several may have.
# Configs compare by their contents and have no hash.
_GIVEN: "weakref.WeakValueDictionary[int, _Given]" = weakref.WeakValueDictionary()


class _Given:
    """A config is that of attached models, as long as one of them holds this; so is that of a copy."""

    def __init__(self, config: Any) -> None:
        self._config = config

    @classmethod
    def of(cls, config: Any) -> "_Given":
        """The one of that config."""
        return _GIVEN.setdefault(id(config), cls(config))

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Given":
        return _Given.of(copy.deepcopy(self._config, memo))


class Replaced:
    """What stood in a function's place on the instance; `MARK` has it by the attribute's name.

    Args:
        before: what the instance had there; None: its class's.
        by: the function.
        holders: of it.
    """

    def __init__(self, before: Any, by: Any, holders: Iterable[str] = ()) -> None:
        self.before, self.by, self.holders = before, by, {*holders}

    def is_in(self, module: Any, name: str) -> bool:
        """Whether it is there, and nothing was put over it since."""
        return getattr(vars(module).get(name), "__func__", None) is self.by

    def __deepcopy__(self, memo: dict[int, Any]) -> "Replaced":
        return Replaced(copy.deepcopy(self.before, memo), self.by, self.holders)

    def __reduce__(self) -> Any:
        """Refuse those of an attached model: what is unpickled looks functions up by their names, and would
        find the class's, which does for products of few tokens alone.

        Raises:
            NotCopyableError: of any other.
        """
        of_few_tokens = self.by in few_tokens.FORWARDS
        if of_few_tokens or ATTACHED not in self.holders:
            return Replaced, (None, self.by if of_few_tokens else None, self.holders)
        raise NotCopyableError(
            "an attached model whose modules have functions of torchpaged's can't be pickled: call "
            "torchpaged.hf.detach(model) before, and attach what is loaded; copy.deepcopy and "
            "model.save_pretrained take it as it is"
        )


def plain_of(module: Any, name: str) -> Callable[..., Any]:
    """What ``module`` runs by ``name`` now, to be called with the module, or its copy, as first argument once
    a function of ours has its place."""
    if vars(module).get(name) is None:
        of_class: Callable[..., Any] = getattr(type(module), name)
        return of_class

    def plain(self: Any, *args: Any, **options: Any) -> Any:
        before = getattr(self, MARK)[name].before
        return (
            getattr(type(self), name)(self, *args, **options) if before is None else before(*args, **options)
        )

    return plain


def replace_attention(model: PreTrainedModel) -> int:
    """Give the modules that ignore the attention interface and keep keys and values in a cache their
    functions, and their helpers theirs; returns how many attention modules there are."""
    found = (module for module in model.modules() if type(module).__name__ in ATTENTION)
    modules = [
        module
        for module in found
        if getattr(module, "layer_idx", getattr(module, "layer_id", None)) is not None
    ]
    functions = {module: ATTENTION[type(module).__name__](module) for module in modules}
    for module, made in functions.items():
        is_theirs = own_forward(module) is not None and not hasattr(module, "_hf_hook")  # of accelerate
        if is_theirs and "forward" in _by_name(made):
            raise UnsupportedModelError(
                f"a {type(module).__name__} has a forward that another one replaced, which a paged cache "
                "would pass by, since it does not use transformers' attention interface; take that off"
            )
    put_in(functions)
    if modules:
        put_in(_other_modules(model))
        put_in(_looking_at_prompts(model))
    return len(modules)


def _looking_at_prompts(model: PreTrainedModel) -> dict[Any, Function]:
    """generate() of a model none of whose layers hands positions on is where a prompt shows that does not go
    on behind the cached tokens."""
    name = "prepare_inputs_for_generation"
    if not hasattr(model, name) or name in getattr(model, MARK, {}):
        return {}
    plain = plain_of(model, name)

    @functools.wraps(getattr(type(model), name))  # generate() reads its signature
    def prepare(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        require_left(kwargs, input_ids)
        return plain(self, input_ids, *args, **kwargs)

    return {model: (name, prepare)}


def _other_modules(model: PreTrainedModel) -> dict[Any, Function]:
    makers = ((each, MODULES.get(type(each).__name__, few_tokens.of_few_tokens)) for each in model.modules())
    given = ((module, maker(module)) for module, maker in makers)
    return {module: made for module, made in given if made is not None}


def give_functions(model: PreTrainedModel) -> None:
    """Give the modules of a model that uses the attention interface the functions of its family, and those
    whose code breaks a trace theirs."""
    config = model.config.get_text_config(decoder=True)
    family = family_of(config.model_type)
    functions = family.functions(model)
    put_in({**functions, **_other_modules(model)})
    hides = family.hides_positions or family_of(model.config.model_type).hides_positions
    # M-RoPE's positions reach attention in a first prompt alone
    hides = hides or any(hasattr(module, "rope_deltas") for module in model.modules())
    if functions or hides or model.config.is_encoder_decoder:
        put_in(_looking_at_prompts(model))
    if functions:
        setattr(model, _CONFIG, _Given.of(config))


def give_traceable(model: PreTrainedModel) -> None:
    """Give the modules whose code breaks a trace theirs, as the engine needs them, without attaching the
    model. One that has a function of its own keeps it."""
    for module, made in _other_modules(model).items():
        kept: Replaced | None = vars(module).get(MARK, {}).get(made[0])
        if made[0] not in vars(module) or (kept is not None and kept.is_in(module, made[0])):
            put_in({module: made}, PAGED)


def was_given_functions(config: Any) -> bool:
    """Whether a model of this text config, the very object, is attached and has the functions of its
    family."""
    return id(config) in _GIVEN


def _by_name(made: Function | Functions | None) -> dict[str, Any]:
    if made is None:
        return {}
    return dict(made if isinstance(made[0], tuple) else [made])


def put_in(functions: Mapping[Any, Function | Functions | None], holder: str = ATTACHED) -> None:
    """Give each module its functions, by the names they have there; None: it needs none. One that is there
    gets a holder more, and stays the object that graphs were made with."""
    for module, made in functions.items():
        for name, function in _by_name(made).items():
            held: dict[str, Replaced] = vars(module).setdefault(MARK, {})
            if name not in held or not held[name].is_in(module, name):
                before = vars(module).get(name)
                is_own = isinstance(before, types.MethodType) and before.__self__ is module
                if is_own and before.__func__ is getattr(type(module), name, None):
                    before = None  # its class's, which a pickle makes of one of ours
                held[name] = Replaced(before, function)
                if not held[name].is_in(module, name):
                    setattr(module, name, types.MethodType(function, module))
            held[name].holders.add(holder)


def is_held(module: Any, holder: str) -> bool:
    """Whether a module has a function of this holder's."""
    return any(holder in kept.holders for kept in vars(module).get(MARK, {}).values())


def drop(module: Any, name: str) -> None:
    """Take one of ours out for good: what comes in its place stays when the model is detached."""
    vars(module).pop(name, None)
    replaced: dict[str, Replaced] = getattr(module, MARK, {})
    replaced.pop(name, None)
    if not replaced:
        vars(module).pop(MARK, None)


def require_ours(model: PreTrainedModel) -> None:
    """Refuse to take functions out over which something else was put: what that calls can't be told."""
    for path, module in model.named_modules():
        for name, kept in vars(module).get(MARK, {}).items():
            if ATTACHED in kept.holders and not _is_free(module, name, kept):
                raise ArgumentError(
                    "model",
                    "functions as attach() left them",
                    f"{path}.{name}".lstrip(".") + " set to another since",
                    "take that off first (hooks of accelerate by remove_hook_from_module, compiled layers by "
                    "uncompile_layers)",
                )


def _is_free(module: Any, name: str, kept: Replaced) -> bool:
    """Whether nothing stands in the place of one of ours but itself, or what a pickle made of it."""
    return vars(module).get(name) is None or kept.is_in(module, name) or few_tokens.takes_few_tokens(module)


def take_out(model: PreTrainedModel, holder: str = ATTACHED, but: Container[Any] = ()) -> None:
    """Take the functions of a holder out again, unless another one holds them; what was on the instance
    before them comes back. ``but``: modules that keep theirs."""
    if holder == ATTACHED:
        vars(model).pop(_CONFIG, None)
    for module in model.modules():
        if module in but:
            continue
        held: dict[str, Replaced] = vars(module).get(MARK, {})
        for name, kept in [*held.items()]:
            kept.holders.discard(holder)
            if not kept.holders:
                del held[name]
                if _is_free(module, name, kept):
                    vars(module).pop(name, None)
                    if kept.before is not None:
                        setattr(module, name, kept.before)
        if not held:
            for own in (MARK, SLOPES, PASSES):
                vars(module).pop(own, None)
