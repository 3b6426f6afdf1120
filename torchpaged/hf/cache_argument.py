"""What the cache is called among the arguments and outputs of transformers' models.

Up to transformers 5.23 it is ``past_key_values``, and ``cache_params`` where layers keep states alone. From
5.24 on it is ``cache`` in all of them; callers may use the other names until 5.40, which warn.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from transformers.masking_utils import create_causal_mask

_IS_ONE = "cache" in inspect.signature(create_causal_mask).parameters
#: The name that this transformers' models use among themselves.
CACHE = "cache" if _IS_ONE else "past_key_values"
#: That of models whose layers keep states alone.
STATES_CACHE = "cache" if _IS_ONE else "cache_params"
#: That of its length, which some modules of position embeddings take.
CACHE_LENGTH = f"{CACHE}_length"
#: All that a caller may use.
CACHE_NAMES = ("past_key_values", "cache_params", "cache")


def cache_of(options: Mapping[str, Any]) -> Any:
    """The cache among the keywords of a forward, by whichever name; None if there is none."""
    for name in CACHE_NAMES:
        if options.get(name) is not None:
            return options[name]
    return None


def take_cache(options: dict[str, Any]) -> Any:
    """`cache_of`, which is then no longer among them."""
    cache = cache_of(options)
    for name in CACHE_NAMES:
        options.pop(name, None)
    return cache
