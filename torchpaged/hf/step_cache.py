"""StepCache: transformers' view of a packed step, whose blocks and lengths another object owns, such as
the engine."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from torchpaged.backends import AttentionSpec, Limits, Route
from torchpaged.custom_ops.errors import UnsupportedModelError
from torchpaged.hf.cache_options import latents_not_of
from torchpaged.hf.call_mask import MaskRequest
from torchpaged.hf.chosen_backend import ChosenBackend
from torchpaged.hf.kv_scales import KVQuantization, require_paged
from torchpaged.hf.layer import PagedLayer
from torchpaged.hf.layer_pools import scaled
from torchpaged.hf.mask_functions import is_causal
from torchpaged.hf.owner import PagedOwner
from torchpaged.hf.packed_mixers import keeps_nothing
from torchpaged.hf.packed_state import PackedState
from torchpaged.hf.state_layer import StateLayer
from torchpaged.hf.state_pools import keys_like
from torchpaged.hf.support import require_kept_layers
from torchpaged.hf.template import HybridPagedLayer, PackedHybridLayer, paged_layers
from torchpaged.metadata import AttentionMetadata
from torchpaged.metadata.fields import METADATA_FIELDS, BatchSizes, make_batch_tensors


class PackedMasks:
    """The masks of a packed step: none.

    Args:
        name: the model's type, for messages.

    Attributes:
        causal: whether the model is; None before it asked for a mask.
        local: whether a mask that it asked for was of a window or of chunks.
        given: the mask of ones that a model that makes ones itself got, and may ask for its masks with.
    """

    causal: bool | None = None
    local = False
    given: Tensor | None = None

    def __init__(self, name: str) -> None:
        self.name = name

    def observe(self, asked: MaskRequest) -> None:
        """Note whether the model is causal; raises UnsupportedModelError if it has a mask of its own."""
        self.causal = is_causal(asked.mask_function)
        if asked.local_size is not None:  # set without being read, which a trace would guard
            self.local = True
        if asked.padding is not None and asked.padding is not self.given:
            raise UnsupportedModelError(
                f"{self.name} makes an attention mask of its own, by the tokens of its cache, and the packed "
                "batches of the engine are one row of many requests; use generate() with "
                "torchpaged.hf.PagedCache"
            )

    def require_kind(self, layer: PagedLayer, window: int | None) -> None:
        """Nothing is required: a packed row is longer than any request in it, so that its masks say
        nothing."""


def _packed_layers(config: Any, max_seq_len: int, owner: PagedOwner) -> list[Any]:
    """`paged_layers`, whose states are packed.

    Raises:
        UnsupportedModelError: a layer keeps something that packed batches do not carry.
    """
    layers = paged_layers(config, max_seq_len, owner)
    for index, layer in enumerate(layers):
        if keeps_nothing(config, index) or isinstance(layer, (PackedState, PackedHybridLayer)):
            continue
        if type(layer) is StateLayer:
            layers[index] = PackedState(owner, index)
        elif isinstance(layer, HybridPagedLayer):
            layers[index] = PackedHybridLayer(owner, index, layer.window, layer.chunk)
        elif not isinstance(layer, PagedLayer):
            holds = "a recurrent state" if isinstance(layer, LinearAttentionCacheLayerMixin) else "no keys"
            raise UnsupportedModelError(
                f"{config.model_type}: layer {index} keeps {holds} ({type(layer).__name__}), which the "
                "packed batches of the engine do not carry yet; use generate() with torchpaged.hf.PagedCache"
            )
    return layers


class StepCache(PagedOwner):
    """A cache whose step is set from outside: the engine owns blocks and lengths."""

    masks: PackedMasks

    def __init__(
        self,
        config: Any,
        limits: Limits,
        max_seq_len: int,
        backend: str | Route | None,
        kv_dtype: torch.dtype | None = None,
        batch_invariant: bool = False,
    ) -> None:
        super().__init__(config, max_seq_len, _packed_layers)
        require_kept_layers(config, self.keeping)
        if kv_dtype is not None:
            others = latents_not_of(self.paged, kv_dtype)
            require_paged(self.name, others if self.paged else {"no layer keeps keys and values"})
        self._config = config
        self.num_blocks, self.block_size = limits.need("num_blocks", "block_size")
        self.backend = ChosenBackend(backend, limits, self.paged, batch_invariant)
        self.masks = PackedMasks(self.name)
        # Scales of 1 for pools made here: `torchpaged.hf.packed_scales` gives adopted ones theirs.
        count = len(scaled(self.paged))
        ones = "head" if kv_dtype is None else [(1.0, 1.0)] * count
        self.kv = KVQuantization(kv_dtype, ones, count)
        self.metadata: AttentionMetadata | None = None
        self.in_rings: AttentionMetadata | None = None  # the same step, for layers that roll
        self.ready = False

    def prepare(
        self, layer: PagedLayer | PackedState, key_states: Tensor, head_dim_v: int | None = None
    ) -> None:
        """Choose the backend, when the first keys show device and dtype."""
        self.backend.choose_for(self._config, key_states, head_dim_v)
        self.ready = True

    def prepare_states(self, layer: PackedState, x: Tensor) -> None:
        """See `PagedOwner`: without attention the first tokens of a state show device and dtype."""
        if not self.paged and not self.ready:
            self.prepare(layer, keys_like(self._config, x))

    def prepare_for(self, specs: Iterable[AttentionSpec]) -> None:
        """Choose the backend for what the layers are known to ask."""
        self.backend.choose(specs)
        self.ready = True

    def advance(self, layer: PagedLayer, batch: int, query_len: int) -> AttentionMetadata:
        """See `PagedOwner`; lengths were advanced by the code that made the step. One that raises leaves no
        state behind: lengths are set anew for each."""
        return self.metadata_of(layer, batch, query_len)

    def metadata_of(self, layer: PagedLayer, batch: int, query_len: int) -> AttentionMetadata:
        """The step's tensors."""
        step = self.in_rings if layer.rolls else self.metadata
        assert step is not None
        return step

    def run(self, model: Any, input_ids: Tensor, metadata: AttentionMetadata, **options: Any) -> Tensor:
        """The model over a step.

        Args:
            model: of transformers.
            input_ids: ``[num_tokens]`` int64.
            metadata: the step, with positions.
            options: further ones of its forward.

        Returns:
            Logits ``[num_tokens, vocab_size]``, or of as many as ``options`` say; a base model's last states.
        """
        assert metadata.positions is not None
        self.metadata = metadata
        if self.family.makes_ones:
            ones = torch.ones(1, input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
            options["attention_mask"] = self.masks.given = ones
        options[self.family.cache_argument] = self
        outputs = model(
            input_ids=input_ids[None], position_ids=metadata.positions[None], use_cache=True, **options
        )
        logits: Tensor = outputs[0][0]
        return logits

    def padding_step(self, device: torch.device) -> tuple[Tensor, AttentionMetadata]:
        """For `run`: one token that belongs to no request. Nothing is written, attention gives zeros."""
        sizes = BatchSizes(num_reqs=1, num_tokens=1, max_blocks_per_req=1)
        tensors = make_batch_tensors(METADATA_FIELDS, sizes, device)
        tensors["query_start_loc"][1] = 1
        self.state_slots = torch.zeros(1, dtype=torch.int32, device=device)
        step = AttentionMetadata.view(tensors, sizes, max_query_len=1, block_size=None)
        return torch.zeros(1, dtype=torch.int64, device=device), step

    # What models and transformers' mask functions ask of a cache.
    def length(self, layer: PagedLayer) -> Tensor:
        """What attention of ``layer`` adds to the places of its tokens in the row to get their positions:
        ``[num_tokens]`` int64, as tokens of one row are of several requests."""
        assert self.metadata is not None and self.metadata.positions is not None
        positions = self.metadata.positions
        return positions - torch.arange(positions.shape[0], device=positions.device)

    def get_seq_length(self, layer_idx: int | None = None) -> Any:
        """`length` of a layer that asks for itself. A caller that names none wants positions or a mask, which
        are given, and gets 0."""
        return 0 if layer_idx is None else super().get_seq_length(layer_idx)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """0: no mask is built."""
        return 0
