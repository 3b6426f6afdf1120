"""The kinds of model that are covered: which there are, how one is examined, the words above its table."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any, NamedTuple

from model_coverage import architectures, checks, encoder_decoders, encoders, vision_language, vision_models
from model_coverage.checks import TOLERANCE, Beat, Row

_DECODERS = """# Architectures: which models run

Every decoder architecture that transformers maps to a causal LM, tiny and random, through
`torchpaged.hf.PagedCache` without further arguments, against transformers' own eager attention in float32:
logits within {tolerance} of their scale, and the same greedy tokens. `python tests/support/cover_models.py`
made this page; `--help` says how to run it again, and `tests/support/model_coverage/checks.py` what each
check does.

- **paged**: attention reads the block pools. **latent**: it reads pools of latents, one row per token for all
  heads. **states**: no layer attends; each keeps a state per row. **dense**: keys and values are gathered
  first, and SDPA attends.
- **no cache**: the model keeps no keys and values; it runs as without torchpaged.
- **refused**: an `UnsupportedModelError` names the reason. **wrong**: numbers differ and nothing said so.
  **broken**: another error. **unexamined**: transformers' own attention fails.
- **graphs**: that a compiled decode takes, under `fullgraph=True`; a dash where it is not compiled, for the
  reason given.
"""
_ENCODERS = """# Encoders

Families of encoders, tiny and random, under `attn_implementation="torchpaged"` and without a cache, against
transformers' own eager attention in float32: hidden states of all tokens within {tolerance} of their scale,
in batches without padding, with padding on the right and on the left.
`python tests/support/cover_models.py --kind encoder` made this page;
`tests/support/model_coverage/encoders.py` says what each check does.

- **varlen**: every attention ran on the paged kernels, padding left out. **dense**: some ran on SDPA.
- **own attention**: the modules don't call the attention interface; they run as without torchpaged.
- **refused**: an `UnsupportedModelError` names the reason. **wrong**: numbers differ and nothing said so.
  **broken**: another error. **unexamined**: transformers' own attention fails.
- **graphs**: that a compiled forward takes for batches of different lengths, under `fullgraph=True`.
"""
_ENCODER_DECODERS = """# Encoder-decoder models

Families of encoder-decoder models, tiny and random, through `torchpaged.hf.PagedEncoderDecoderCache` without
further arguments, sources padded, against transformers' own eager attention in float32: logits within
{tolerance} of their scale, and the same greedy tokens.
`python tests/support/cover_models.py --kind encoder-decoder` made this page;
`tests/support/model_coverage/encoder_decoders.py` says what each check does.

- **paged**: self- and cross attention read block pools. **dense**: cross attention does; the decoder's own
  keys and values are gathered first, and SDPA attends.
- **refused**: an `UnsupportedModelError` names the reason. **wrong**: numbers differ and nothing said so.
  **broken**: another error. **unexamined**: transformers' own attention fails.
- **graphs**: that a compiled decode takes, under `fullgraph=True`; a dash where it is not compiled, for the
  reason given.
"""
_VISION_LANGUAGE = """# Vision-language models

Families of vision-language models, tiny and random, with pictures through `torchpaged.hf.PagedCache` without
further arguments, against transformers' own eager attention in float32: logits within {tolerance} of their
scale, and the same greedy tokens. Batches have rows with one picture, two and none, padded on the left.
`python tests/support/cover_models.py --kind vision-language` made this page;
`tests/support/model_coverage/vision_language.py` says what each check does.

- **paged**: the text model's attention reads the block pools; pictures whose tokens see each other in both
  directions (gemma3, gemma4, paligemma) too. **latent**, **dense**: as for [decoders](architectures.md).
- **layers**: of the text model; behind the semicolon what the tower's attention runs on: **varlen**, the
  paged kernels, or **SDPA**.
- **refused**: an `UnsupportedModelError` names the reason. **wrong**: numbers differ and nothing said so.
  **broken**: another error. **unexamined**: transformers' own attention fails. A reason that begins with
  **turns** or **uncached** does not concern the mode: it refuses a second call on the same cache with
  pictures of its own, or a forward without a cache.
- **graphs**: that a compiled decode takes, under `fullgraph=True`.
"""


class Kind(NamedTuple):
    """One kind of model.

    Attributes:
        modes: that a row of it may have, the right ones first.
        head: of its page.
        model_types: gives those that this transformers has.
        examine: runs one; as `checks.examine`.
        left_out: those that are not built, and why.
    """

    modes: tuple[str, ...]
    head: str
    model_types: Callable[[], list[str]]
    examine: Callable[..., Row]
    left_out: Mapping[str, str] = MappingProxyType({})


#: name, as ``--kind`` takes it -> the kind
KINDS: dict[str, Kind] = {
    "decoder": Kind(
        checks.MODES,
        _DECODERS.format(tolerance=TOLERANCE),
        architectures.model_types,
        checks.examine,
        architectures.LEFT_OUT,
    ),
    "encoder": Kind(
        encoders.MODES, _ENCODERS.format(tolerance=TOLERANCE), encoders.model_types, encoders.examine
    ),
    "encoder-decoder": Kind(
        encoder_decoders.MODES,
        _ENCODER_DECODERS.format(tolerance=TOLERANCE),
        encoder_decoders.model_types,
        encoder_decoders.examine,
    ),
    "vision-language": Kind(
        vision_language.MODES,
        _VISION_LANGUAGE.format(tolerance=TOLERANCE),
        vision_models.model_types,
        vision_language.examine,
        vision_models.LEFT_OUT,
    ),
}


def run_case(case: dict[str, Any], beat: Beat) -> dict[str, Any]:
    """A worker's case: ``model_type``, ``kind`` and ``compiled`` in, the row as a dictionary out."""
    kind, begin = KINDS[case.get("kind", "decoder")], time.monotonic()
    row = kind.examine(case["model_type"], compiled=case["compiled"], beat=beat)
    return {**asdict(row), "seconds": round(time.monotonic() - begin, 1)}
