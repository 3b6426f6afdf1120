"""`Limits`: the largest batches that a session will see."""

from dataclasses import dataclass, fields

from torchpaged.backends.spec import GraphSupport
from torchpaged.custom_ops.checks import is_int
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.words import repr_of_fields


@dataclass(frozen=True)
class Limits:
    """The largest batches that a session will see; None = not said.

    Attributes:
        max_num_reqs: requests of a batch, padding rows included.
        max_num_tokens: query tokens of a batch, padding included.
        max_blocks_per_req: columns of the block table.
        num_blocks: blocks of a pool, the null block included.
        block_size: tokens per block.
        graphs: the least graph support that is needed.

    Raises:
        ArgumentError: a limit that is no integer, or below 1.
    """

    max_num_reqs: int | None = None
    max_num_tokens: int | None = None
    max_blocks_per_req: int | None = None
    num_blocks: int | None = None
    block_size: int | None = None
    graphs: GraphSupport = GraphSupport.NEVER

    def __repr__(self) -> str:
        return repr_of_fields(self)

    def __post_init__(self) -> None:
        for each in fields(self)[:5]:
            size = getattr(self, each.name)
            if size is not None and (not is_int(size) or size < 1):
                raise ArgumentError(f"limits.{each.name}", "an int of at least 1, or None", repr(size))
        if not isinstance(self.graphs, GraphSupport):
            raise ArgumentError("limits.graphs", "a GraphSupport", repr(self.graphs))

    def need(self, *names: str) -> list[int]:
        """These limits, for a session that can't do without them.

        Raises:
            ArgumentError: one was not said.
        """
        for name in names:
            if getattr(self, name) is None:
                raise ArgumentError(
                    f"limits.{name}",
                    "a number: this backend makes room for it when its session is opened",
                    "None",
                )
        return [getattr(self, name) for name in names]

    def check(self, num_reqs: int, num_tokens: int = 0, max_blocks_per_req: int = 0) -> None:
        """Refuse a batch of more requests, tokens or columns of its block table; raises `ArgumentError`."""
        for name, got, what in (
            ("max_num_reqs", num_reqs, "requests"),
            ("max_num_tokens", num_tokens, "tokens"),
            ("max_blocks_per_req", max_blocks_per_req, "blocks per request"),
        ):
            most = getattr(self, name)
            if most is not None and got > most:
                raise ArgumentError(
                    "metadata",
                    f"at most {most} {what}, as the session's limits say",
                    str(got),
                    f"open it with Limits({name}=...) of the largest batch",
                )
