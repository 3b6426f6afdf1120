"""Calls of ``mla_attention`` and ``rope_write_latent`` as records; shapes, dtypes and meanings: schema.py."""

from typing import Any, NamedTuple, Self

from torch import Tensor

from torchpaged.custom_ops.attention.call import AttentionCall


class LatentCall(NamedTuple):
    """The arguments of ``mla_attention``, with the schema's defaults."""

    q: Tensor
    kv_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    out: Tensor
    lse: Tensor | None
    max_query_len: int
    scale: float
    causal: bool = True
    indices: Tensor | None = None
    output_scale: Tensor | None = None

    @classmethod
    def of(cls, *tensors: Any, **options: Any) -> Self:
        """The call of flat arguments, as torch's dispatcher gives them: it leaves out trailing defaults."""
        if len(tensors) == cls._fields.index("lse"):
            tensors = (*tensors, options.pop("lse", None))
        return cls(*tensors, **options)

    @property
    def rank(self) -> int:
        """Columns of a latent, which are its value."""
        return self.out.shape[2]

    @property
    def is_plain(self) -> bool:
        """Whether there are neither ``indices`` nor an ``output_scale``."""
        return self.indices is None and self.output_scale is None

    def as_attention(self) -> AttentionCall:
        """The same as a call of ``paged_attention``: values are the first columns of the keys. Without
        the indices, which that has not: selection.py; nor an ``output_scale``."""
        values = self.kv_cache[..., : self.rank]
        return AttentionCall(self.q, self.kv_cache, values, *self[2:10])


class LatentWriteCall(NamedTuple):
    """The arguments of ``rope_write_latent``, with the schema's defaults."""

    q: Tensor
    kv_c: Tensor
    k_pe: Tensor
    positions: Tensor
    cos_sin: Tensor
    slot_mapping: Tensor
    up_keys: Tensor
    q_out: Tensor
    kv_cache: Tensor
    kv_norm: Tensor | None = None
    norm_eps: float = 1e-6
    rotation: str = "halves"
    are_query_tokens: bool = False

    def write(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The arguments of ``write_latent``."""
        return self.kv_c, self.k_pe, self.kv_cache, self.slot_mapping
