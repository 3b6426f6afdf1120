"""reshape_and_cache_flash against vLLM's documented behaviour: where tokens land, what is skipped, what fp8
stores."""

from typing import Any

import pytest
import torch

import torchpaged
from torchpaged.compat import reshape_and_cache_flash

SLOTS = torch.tensor([0, 13, -1, 6, 31])
TOKENS = [0, 1, 3, 4]  # those that are stored


def tokens(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    # two more than there are slots: padding
    return torch.randn(7, 2, 16).to(dtype), torch.randn(7, 2, 8).to(dtype)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("auto", torch.float32),
        ("auto", torch.bfloat16),
        ("bfloat16", torch.bfloat16),
        ("float16", torch.float16),
    ],
)
def test_plain(name: str, dtype: torch.dtype) -> None:
    """Slot 0 is a slot like any other; scales of vLLM's ones do not count."""
    k, v = tokens(dtype)
    k_cache, v_cache = torch.zeros(4, 8, 2, 16, dtype=dtype), torch.zeros(4, 8, 2, 8, dtype=dtype)
    reshape_and_cache_flash(k, v, k_cache, v_cache, SLOTS, name, torch.ones(1), torch.ones(1))
    want_k, want_v = torch.zeros(32, 2, 16, dtype=dtype), torch.zeros(32, 2, 8, dtype=dtype)
    want_k[SLOTS[TOKENS]], want_v[SLOTS[TOKENS]] = k[TOKENS], v[TOKENS]
    assert torch.equal(k_cache.flatten(0, 1), want_k)
    assert torch.equal(v_cache.flatten(0, 1), want_v)


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("scale", [torch.tensor(0.5), torch.tensor([0.5]), torch.tensor([0.5, 2.0])])
def test_fp8(name: str, raw: bool, scale: torch.Tensor) -> None:
    """``x / scale`` in the named format, in a cache of that dtype or of bytes."""
    k, v = tokens()
    dtype = torch.float8_e5m2 if name == "fp8_e5m2" else torch.float8_e4m3fn
    held = [torch.zeros(4, 8, 2, width, dtype=dtype) for width in (16, 8)]
    reshape_and_cache_flash(
        k, v, *(x.view(torch.uint8) if raw else x for x in held), SLOTS, name, scale, scale
    )
    for cache, x in zip(held, (k, v), strict=True):
        want = (x[TOKENS] / scale.reshape(1, -1, 1)).to(dtype)
        assert torch.equal(cache.flatten(0, 1)[SLOTS[TOKENS]].float(), want.float())


def test_compiled() -> None:
    k, v = tokens()
    held, again = ([torch.zeros(4, 8, 2, 16), torch.zeros(4, 8, 2, 8)] for _ in range(2))
    call = torch.compile(
        lambda k, v, a, b, s: reshape_and_cache_flash(k, v, a, b, s, "auto", None, None),
        backend="eager",
        fullgraph=True,
    )
    call(k, v, *held, SLOTS)
    reshape_and_cache_flash(k, v, *again, SLOTS, "auto", None, None)
    assert all(map(torch.equal, held, again))


@pytest.mark.parametrize(
    ("argument", "options"),
    [
        ("kv_cache_dtype", {"kv_cache_dtype": "nvfp4"}),
        ("key_cache", {"kv_cache_dtype": "fp8"}),
        ("key_cache", {"kv_cache_dtype": "bfloat16"}),
        (
            "key_cache",
            {
                "key_cache": torch.zeros(4, 8, 2, 16, dtype=torch.uint8),
                "value_cache": torch.zeros(4, 8, 2, 8, dtype=torch.uint8),
            },
        ),
        ("key", {"key": torch.zeros(4, 2, 16)}),
        ("value", {"value": torch.zeros(7, 3, 8)}),
        ("slot_mapping", {"slot_mapping": torch.tensor([32])}),
        ("slot_mapping", {"slot_mapping": torch.tensor([9, 9])}),
    ],
)
def test_refused_by_its_name(argument: str, options: dict[str, Any]) -> None:
    k, v = tokens()
    given: dict[str, Any] = {
        "key": k,
        "value": v,
        "key_cache": torch.zeros(4, 8, 2, 16),
        "value_cache": torch.zeros(4, 8, 2, 8),
        "slot_mapping": SLOTS,
        "kv_cache_dtype": "auto",
        "k_scale": None,
        "v_scale": None,
    }
    with pytest.raises(torchpaged.ArgumentError) as error:
        reshape_and_cache_flash(**{**given, **options})
    assert error.value.argument == argument, error.value
