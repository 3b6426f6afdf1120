"""PagedModel: a HuggingFace causal LM as a callable over packed tokens: what the engine and the graph
runner drive.

    paged = PagedModel(model, num_blocks=512)
    logits = paged(input_ids, metadata, logits_indices)   # [num_tokens] in, [num_reqs, vocab] out

The model runs as one row ``[1, num_tokens]`` of concatenated requests with explicit positions; each attention
layer makes one ``write_kv`` and one ``paged_attention`` call with the metadata given. No mask is built,
nothing is read on the host.
"""

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from torchpaged.backends import Choice, Limits, Planning, Route, Session, select_backend
from torchpaged.cache import RollingBlocks
from torchpaged.custom_ops.checks import check_sizes, is_int, reads_values, switch
from torchpaged.custom_ops.errors import ArgumentError, NotCopied
from torchpaged.custom_ops.words import counted, one_line
from torchpaged.hf.attention import NAME
from torchpaged.hf.kv_scales import KVQuantization, Scales
from torchpaged.hf.model_classes import without_wrapper
from torchpaged.hf.packed_memory import Room, make_pools, most_blocks, probe
from torchpaged.hf.packed_scales import PackedScales, run_once
from torchpaged.hf.several_calls import choose_rolling
from torchpaged.hf.step_cache import StepCache
from torchpaged.hf.step_rings import StepRings
from torchpaged.hf.support import (
    eos_token_ids,
    fusion_of,
    require_causal_lm,
    require_implementation,
    require_keys_of_tokens,
    require_supported,
    require_weights,
    rotated_alike,
)
from torchpaged.hf.switch import Settings
from torchpaged.metadata import AttentionMetadata
from torchpaged.model_state import undone_if_it_raises

_MAX_NUM_REQS = 1024  # requests of a batch, where no number is given


