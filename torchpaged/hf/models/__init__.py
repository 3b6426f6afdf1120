"""One file per family of models that needs more than all others: functions for its modules, a layer of its
cache, or facts of it. Importing registers them all (`torchpaged.hf.families`).

Nothing outside this folder imports from it.
"""

from torchpaged.hf.models import (  # noqa: F401
    bart,
    bert,
    bloom,
    experts,
    facts,
    falcon,
    gemma,
    gptj,
    indexed,
    latent,
    lightning,
    mixers,
    recurrent_gemma,
    state_models,
    traceable,
)
