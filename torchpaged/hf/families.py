"""What is known of models by their type, where neither their config nor their class says it: one `Family` of
types by each file of `torchpaged.hf.models`, which registers it.

The rest of this folder asks `family_of`, and names no model.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.hf.cache_argument import CACHE

#: The name and the function that a module gets on the instance.
Function = tuple[str, Callable[..., Any]]
#: Several of one module.
Functions = tuple[Function, ...]
#: Makes them for a module; None where this transformers' module needs nothing.
Maker = Callable[[Any], Function | None]


@dataclass(frozen=True, eq=False)
class Family:
    """Facts of model types, and the functions that their modules need.

    Attributes:
        types: the model types.
        own_attention: their attention modules ignore transformers' attention interface, and get the functions
            of ``attention``.
        pages_cross_attention: of such modules, cross attention is paged, too.
        may_lack_causal_mask: their modelling file makes no causal mask in transformers 5.17, and gets one
            from us.
        needs_dense: what they do with their cached keys or values that pools don't allow; empty: nothing. A
            `PagedCache` gathers for them unless ``dense=False``.
        caches_latents: they have multi-head latent attention, whose layers a `PagedCache` keeps as latents
            once the model is attached.
        adds_bias: they add a bias by positions to their scores.
        attends_to_others: of models with encoders whose attention modules tell by ``is_decoder`` whether they
            attend to their own tokens: whether one without that attribute may attend to others.
            `torchpaged.hf.uncached` leaves out padding queries where they attend to their own. None: they
            don't tell.
        takes_no_none: they take a mask for granted where transformers' mask function may return None; theirs
            is a placeholder that nothing looks at.
        asks_again: they compute with a prompt's 2-D mask, and ask for their masks in the forward: one that
            was made ahead carries nothing to it.
        makes_ones: they make a mask of ones where they are given none, and place tokens by the positions
            given.
        hides_positions: they use transformers' attention interface, and hand no positions on to it: a prompt
            that does not go on behind a cache's tokens is seen where generate() prepares it.
        caches_others: what is no token of theirs that they write to their cache; empty: nothing.
        states_alone: none of their layers attends.
        cache_argument: the argument of their forwards that takes a cache.
        require_expressible: refuses a config that asks for what paged attention does not express.
        loses_masks_made_ahead: whether masks that generate() makes ahead of a forward are wrong for a model
            of this config, so that it must make them itself: its cache is then not compileable.
        class_tables: where their modelling files look their attention class up by the implementation's name:
            ``"falcon.modeling_falcon.FALCON_ATTENTION_CLASSES"`` under transformers.models.
        attention: class of an attention module that ignores the interface -> what makes its function.
        modules: class of another module, in any model that is attached -> the same: those that go with such
            attention, and those whose code breaks a trace. Others get `torchpaged.few_tokens.of_few_tokens`.
        functions: of a model that is attached, the modules that get one, where its class does not say it.
        packed: class of a module that keeps states, or takes no cache with others' -> its forward over the
            packed tokens of a `torchpaged.hf.packed_state.PackedState`; with another cache it calls its
            class's.
        layer: makes the layer of a paged cache, called as `torchpaged.cache.kinds.LayerKind.hf_layer` is;
            None where the layer is as other models'.
    """

    types: tuple[str, ...] = ()
    own_attention: bool = False
    pages_cross_attention: bool = False
    may_lack_causal_mask: bool = False
    needs_dense: str = ""
    caches_latents: bool = False
    adds_bias: bool = False
    attends_to_others: bool | None = None
    takes_no_none: bool = False
    asks_again: bool = False
    makes_ones: bool = False
    hides_positions: bool = False
    caches_others: str = ""
    states_alone: bool = False
    cache_argument: str = CACHE
    require_expressible: Callable[[Any], None] = lambda config: None
    loses_masks_made_ahead: Callable[[Any], bool] = lambda config: False
    class_tables: tuple[str, ...] = ()
    attention: Mapping[str, Maker] = field(default_factory=dict)
    modules: Mapping[str, Maker] = field(default_factory=dict)
    functions: Callable[[Any], Mapping[nn.Module, Function | Functions]] = lambda model: {}
    packed: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    layer: Callable[[Any, int, Any, Any], Any] = lambda owner, index, config, template: None

    def __reduce__(self) -> Any:
        """A copy is the family itself: it holds functions, and is compared by identity."""
        return family_of, self.types[:1] or ("",)

    @property
    def computes_with_keys(self) -> bool:
        """Whether they do arithmetic on what their cache returns, as long as nothing keeps them from it."""
        return self.own_attention or bool(self.needs_dense)


FAMILIES: dict[str, Family] = {}
_PLAIN = Family()
#: The tables of all families, see `Family`.
ATTENTION: dict[str, Maker] = {}
MODULES: dict[str, Maker] = {}
PACKED: dict[str, Callable[..., Any]] = {}
CLASS_TABLES: dict[str, bool] = {}  # whether the eager class may stand in: it only needs a mask


def register_family(family: Family) -> None:
    """Make ``family`` known.

    Raises:
        ArgumentError: one of its types, or of the classes in its tables, is another family's.
    """
    tables: tuple[tuple[Any, Any], ...] = (
        (ATTENTION, family.attention),
        (MODULES, family.modules),
        (PACKED, family.packed),
    )
    taken = {*FAMILIES} & {*family.types} | {name for known, new in tables for name in {*known} & {*new}}
    if taken:
        raise ArgumentError("family", "types and classes that no other family has", str(sorted(taken)))
    for forward in family.packed.values():
        forward.__name__ = "forward"  # a pickle of a method has its name, by which its class's is found
    FAMILIES.update(dict.fromkeys(family.types, family))
    for known, new in tables:
        known.update(new)
    CLASS_TABLES.update(dict.fromkeys(family.class_tables, family.own_attention))


def family_of(model_type: str) -> Family:
    """The family of a model type; one without any facts for other models."""
    return FAMILIES.get(model_type, _PLAIN)
