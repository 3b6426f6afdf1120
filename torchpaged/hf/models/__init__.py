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
    gated_delta_net,
    gemma,
    gptj,
    indexed,
    kimi_delta,
    latent,
    lightning,
    mamba1,
    mamba2,
    recurrent_gemma,
    short_conv,
    state_models,
    traceable,
)
