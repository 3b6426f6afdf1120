"""The options of bench_attention.py."""

from dataclasses import dataclass

from torchpaged.names import option


@dataclass(frozen=True)
class Options:
    """What to run.

    Attributes:
        heads_first: lay the caches out as ``[num_blocks, num_kv_heads, block_size, head_dim]`` instead of
            tokens first; no option of the command.
    """

    suite: list[str] | None = option(
        "all, decode, prefill, mixed, smoke; may be given several times; default: decode", None
    )
    case: str = option("keep cases whose name contains this", "")
    backends: str = option(
        "own backends, separated by commas; default: those for the device, without the reference", ""
    )
    device: str = option("auto, cpu, cuda, cuda:1", "auto")
    dtype: str = option("fp32, bf16, fp16 for queries and caches; default: the cases' own", "")
    repeats: int = option("samples per contender at least", 24)
    bandwidth: float | None = option("memory ceiling in TB/s; default: measured", None)
    flop_rate: float | None = option("compute ceiling in TFLOP/s; default: measured", None)
    output: str = option("write the document to this JSON file, after every case", "")
    json_only: bool = option("print the JSON line and nothing else", False, "--json-only")
    random: int = option("so many random cases instead of suites", 0)
    seed: int = option("of the random cases", 1)
    heads_first: bool = False
