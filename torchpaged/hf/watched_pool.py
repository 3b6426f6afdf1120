"""Pools that refuse arithmetic: what a layer's first `update` returns, so that a model that computes with its
cached keys is noticed.

Paged attention reads keys and values where they lie. A model that expands, repeats or re-orders what the
cache returned (latent attention, repeated heads, a mask computed from the values) would take blocks for batch
rows: an error far away, or wrong numbers.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops.errors import UnsupportedModelError


class WatchedPool(Tensor):
    """A pool's memory under another Python object: attributes may be read, and whatever makes another tensor
    of it raises.

    Attributes:
        pool: the pool itself.
    """

    pool: Tensor
    _torchpaged_layer: Any  # the `PagedLayer` whose pool it is, as the pool itself has it

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func``; a result that is the pool itself, or no tensor, passes."""
        with torch._C.DisableTorchFunctionSubclass():
            try:
                result = func(*args, **(kwargs or {}))
            except (RuntimeError, IndexError) as error:  # such as a shape that only dense keys have
                raise _refusal(func, args, kwargs) from error
        results = result if isinstance(result, (tuple, list)) else (result,)
        if any(isinstance(x, Tensor) and not any(x is given for given in args) for x in results):
            raise _refusal(func, args, kwargs)
        return result


def _refusal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> UnsupportedModelError:
    """Of ``func`` over a pool; another try is refused, too."""
    watched = next(x for x in (*args, *_flat(args), *(kwargs or {}).values()) if isinstance(x, WatchedPool))
    layer = watched._torchpaged_layer
    name = layer.owner.name
    layer.watch_again()
    family = layer.owner.family
    if family.own_attention:
        return UnsupportedModelError(
            f"{name} ignores transformers' attention interface; call "
            "torchpaged.hf.attach(model), or run it within `with torchpaged.hf.paged(model)`, in eval mode: "
            "while it trains it runs its own attention"
        )
    if layer.latent:
        return UnsupportedModelError(
            f"{name}: the cache keeps latents, for a model that is attached, and this one is "
            "not; call torchpaged.hf.attach(model), or make a PagedCache of this model's config"
        )
    attach = (
        "call torchpaged.hf.attach(model) first, so that its latents are kept, or "
        if family.caches_latents
        else ""
    )
    return UnsupportedModelError(
        f"{name} computes with its cached keys or values ({getattr(func, '__name__', func)}) "
        f"before it attends, where paged attention reads the pools themselves; {attach}use PagedCache(..., "
        "dense=True), which gathers them first"
    )


def _flat(args: tuple[Any, ...]) -> list[Any]:
    return [x for arg in args if isinstance(arg, (tuple, list)) for x in arg]


def watch(pool: Tensor, layer: Any) -> WatchedPool:
    """``pool`` of ``layer`` as a `WatchedPool`."""
    watched: WatchedPool = pool.as_subclass(WatchedPool)
    watched.pool, watched._torchpaged_layer = pool, layer
    return watched
