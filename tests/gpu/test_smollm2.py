"""SmolLM2 on a GPU: the golden greedy tokens in float32 through every door, and bf16
logits, teacher-forced."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.gpu
GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "smollm2_golden.json").read_text())["prompts"]


def load(path: Path, dtype: torch.dtype) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to("cuda").eval()


@pytest.mark.parametrize(
    "door",
    [
        "eager",
        "generate",
        "generate_compiled",
        "generator",
        "generator_compiled",
        "generator_fused",
        "generator_fused_k4",
    ],
)
def test_golden_tokens(smollm2_path: Path, door: str) -> None:
    import torchpaged.hf as hf
    from torchpaged.engine import Generator, SamplingParams

    model = load(smollm2_path, torch.float32)
    want = [p["new_ids"] for p in GOLDEN]
    if door.startswith("generator"):
        compiled, fused = door.endswith("compiled"), "fused" in door
        generator = Generator(
            model,
            max_seq_len=64,
            compile="auto" if fused else compiled,
            buckets=[5, 8] if compiled else None,
            fuse=fused,
            steps_per_launch=4 if door.endswith("k4") else 1,
        )
        outputs = generator.generate(
            [p["input_ids"] for p in GOLDEN], SamplingParams(max_new_tokens=24, ignore_eos=True)
        )
        assert generator.choice.name == "cuda"
        assert generator.runner is not None
        report = generator.fusion_report
        assert (
            (report is not None and report.complete and "fully fused" in generator.compile_reason)
            if fused
            else report is None
        )
        assert [o.token_ids for o in outputs] == want
        return
    model.set_attn_implementation("eager" if door == "eager" else "torchpaged")
    got = []
    for prompt in GOLDEN:
        ids = torch.tensor([prompt["input_ids"]], device="cuda")
        cache = {} if door == "eager" else {"past_key_values": hf.PagedCache(model.config, 1, 64)}
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=24,
            min_new_tokens=24,
            do_sample=False,
            disable_compile=door != "generate_compiled",
            **cache,
        )
        got.append(out[0, ids.shape[1] :].tolist())
    assert got == want


def test_bf16_logits_teacher_forced(smollm2_path: Path) -> None:
    """Prefill of the prompt, then one decode step per golden token through captured graphs; errors against
    float32 eager."""
    from torchpaged.graphs import DecodeGraphRunner
    from torchpaged.hf import PagedModel

    exact_model, model = load(smollm2_path, torch.float32), load(smollm2_path, torch.bfloat16)
    for each in (exact_model, model):
        each.set_attn_implementation("eager")
    rows = [p["input_ids"] + p["new_ids"] for p in GOLDEN]
    with torch.no_grad():
        exact = [exact_model(torch.tensor([row], device="cuda")).logits[0] for row in rows]
        eager = [model(torch.tensor([row], device="cuda")).logits[0].float() for row in rows]
    paged = PagedModel(model, num_blocks=1 + 4 * len(rows))
    assert paged.choice.name == "cuda"
    runner = DecodeGraphRunner(
        paged, max_batch_size=len(rows), max_blocks_per_req=4, block_size=16, device="cuda", compile=False
    )
    blocks = [[1 + 4 * i + n for n in range(4)] for i in range(len(rows))]
    for step in range(max(map(len, rows))):
        live = [i for i, row in enumerate(rows) if step < len(row)]
        logits = runner.run(
            [rows[i][step] for i in live], [step + 1] * len(live), [blocks[i] for i in live]
        ).float()
        for row, i in enumerate(live):
            ours = float((logits[row] - exact[i][step]).norm() / exact[i][step].norm())
            theirs = float((eager[i] - exact[i]).norm(dim=-1).div(exact[i].norm(dim=-1)).max())
            assert ours <= 2 * theirs, (
                f"prompt {i}, position {step}: relative error {ours:.4f}, HF bf16 at most {theirs:.4f}"
            )
