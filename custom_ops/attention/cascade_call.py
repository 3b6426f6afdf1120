"""Calls over parts of a context as records, as call.py has those over all of it: ``cascade_attention`` reads
what requests share once, ``merge_attn_states`` puts two parts together. Shapes, dtypes and meanings:
schema.py."""

from typing import Any, NamedTuple, Self

from torch import Tensor

from torchpaged.custom_ops.attention.call import AttentionCall
from torchpaged.custom_ops.pools import KVScales

_CASCADE_OPTIONS = (
    *("max_query_len", "scale", "logits_soft_cap", "sinks", *KVScales._fields, "output_scale"),
    "semaphore",
)


class MergeCall(NamedTuple):
    """The arguments of ``merge_attn_states``, with the schema's defaults."""

    out_a: Tensor
    lse_a: Tensor
    out_b: Tensor
    lse_b: Tensor
    out: Tensor
    lse: Tensor | None = None
    output_scale: Tensor | None = None

    @property
    def states(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Both sides' ``(out, lse)``."""
        return (self.out_a, self.lse_a), (self.out_b, self.lse_b)

    def flat(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """As `AttentionCall.flat`."""
        return self[:-1], {} if self.output_scale is None else {"output_scale": self.output_scale}


class CascadeCall(NamedTuple):
    """The arguments of ``cascade_attention``.

    Attributes:
        own: each request's call over what it has behind its group's blocks, causal; with the outputs and the
            options of the whole.
    """

    own: AttentionCall
    prefix_block_table: Tensor
    prefix_lens: Tensor
    prefix_query_start_loc: Tensor
    order: Tensor
    inverse: Tensor

    @classmethod
    def of(cls, *tensors: Any, **options: Any) -> Self:
        """The call of flat arguments, as torch's dispatcher gives them."""
        before, shared, outputs = tensors[:6], tensors[6:11], tensors[11:]
        return cls(AttentionCall.of(*before, *outputs, **options), *shared)

    def flat(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """As `AttentionCall.flat`; without the options that this op has not, since all its calls are causal
        and see whole prefixes."""
        tensors, options = self.own.flat()
        options = {name: options[name] for name in _CASCADE_OPTIONS if name in options}
        return (*tensors[:6], *self[1:], *tensors[6:]), options

    @property
    def per_token(self) -> dict[str, Tensor]:
        """As `AttentionCall.per_token`."""
        return {"order": self.order, "inverse": self.inverse}

    def rest(self, out: Tensor, lse: Tensor) -> AttentionCall:
        """Each request's call over what it has behind its group's blocks, to be merged with its prefix."""
        return self.own._replace(out=out, lse=lse, output_scale=None)

    def merge(self, shared: tuple[Tensor, Tensor], rest: tuple[Tensor, Tensor]) -> MergeCall:
        """What puts the results of `prefixes`, in the groups' order, and of `rest` together."""
        own, (out, lse) = self.own, (tensor[self.inverse] for tensor in shared)
        return MergeCall(out, lse, *rest, own.out, own.lse, own.output_scale)

    def prefixes(self, q: Tensor, out: Tensor, lse: Tensor | None) -> AttentionCall:
        """The groups' call over their prefixes alone, with queries in the groups' order: all of a prefix lies
        before all queries, and sinks count once, with the requests. Its semaphore is its own: there may be
        more groups than requests."""
        return self.own._replace(
            q=q,
            block_table=self.prefix_block_table,
            seq_lens=self.prefix_lens,
            query_start_loc=self.prefix_query_start_loc,
            out=out,
            lse=lse,
            max_query_len=max(q.shape[0], 1),
            causal=False,
            sinks=None,
            output_scale=None,
            semaphore=None,
        )
