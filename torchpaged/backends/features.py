"""What an attention may use and a backend may lack: one row for each feature, and the sets that ask of it."""

from collections.abc import Callable
from typing import Literal, NamedTuple


class Feature(NamedTuple):
    """What an attention may use and a backend may lack.

    Attributes:
        name: as messages have it.
        short: as the table of all backends has it.
        argument: of an attention: it asks for the feature by its value, or where ``given`` by being there.
        had_by: "all": backends have it unless their `Capabilities` say otherwise; "own": this project's own
            kernels do, on every kind of device; "some": those that say so.
        by_position: it bears on where in their sequence a query and a key stand.
        over_latents: attention to latents has it, too.
        of_batches: a batch brings it with it, and not every batch of a layer that asks for it.
    """

    name: str
    short: str
    argument: str
    had_by: Literal["all", "own", "some"]
    given: bool = True
    by_position: bool = False
    over_latents: bool = False
    of_batches: bool = False


#: ``latent``: it is ``mla_attention``; ``fp8_queries``: queries of float8_e4m3fn; ``output_scale``: results
#: of it.
_FEATURES = (
    Feature("bidirectional", "full", "causal", "all", given=False, by_position=True, over_latents=True),
    Feature("window", "win", "window_size", "all", given=False, by_position=True),
    Feature("logits_soft_cap", "cap", "logits_soft_cap", "all", given=False),
    Feature("alibi", "ALiBi", "alibi_slopes", "all", by_position=True),
    Feature("sinks", "sinks", "sinks", "all"),
    Feature("chunked", "chunk", "chunk_size", "all", given=False, by_position=True),
    Feature("lse", "LSE", "lse", "all", over_latents=True),
    Feature("tree_mask", "tree", "tree_mask", "own", by_position=True, of_batches=True),
    Feature("block_sparse", "vs", "block_sparse", "own", by_position=True),
    Feature("latent", "MLA", "latent", "own", over_latents=True),
    Feature("fp8_queries", "q8", "fp8_queries", "some"),
    Feature("output_scale", "o8", "output_scale", "own", over_latents=True),
)


def _those(of: Callable[[Feature], bool]) -> frozenset[str]:
    return frozenset(feature.name for feature in _FEATURES if of(feature))


#: The names of all, as messages have them.
FEATURES = tuple(feature.name for feature in _FEATURES)
#: Name -> column of the table of all backends.
SHORT = {feature.name: feature.short for feature in _FEATURES}
#: Those that a backend has unless its `Capabilities` say otherwise.
COMMON_FEATURES = _those(lambda feature: feature.had_by == "all")
#: Those of this project's own kernels, on every kind of device.
OWN_FEATURES = _those(lambda feature: feature.had_by != "some")
#: Those that a batch brings with it, and not every batch of a layer that asks for them.
BATCH_FEATURES = _those(lambda feature: feature.of_batches)
#: Those of attention to latents.
LATENT_FEATURES = _those(lambda feature: feature.over_latents)
#: Those of a layer with which its queries see a key differently.
POSITIONAL_FEATURES = _those(lambda feature: feature.by_position) - BATCH_FEATURES
#: Options of a layer that bear on where in their sequence a query and a key stand.
BY_POSITION = (*(one.argument for one in _FEATURES if one.by_position), "score_mod", "mask_mod")
#: Features that an argument of an attention is by being given, by the argument's name.
GIVEN = {feature.argument: feature.name for feature in _FEATURES if feature.given}
