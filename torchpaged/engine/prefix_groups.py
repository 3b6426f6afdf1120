"""Which requests of a Generator share blocks, and whether decode steps read these once.

prefixes, reason = find_prefixes(model, cascade=True, share_prefixes=True, max_blocks_per_req=128)
"""

from __future__ import annotations

from torchpaged.backends.prefix_groups import reads_in_groups
from torchpaged.cascade import AutomaticPrefixes, CascadeCosts
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.engine.model import PagedModelProtocol


def check_cascade(cascade: bool | CascadeCosts) -> None:
    """Refuse what is neither a switch nor costs."""
    if not isinstance(cascade, (bool, CascadeCosts)):
        raise ArgumentError("cascade", "True, False or CascadeCosts", repr(cascade))


def find_prefixes(
    model: PagedModelProtocol,
    cascade: bool | CascadeCosts,
    share_prefixes: bool,
    max_blocks_per_req: int,
) -> tuple[AutomaticPrefixes | None, str]:
    """Who finds the groups of decode steps, and why; None: requests are read one by one.

    Args:
        model: the paged model; its session's specs say what its layers ask for. What pays is counted for the
            first layer that can read in groups; layers that can't read alone within the same steps.
        cascade: True: where it pays by the device's own `CascadeCosts`; False: never; or those costs.
        share_prefixes: whether any requests share blocks.
        max_blocks_per_req: columns of the block tables.
    """
    session, cache = model.session, model.kv_cache
    if cascade is False:
        return None, "switched off by cascade=False"
    if not share_prefixes:
        return None, (
            "no requests share blocks: share_prefixes=False, batch_invariant=True, or rolling layers"
        )
    if session.plans:
        return None, f"backend {session.name!r} plans its batches, which two passes have no plan for"
    able = [
        spec for spec in session.specs if reads_in_groups(spec, session.capabilities, session.workspace(spec))
    ]
    if not able:
        return None, f"no layer's attention on backend {session.name!r} can be read in two passes"
    spec = able[0]
    prefixes = AutomaticPrefixes(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        head_dim_v=spec.head_dim_v,
        kv_dtype=spec.kv_dtype or spec.dtype,
        max_blocks_per_req=max_blocks_per_req,
        block_size=cache.block_size,
        device=model.device,
        costs=None if cascade is True else cascade,
    )
    return prefixes, f"where it pays: {prefixes.costs.evidence}"
