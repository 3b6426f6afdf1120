"""Launches of a decode step before and after fusing, by layer: what the tables of docs/fusion.md say.

    python benchmarks/count_launches.py [lfm2 qwen3_next qwen3_5_text youtu deepseek_v2 ...]

Tiny models with random weights, counted on any machine; Kimi Linear, Bailing hybrid, Qwen3-Next and Granite 4
without their mixtures of experts. The last line is one JSON document.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from model_coverage.architectures import config_of, with_random_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from torchpaged.fuse.report import Launches
from torchpaged.hf import attach, fuse

FAMILIES = ["llama", "lfm2", "qwen3_next", "qwen3_5_text", "olmo_hybrid", "bamba", "granitemoehybrid"]
FAMILIES += ["falcon_h1", "zamba2", "kimi_linear", "bailing_hybrid", "nemotron_h", "youtu", "deepseek_v2"]
WITHOUT_EXPERTS = {
    "bailing_hybrid": {"mlp_layer_types": ["dense"] * 2},
    "kimi_linear": {"mlp_layer_types": ["dense"] * 4},
    "qwen3_next": {"num_experts": 0},
    "granitemoehybrid": {"num_local_experts": 0},
}


def by_kind(launches: Launches | None, kinds: list[str]) -> dict[str, list[int]]:
    """Of each kind of layer the numbers that occur, and of what is outside of the layers."""
    if launches is None:
        return {}
    found = {
        kind: sorted({n for n, k in zip(launches.layers, kinds, strict=True) if k == kind})
        for kind in dict.fromkeys(kinds)
    }
    return {**found, "outside": [launches.rest]}


def main() -> None:
    document = {}
    for family in sys.argv[1:] or FAMILIES:
        config = config_of(family)
        config.update(WITHOUT_EXPERTS.get(family, {}))
        kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        report = fuse(
            attach(with_random_weights(kind._from_config(config, attn_implementation="eager")).eval())
        )
        kinds = getattr(config, "layer_types", None) or ["attention"] * config.num_hidden_layers
        document[family] = {"before": by_kind(report.before, kinds), "after": by_kind(report.after, kinds)}
        print(f"{family}: {document[family]['before']} -> {document[family]['after']}", file=sys.stderr)
    print(json.dumps(document))


if __name__ == "__main__":
    main()
