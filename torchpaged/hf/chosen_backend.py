"""The backend of a paged HuggingFace cache, chosen for what its layers really ask, and the session that they
share.

A config says little about attention: soft cap, sinks, causality and each layer's widths are arguments of the
layers' calls. So a first choice is made from what is known before anything is written, and every kind of call
is then held to what the backend declares. A kind that comes anew with an eager forward may change an
automatic choice, since all backends write the same cache; a backend that was named is refused.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchpaged.backends import (
    AttentionSpec,
    Choice,
    Limits,
    Planning,
    Route,
    Session,
    attention_spec,
    select_backend,
)
from torchpaged.backends.choose.kind import Kind
from torchpaged.backends.choose.names import check_backend
from torchpaged.backends.features import GIVEN
from torchpaged.backends.session import PlannedBatch
from torchpaged.backends.spec import features_used
from torchpaged.custom_ops import BackendOps
from torchpaged.custom_ops.attention.call import AttentionCall
from torchpaged.custom_ops.errors import BackendUnavailableError
from torchpaged.hf.call import of_layer
from torchpaged.metadata import HostLengths
from torchpaged.prefixes.attention import can_read_once


class ChosenBackend:
    """The backend of one cache: none until `choose` was called.

    Args:
        asked: a name, a route, or None / "auto".
        limits: the largest batches of the session.
        layers: the cache's `PagedLayer`s; each is given its ``workspace``.
        batch_invariant: ask for backends that give a request the same bits in every batch.

    Raises:
        ArgumentError, BackendUnavailableError: no backend has that name.

    Attributes:
        choice: which backend runs and why.
        session: what it keeps open for the layers.
        ops: the session's op handles.
        plans: whether the session plans some steps.
        semaphore: zeros that kernels of a step share, one after the other; None: the session keeps none.
        specs: what the layers ask of it, as keys.
    """

    choice: Choice
    session: Session
    ops: BackendOps
    plans: bool
    semaphore: Tensor | None = None

    def __init__(
        self, asked: str | Route | None, limits: Limits, layers: Sequence[Any], batch_invariant: bool = False
    ) -> None:
        check_backend(asked)
        self._asked, self.limits, self._layers = asked, limits, layers
        self.batch_invariant = batch_invariant
        self.specs: dict[AttentionSpec, None] = {}

    def _asks(self, spec: AttentionSpec) -> AttentionSpec:
        """With what every layer of the cache asks."""
        return replace(spec, batch_invariant=True) if self.batch_invariant else spec

    def choose(self, specs: Iterable[AttentionSpec]) -> None:
        """Choose for these specs alone.

        Raises:
            BackendUnavailableError: the named backend can't run them all, or none can; the choice before
                stays.
        """
        wanted = dict.fromkeys(map(self._asks, specs))
        choice = select_backend(list(wanted), self._asked)
        before: Session | None = getattr(self, "session", None)
        device = next(iter(wanted)).device
        if before is None or before.ops is not choice.backend.ops or before.device != device:
            session = choice.backend.open(wanted, self.limits, device)
            if before is not None and before.planned is not None:  # in the middle of a step
                session.plan(before.planned)
            self.session = session
        self.choice, self.specs = choice, wanted
        self.ops, self.plans = self.session.ops, self.session.plans
        self.semaphore = self.session.workspace(next(iter(wanted))).get("semaphore")
        for layer in self._layers:
            if layer.spec is not None and self._asks(layer.spec) in wanted:
                self.give_workspace(layer, layer.spec)
            else:
                layer.spec = layer.asked = None  # of another device or dtype

    def choose_for(self, config: Any, key_states: Tensor, head_dim_v: int | None = None) -> None:
        """Choose when the first keys show device and dtype; layers that made calls keep what these asked.
        Where no layer attends, a plain attention over such keys stands for those that keep states."""
        specs = [layer.attention_spec(config, key_states, head_dim_v) for layer in self._layers]
        specs_of_states = [] if specs else [_plain_spec(key_states)]
        like = (key_states.device, key_states.dtype)
        # Asked before a reset.
        known = [spec for spec in self.specs if (spec.device, spec.dtype) == like]
        self.choose([*specs, *specs_of_states, *known])
        for layer, spec in zip(self._layers, specs, strict=True):
            if layer.asked is None:
                self.give_workspace(layer, spec)

    def plan(self, step: PlannedBatch, host: HostLengths | None) -> None:
        """`Session.plan` for a step that needs one; compiled code has no place for it.

        Raises:
            BackendUnavailableError: in a trace.
        """
        if self.session.planning_of(step.max_query_len) == Planning.NEVER:
            return
        if torch.compiler.is_compiling():
            raise BackendUnavailableError(
                f"backend {self.choice.name!r} plans every step outside compiled code, and a compiled "
                "forward moves the lengths on inside; run the model eagerly, through "
                "torchpaged.engine.Generator, or on another backend"
            )
        self.session.plan(step, host)

    def give_workspace(self, layer: Any, spec: AttentionSpec) -> None:
        """Give ``layer`` what the session keeps for layers of ``spec``, and say whether such layers may read
        shared prefixes once."""
        spec = self._asks(spec)
        layer.spec, layer.workspace = spec, self.session.workspace(spec)
        layer.reads_once = can_read_once(spec, self.session)

    def hold(self, layer: Any, call: AttentionCall) -> None:
        """Hold a layer's call to what the backend declares; eager calls only, once per kind of call. What the
        batch brings is none of the layer's, see `refuse`.

        Raises:
            BackendUnavailableError: with all reasons.
        """
        self.give_workspace(layer, self._require(layer, call))

    def hold_spans(self, layer: Any, call: AttentionCall) -> dict[str, Tensor]:
        """Hold a layer's second call of a forward, over spans that are not causal, to what the backend
        declares; what the session keeps for it.

        Raises:
            BackendUnavailableError: with all reasons.
        """
        if self.session.plans:
            raise BackendUnavailableError(
                f"backend {self.session.name!r} plans every batch of queries, and image tokens that see each "
                "other in both directions take a second one; give the PagedCache another backend"
            )
        workspace = self.session.workspace(self._require(layer, call))
        # There may be more spans than rows, for which a kernel makes semaphores of its own.
        return {name: x for name, x in workspace.items() if name != "semaphore"}

    def _require(self, layer: Any, call: AttentionCall) -> AttentionSpec:
        """Hold the choice to one more spec, that of a call."""
        spec = self._kind(layer, of_layer(call)).spec()
        if spec not in self.specs:
            self.choose([*self.specs, spec])
        return spec

    def _kind(self, layer: Any, call: AttentionCall) -> Kind:
        kind = Kind.of(call, self.batch_invariant)
        return kind._replace(given=(*kind.given, "latent")) if layer.latent else kind

    def refuse(self, layer: Any, call: AttentionCall) -> None:
        """Refuse a call that the backend does not declare, where nothing is chosen any more: in a trace, and
        for what the batch brings."""
        kind = self._kind(layer, call)
        uses = [GIVEN[name] for name in kind.given]
        used = features_used(uses, kind.causal, kind.window_size, kind.logits_soft_cap, kind.chunk_size)
        reasons = self.session.capabilities.reject_kind(kind.dtype, kind.kv_dtype, used)
        if reasons:
            traced = torch.compiler.is_compiling()
            raise BackendUnavailableError(
                f"backend {self.choice.name!r} cannot run this attention: {'; '.join(reasons)}"
                + ("; run a forward eagerly first" if traced else "")
            )


def _plain_spec(key_states: Tensor) -> AttentionSpec:
    """Of attention over keys ``[batch, num_kv_heads, query_len, head_dim]`` without further options."""
    num_heads, head_dim = key_states.shape[1], key_states.shape[3]
    return attention_spec(
        device=key_states.device,
        dtype=key_states.dtype,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
    )
