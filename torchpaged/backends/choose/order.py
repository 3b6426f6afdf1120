"""In which order backends are tried on a kind of device, and where that order comes from.

    platform_of(torch.device("cuda")).order     # ("cuda", "triton")
    order_of(torch.device("cuda"))              # these, behind registered ones, then the rest of `AUTOMATIC`

`PLATFORMS` is the table.
"""

from typing import NamedTuple

import torch

from torchpaged.backends.choose import names

#: What a row that no machine of this project has run says of itself.
UNVERIFIED = "not verified here"


class Platform(NamedTuple):
    """One kind of device.

    Attributes:
        name: as people call it.
        device_type: torch's.
        capabilities: least and largest compute capability of an NVIDIA GPU; None = any.
        order: backends that come first there; whatever else is chosen automatically follows.
        evidence: where the order comes from: a file of measurements, or `UNVERIFIED` and whose habit it is.
        hip: whether it is an AMD GPU.
    """

    name: str
    device_type: str
    capabilities: tuple[tuple[int, int], tuple[int, int]] | None
    order: tuple[str, ...]
    evidence: str
    hip: bool = False


_OWN, _AS_ENGINES = ("cuda", "triton"), f"{UNVERIFIED}: as serving engines do"
_MEASURED = "measured on an H200: benchmarks/results/h200_routing.json"

#: The first row that fits a device counts.
PLATFORMS = (
    Platform("CPU", "cpu", None, ("cpu",), "the only native kernels there; held to the reference by tests"),
    Platform("ROCm", "cuda", None, ("triton",), f"{UNVERIFIED}: the only own kernels for it", hip=True),
    Platform(
        "Volta, Turing",
        "cuda",
        ((7, 0), (7, 5)),
        ("flex", "torch_sdpa"),
        f"{UNVERIFIED}: own kernels need 8.0",
    ),
    Platform("Ampere", "cuda", ((8, 0), (8, 8)), _OWN, f"{UNVERIFIED}: as on Hopper"),
    Platform("Ada", "cuda", ((8, 9), (8, 9)), ("flashinfer", *_OWN), _AS_ENGINES),
    Platform("Hopper", "cuda", ((9, 0), (9, 0)), _OWN, _MEASURED),
    Platform("Blackwell", "cuda", ((10, 0), (12, 9)), ("flashinfer", *_OWN), _AS_ENGINES),
)
_UNKNOWN = Platform("unknown", "", None, (), f"{UNVERIFIED}: no row of the table")


def platform_of(device: torch.device) -> Platform:
    """The row of a device; one without an order where there is none, or no such device here to ask."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return _UNKNOWN
    hip = device.type == "cuda" and torch.version.hip is not None
    have = torch.cuda.get_device_capability(device) if device.type == "cuda" and not hip else None
    for row in PLATFORMS:
        if row.device_type != device.type or row.hip != hip:
            continue
        if row.capabilities is None or (have and row.capabilities[0] <= have <= row.capabilities[1]):
            return row
    return _UNKNOWN


def order_of(device: torch.device) -> tuple[str, ...]:
    """The names that the automatic choice tries on ``device``: registered ones, those of its row, the rest of
    `AUTOMATIC`."""
    first = (name for name in names.AUTOMATIC if name not in names.MODULES)
    return tuple(dict.fromkeys((*first, *platform_of(device).order, *names.AUTOMATIC)))


def platform_table() -> str:
    """The table in Markdown, as docs/backends.md has it (`torchpaged backends --platforms`)."""
    lines = ["| platform | compute capability | tried first | evidence |", "|---|---|---|---|"]
    for row in PLATFORMS:
        ends = ["–"] if row.capabilities is None else [f"{a}.{b}" for a, b in dict.fromkeys(row.capabilities)]
        order = ", ".join(f"`{name}`" for name in row.order)
        lines.append(f"| {row.name} | {' to '.join(ends)} | {order} | {row.evidence} |")
    return "\n".join([*lines, ""])