class PagedModel(NotCopied):
    """A HuggingFace causal LM over a `PagedKVCache`.

    Args:
        model: the model, in eval mode from now on; its attention implementation becomes "torchpaged". Of a
            ``PeftModel``, the one in it. If it is refused, it stays as it was.
        num_blocks: blocks per layer, the null block included. Give this or ``memory_budget``.
        memory_budget: bytes for all pools together.
        block_size: tokens per block.
        backend: a name, a route, or None / "auto".
        limits: the largest batches to come, for the backend's session: ``max_num_reqs``, ``max_num_tokens``,
            ``max_blocks_per_req``. None, and where one is None: 1024 requests, any number of tokens, as many
            blocks as there are. With layers that keep a state per request ``max_num_reqs`` must be said.
        kv_dtype: of the pools: None, the keys' dtype; or "fp8_e4m3" or "fp8_e5m2".
        kv_scales: of fp8 pools: "head", one per kv head, or "tensor", one per layer, both found by
            `find_scales` in the first prompt; or those of another model with the same layers: for each layer
            ``(k_scale, v_scale)``, numbers or float32 ``[1]`` or ``[num_kv_heads]``.
        batch_invariant: attention gives a request the same bits in every batch, by a backend
            that declares it.
        sliding_step: for callers that tell `rings` which requests begin and end: tokens of a request in one
            step at most. Layers with a sliding window or attention chunks then keep rings of blocks, for as
            many requests as ``limits`` say, where that takes fewer; None: they keep every token.
        num_checkpoints: copies of a request's states, or rings, that `rings` keeps for requests that begin
            alike; without such layers there are none. None: as many as requests, at most 64, of a
            ``memory_budget`` an eighth, and with rings no more than all of these take less memory with them
            than if every token was kept.

    Attributes:
        batch_invariant: as given.
        rings: the `StepRings` of layers with a window that roll, and of those with a state per request; None
            if no layer has either.
        kv_cache: the `PagedKVCache`.
        choice: which backend runs and why.
        session: what it keeps open for the layers, for all their callers: steps must not overlap on
            different streams.
        vocab_size, max_position_embeddings, eos_token_ids, device: facts of the model.

    Raises:
        ArgumentError: no model of transformers, or an option that can't be.
        UnsupportedModelError: the model is no causal LM, ignores the attention interface or keeps states
            that can't be paged; by name, with the reason.
        NotCopyableError: it is copied or pickled.
    """

    _BOUND = "its pools and session are places in this process's memory"
    _ADVICE = "copy or pickle its .model, and make a PagedModel of it where you need one"

    @undone_if_it_raises
    def __init__(
        self,
        model: PreTrainedModel,
        *,
        num_blocks: int | None = None,
        memory_budget: int | None = None,
        block_size: int = 16,
        backend: str | Route | None = "auto",
        limits: Limits | None = None,
        kv_dtype: str | torch.dtype | None = None,
        kv_scales: str | Scales = "head",
        batch_invariant: bool = False,
        sliding_step: int | None = None,
        num_checkpoints: int | None = 0,
    ) -> None:
        switch("batch_invariant", batch_invariant)
        check_sizes(0, num_checkpoints=num_checkpoints or 0)
        if sliding_step is not None and (not is_int(sliding_step) or sliding_step < 1 or limits is None):
            raise ArgumentError(
                "sliding_step",
                "None, or at least 1 token together with limits, which say for how many requests",
                f"{sliding_step!r} with limits={limits}",
                "give limits=Limits(max_num_reqs=..., max_blocks_per_req=...)",
            )
        model = without_wrapper(model)
        require_causal_lm(model)
        require_supported(model)
        require_keys_of_tokens(model.config)
        require_weights(model)
        self._give_back = Settings(model).give_back
        model.set_attn_implementation(NAME)
        self.model = model.eval()
        config = self._config = model.config.get_text_config(decoder=True)
        self.batch_invariant = batch_invariant
        self._read(model, config)
        self._asked, pools = backend, KVQuantization(kv_dtype, "head", 0).dtype
        probed = probe(model, config, block_size, pools)
        keys = [layer.stored for layer in probed.paged]
        self._scales = PackedScales(kv_dtype, kv_scales, keys, str(config.model_type))
        said, rolling = Limits() if limits is None else limits, None
        if sliding_step is not None:
            sized = replace(said, block_size=block_size)
            rolling = self._choose_rolling(probed, sliding_step, sized, num_blocks)
        room = Room(block_size, num_blocks, memory_budget, num_checkpoints)
        self.kv_cache, self.rings = make_pools(probed, said, rolling, room, self.device)
        self._cache = self._make_cache(probed, said, pools)
        self.choice: Choice = self._cache.choice

    def _read(self, model: PreTrainedModel, config: Any) -> None:
        """Facts of the model that its callers ask for."""
        self.device = model.device
        self.vocab_size: int = config.vocab_size
        self.max_position_embeddings: int | None = getattr(config, "max_position_embeddings", None)
        self._longest, self._rotation = rotated_alike(model)
        self.eos_token_ids = eos_token_ids(model)
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def _make_cache(self, probed: StepCache, said: Limits, kv_dtype: torch.dtype | None) -> StepCache:
        """The cache over `kv_cache`, with what the layers of another one were seen to ask."""
        blocks = self.kv_cache.num_blocks
        limits = replace(
            said,
            num_blocks=blocks,
            block_size=self.kv_cache.block_size,
            max_num_reqs=said.max_num_reqs or _MAX_NUM_REQS,
            max_blocks_per_req=said.max_blocks_per_req or max(blocks - 1, 1),
        )
        asked = (self._asked, kv_dtype, self.batch_invariant)
        cache = StepCache(self._config, limits, self.kv_cache.num_tokens, *asked)
        for layer, pools, before in zip(cache.keeping, self.kv_cache, probed.keeping, strict=True):
            layer.adopt_as(before, pools)
        self._scales.give(cache.paged)
        cache.prepare_for(probed.backend.specs)
        return cache

    def _choose_rolling(
        self, probed: StepCache, step: int, limits: Limits, num_blocks: int | None
    ) -> RollingBlocks | None:
        """Which layers keep rings; none where the backend to come plans on the host, or for models that are
        not causal."""
        asked = [replace(spec, batch_invariant=self.batch_invariant) for spec in probed.backend.specs]
        plans = select_backend(asked, self._asked).backend.capabilities.planning > Planning.NEVER
        if plans or probed.masks.causal is False:
            return None
        layers = [layer for layer in probed.paged if not layer.latent]
        most = most_blocks(limits) if num_blocks is None else num_blocks
        return choose_rolling(self._config, layers, step, replace(limits, num_blocks=most))

    def __repr__(self) -> str:
        blocks = counted(self.kv_cache.num_blocks, "block")
        return one_line(
            self,
            type(self.model).__name__,
            f"backend={self.choice.name!r}",
            f"{blocks} of {counted(self.kv_cache.block_size, 'token')}",
            f"on {self.kv_cache.device}",
        )

    @property
    def session(self) -> Session:
        """The session of the layers."""
        return self._cache.session

    @property
    def needs_scales(self) -> bool:
        """Whether `find_scales` must be called before the first step."""
        return self._scales.missing

    @property
    def kv_scales(self) -> list[tuple[Tensor, Tensor]]:
        """``(k_scale, v_scale)`` of each layer, float32 ``[1]`` or ``[num_kv_heads]``: for torch.save and for
        ``kv_scales`` of another model; empty before they are known, and without fp8 pools."""
        return [] if self._scales.missing else self._cache.kv_scales

    def find_scales(self, token_ids: Sequence[int]) -> None:
        """Find the scales of fp8 pools in a prompt's keys and values; nothing to do where they are known.

        One forward over the prompt's first 2,048 tokens, with pools of its own in the keys' dtype.

        Args:
            token_ids: the prompt.

        Raises:
            ArgumentError: no token.
        """
        if self.needs_scales:
            arguments = (token_ids, self.kv_cache.block_size, self._asked)
            filled, num_tokens = run_once(self.model, self._config, *arguments)
            self._scales.find(filled.paged, num_tokens)

    @property
    def fusion_report(self) -> Any:
        """The `FusionReport` of what `torchpaged.hf.fuse` did to the model; None if it is not fused."""
        return fusion_of(self.model)

    def __call__(
        self, input_ids: Tensor, metadata: AttentionMetadata, logits_indices: Tensor | None = None
    ) -> Tensor:
        """Run the packed batch.

        Args:
            input_ids: ``[num_tokens]`` int64.
            metadata: the batch; its tensors may be slices of static buffers.
            logits_indices: ``[num_reqs]`` int64, the tokens whose logits are wanted; None = all.

        Returns:
            ``[num_reqs or num_tokens, vocab_size]`` logits.

        Raises:
            ArgumentError: the batch was made for another block size than the cache's, has no positions or
                slots, or is over the limits; requests of it have no rings (where values are read, or where
                no request has one); or it has requests so long that the longest of them would rotate
                the keys of all (longrope, dynamic NTK): by their lengths where values are read, elsewhere by
                the width of their tables.
        """
        metadata.check_block_size(self.kv_cache.block_size)
        if metadata.positions is None or metadata.slot_mapping is None:
            raise ArgumentError(
                "metadata",
                "positions and a slot_mapping",
                "None",
                "build it with AttentionMetadata.from_lists",
            )
        require_implementation(self._config, "in a PagedModel or Generator")
        if not torch.compiler.is_compiling():
            self._require_length(metadata)
            session = self._cache.session
            if session.planned is not metadata:  # else a graph runner has planned it: this may be a capture
                session.plan(metadata)
            session.require(metadata, input_ids.numel())
            if self.rings is not None:
                self.rings.require(metadata)
        if self.rings is not None:
            self._give_rings(metadata, self.rings)
        options: dict[str, Any] = {}
        if logits_indices is not None and self._keeps_logits:
            options["logits_to_keep"] = logits_indices
        logits = self._cache.run(self.model, input_ids, metadata, **options)
        self._cache.metadata = self._cache.in_rings = self._cache.state_slots = None
        if logits_indices is not None and not self._keeps_logits:
            logits = logits[logits_indices]
        return logits

    def _give_rings(self, metadata: AttentionMetadata, rings: StepRings) -> None:
        """What layers with a window or a state need of a step."""
        if rings.blocks is not None:
            self._cache.in_rings = rings.of(metadata)
        self._cache.state_slots = rings.slots(metadata)

    def _require_length(self, metadata: AttentionMetadata) -> None:
        """Refuse requests that would rotate the keys of others, as far as the host knows them."""
        if self._longest is None:
            return
        longest, got = int((metadata.block_table.shape[1] - 1) * self.kv_cache.block_size + 1), "tables for"
        if reads_values(self.device):
            longest, got = int(metadata.seq_lens.max()), "one of"
        if longest > self._longest:
            raise ArgumentError(
                "metadata",
                f"requests of at most {self._longest} tokens: beyond, the longest one of a batch rotates the "
                f"keys of all ({self._rotation!r})",
                f"{got} {longest}",
                "use generate() with torchpaged.hf.PagedCache for longer texts",
            )
