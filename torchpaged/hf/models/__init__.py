"""Families of models that need more than all others: functions for their modules, a layer of their cache, or
facts of them. Importing registers them all (`torchpaged.hf.families`).

Nothing outside this folder imports from it.
"""

from torchpaged.hf.models import (  # noqa: F401
    bart,
    bert,
    decoders,
    experts,
    facts,
    gemma,
    indexed,
    latent,
    lightning,
    mixers,
    recurrent_gemma,
    state_models,
    traceable,
)
