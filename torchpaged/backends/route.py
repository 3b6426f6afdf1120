"""`Route`: which backend runs the decodes of a batch, and which one the rest.

PagedAttention(32, 128, 8, backend=Route(decode="cuda", prefill="flash_attn"))
PagedAttention(32, 128, 8, backend="decode=cuda,prefill=flash_attn")    # wherever a name is taken
"""

from __future__ import annotations

from dataclasses import dataclass

from torchpaged.custom_ops.errors import ArgumentError


@dataclass(frozen=True)
class Route:
    """A backend for each part of a batch. Equal ones are that backend itself, whose own kernels run mixed
    batches in one call.

    Attributes:
        decode: name of the backend for requests of one query token.
        prefill: name of the backend for requests of more.

    Raises:
        ArgumentError: a name that is none, or that is a route itself.
    """

    decode: str
    prefill: str

    def __post_init__(self) -> None:
        for part in ("decode", "prefill"):
            name = getattr(self, part)
            if not isinstance(name, str) or not name or name == "auto" or set(name) & set("=, "):
                raise ArgumentError(f"route.{part}", "the name of one backend, not 'auto'", repr(name))

    def __str__(self) -> str:
        """The name of the backend that runs it; `parse_route` reads it."""
        return self.decode if self.decode == self.prefill else f"decode={self.decode},prefill={self.prefill}"


def is_route(name: str) -> bool:
    """Whether a backend's name is written as a route."""
    return "=" in name


def parse_route(text: str) -> Route:
    """The route that ``"decode=NAME,prefill=NAME"`` says, in any order, with spaces or without.

    Raises:
        ArgumentError: a part is missing, said twice, or unknown.
    """
    pairs = [part.partition("=") for part in text.split(",")]
    names = {part.strip(): name.strip() for part, _, name in pairs}
    if len(pairs) != 2 or names.keys() != {"decode", "prefill"}:
        raise ArgumentError(
            "backend", "decode=NAME,prefill=NAME", repr(text), "name a backend for each of the two parts"
        )
    return Route(names["decode"], names["prefill"])
