"""The batches of each part."""

from dataclasses import dataclass
from typing import Any

import torch

from torchpaged.custom_ops.attention.call import Specialisation
from torchpaged.custom_ops.attention.cuda.prefill_shape import prefill_config
from torchpaged.custom_ops.cuda.config import Config


@dataclass(frozen=True)
class Case:
    """One batch: query and key lengths of its requests."""

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    heads: tuple[int, int] = (32, 8)
    dim: int = 128
    block_size: int = 16
    causal: bool = True
    lse: bool = False
    dtype: torch.dtype = torch.bfloat16
    padding: int = 0  # token rows behind the last request
    dim_v: int = 0  # 0: as dim
    window_left: int = -1
    window_right: int = -1
    chunk: int = 0
    soft_cap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    layout: str = "NHD"  # of the pools; HND: heads outside of slots; both: keys and values in one allocation

    def config(self) -> Config:
        return prefill_config(self.specialisation())

    def specialisation(self) -> Specialisation:
        heads, kv_heads = self.heads
        sizes = (heads // kv_heads, kv_heads, self.dim, self.dim_v or self.dim, self.block_size)
        return Specialisation(
            self.dtype,
            self.dtype,
            False,
            *sizes,
            k_strides=(),
            v_strides=(),
            causal=self.causal,
            **self.masks(),
            soft_cap=self.soft_cap > 0,
            alibi=self.alibi,
            sinks=self.sinks,
            lse=self.lse,
        )

    def masks(self) -> dict[str, int]:
        return {"window_left": self.window_left, "window_right": self.window_right, "chunk_size": self.chunk}


def whole(*lengths: int, **options: Any) -> Case:
    return Case(lengths, lengths, **options)


CHECKS: dict[str, Case] = {
    "one token": whole(1),
    "one tile": whole(32),
    "one step": whole(128),
    "a little more": whole(129, 127, 16, 17),
    "700": whole(700),
    "ragged": whole(1, 300, 16, 77, 128, 513, 5, lse=True),
    "contexts": Case((3, 64, 200, 33), (500, 64, 700, 1025), lse=True),
    "empty": Case((5, 0, 17, 40, 0), (0, 30, 17, 23, 0), padding=50, lse=True),
    "long": whole(3000),
    "many": whole(*(1 + 37 * i % 211 for i in range(100)), lse=True),
    "no group": whole(300, 1, 260, heads=(4, 4), lse=True),
    "group of 2": whole(300, 77, heads=(8, 4)),
    "group of 8": Case((300, 40), (333, 400), heads=(16, 2)),
    "group of 7": Case((130, 40), (133, 400), heads=(14, 2), lse=True),
    "not causal": Case((130, 40, 7), (133, 400, 640), causal=False),
    "width 64": Case((300, 40, 129), (333, 400, 129), dim=64, lse=True),
    "blocks of 8": Case((300, 40), (333, 397), block_size=8),
    "blocks of 64": Case((300, 40), (333, 397), block_size=64),
    "blocks of 128": Case((300, 40), (333, 397), block_size=128),
    "fp16": whole(300, 40, dtype=torch.float16),
    "width 64, group of 7": whole(1, 500, 193, heads=(14, 2), dim=64),
    "width 96": Case((300, 40, 129), (333, 400, 129), dim=96, lse=True),
    "width 32": Case((300, 40, 129), (333, 400, 129), dim=32, lse=True),
    "width 192/128": Case((300, 40, 129), (333, 401, 129), dim=192, dim_v=128, heads=(8, 8), lse=True),
    "width 128/64": Case((300, 40), (333, 401), dim_v=64, lse=True),
    "width 192": Case((300, 40), (333, 401), dim=192, lse=True),
    "width 256": Case((300, 40, 129, 1), (333, 401, 129, 64), dim=256, heads=(16, 8), lse=True),
    "width 256, blocks of 64": Case((300, 40), (333, 401), dim=256, heads=(8, 2), block_size=64),
    "window": Case((700, 40, 129), (1333, 401, 129), window_left=200, lse=True),
    "narrow window": Case((300, 40, 129), (333, 1401, 129), window_left=5),
    "window, not causal": Case(
        (300, 40, 129), (333, 401, 129), window_left=30, window_right=70, causal=False, lse=True
    ),
    "right window alone": Case((300, 40), (333, 401), window_right=150, causal=False),
    "chunks": Case((700, 40, 129), (1333, 401, 129), chunk=300, lse=True),
    "chunks of 16, not causal": Case((300, 129), (333, 129), chunk=16, causal=False),
    "soft cap": Case((300, 40), (333, 401), soft_cap=2.0, lse=True),
    "alibi": Case((300, 40), (333, 1401), alibi=True, lse=True),
    "sinks": Case((300, 5, 40), (333, 0, 401), sinks=True, lse=True),
    "sinks, window, width 64": Case((300, 40), (333, 1401), sinks=True, window_left=127, dim=64, lse=True),
    "width 256, window, soft cap": Case(
        (300, 40), (1333, 401), dim=256, heads=(16, 8), window_left=400, soft_cap=5.0, lse=True
    ),
    "left padding": Case((300, 40, 20), (100, 1, -3), window_left=50, lse=True),
    "all of it": Case(
        (300, 40), (1333, 401), window_left=100, soft_cap=3.0, alibi=True, sinks=True, chunk=777, lse=True
    ),
    "HND": Case((300, 40), (333, 401), layout="HND"),
    "HND, width 96": Case((300, 40), (333, 401), layout="HND", dim=96),
    "keys beside values": Case((300, 40), (333, 401), layout="both"),
}
GRAPH = Case((100,) * 6, (400,) * 6, lse=True)
TIMES: dict[str, Case] = {
    "1 x 16k": whole(16384),
    "1 x 8k": whole(8192),
    "1 x 3000": whole(3000),
    "6 x 700": whole(*[700] * 6),
    "8 x 512": whole(*[512] * 8),
    "512 on 32k": Case((512,), (32768,)),
    "1 x 4k, width 64": whole(4096, dim=64),
    "1 x 4k, width 96": whole(4096, dim=96),
    "1 x 4k, width 256": whole(4096, dim=256, heads=(16, 8)),
    "1 x 4k, width 192/128": whole(4096, dim=192, dim_v=128, heads=(32, 32)),
    "1 x 16k, window 1k": whole(16384, window_left=1023),
}
POWER: dict[str, Case] = {"1 x 16k": whole(16384)}
