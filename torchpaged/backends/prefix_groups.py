"""Whether a layer may read shared prefixes once for a group of requests, by two passes and a merge.

Every door asks here: `torchpaged.PagedAttention`, the layers of a HuggingFace cache, the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torchpaged.backends.capabilities import Capabilities
from torchpaged.backends.spec import AttentionSpec


def reads_in_groups(
    spec: AttentionSpec, capabilities: Capabilities, workspace: Mapping[str, Any] | None = None
) -> bool:
    """Whether a prefix looks alike to all queries of its group, their bits may depend on the batch, and the
    backend can do both passes. If not, requests are read one by one.

    Args:
        spec: of the layer.
        capabilities: of its backend.
        workspace: what its session keeps for it: functions of the backend's own are not for the two passes.
    """
    alike = spec.causal and not spec.window and not spec.chunked and not spec.alibi
    if not alike or spec.batch_invariant or spec.latent or spec.mods or "mods" in (workspace or {}):
        return False
    passes = replace(spec, lse=True, causal=False, sinks=False), replace(spec, lse=True)
    return not any(capabilities.reject(replace(one, tree_mask=False)) for one in passes)
