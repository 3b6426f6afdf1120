"""What ``torchpaged generate`` says of a run: outputs, summary, the engine's choices, tables, JSON."""

import dataclasses
from typing import Any

from torchpaged.cli.settings import Settings
from torchpaged.custom_ops.words import counted
from torchpaged.engine import Generator, RequestOutput, TokenEvent
from torchpaged.graphs import bucket_table


def begun(request: int) -> RequestOutput:
    """Of a request that nothing came of yet."""
    return RequestOutput(request, [], [], "", "cancelled")


def grown(output: RequestOutput, event: TokenEvent) -> RequestOutput:
    """``output`` and what an event brings."""
    output.token_ids.extend([] if event.token_id is None else [event.token_id])
    reason = event.finish_reason or output.finish_reason
    text = output.text + event.text
    return dataclasses.replace(output, text=text, finish_reason=reason, error=event.error or output.error)


def summary(generator: Generator) -> str:
    """One line: tokens, rates, blocks, and the backend with its reason."""
    s = generator.stats
    rates = [  # a prompt of one token is computed as a decode
        f"{phase} {tokens / seconds:.1f} tok/s"
        for phase, tokens, seconds in (
            ("prefill", s.prefill_tokens, s.prefill_seconds),
            ("decode", s.decode_tokens, s.decode_seconds),
        )
        if tokens and seconds > 0
    ]
    return (
        f"{counted(s.prompt_tokens, 'prompt token')}, {counted(s.new_tokens, 'new token')} | "
        f"{', '.join(rates) or 'no step measured'} | {s.peak_blocks_used} of "
        f"{counted(s.num_blocks, 'block')} | "
        f"backend {generator.choice.name}: {generator.choice.reason}"
    )


def bucket_tables(generator: Generator) -> list[str]:
    """A table of the decode graphs and those of the prefill graphs, where there are any."""
    if generator.runner is None:
        return []
    tables = [bucket_table(generator.runner.report())]
    for runner in generator.prefill_runners:
        tokens = "tokens of 1" if runner.buffers.max_num_reqs == 1 else "tokens"
        tables.append(bucket_table(runner.report(), tokens, "padded tokens"))
    return tables


def decisions(generator: Generator) -> list[str]:
    """The choices that the engine made by itself and their reasons, as lines."""
    lines = [
        f"graphs: {generator.graph_reason}",
        f"prefill graphs: {generator.prefill_graph_reason}",
        f"compile: {generator.compile_reason}",
    ]
    if generator.fusion_report is not None:
        lines += f"fused: {generator.fusion_report}".splitlines()
    return lines


def document(
    generator: Generator, settings: Settings, outputs: dict[int, RequestOutput], refused: dict[int, str]
) -> dict[str, Any]:
    """What ``--json`` prints, without the profile; ``refused``: the error of a prompt, by its index."""
    s, results = generator.stats, iter(outputs.values())
    rows: list[dict[str, Any]] = []
    for index, prompt in enumerate(settings.prompts):
        if index in refused:
            rows.append({"prompt": prompt, "error": refused[index]})
        else:
            output = next(results)
            rows.append(
                {
                    "prompt": prompt,
                    "text": output.text,
                    "token_ids": output.token_ids,
                    "finish_reason": output.finish_reason,
                }
            )
            if output.error is not None:
                rows[-1]["error"] = output.error.reason
    return {
        "model": settings.model,
        "device": str(settings.place),
        "dtype": str(settings.torch_dtype).removeprefix("torch."),
        "backend": generator.choice.name,
        "backend_reason": generator.choice.reason,
        "outputs": rows,
        "stats": dataclasses.asdict(s),
        "graph_reason": generator.graph_reason,
        "compile_reason": generator.compile_reason,
        "buckets": []
        if generator.runner is None
        else [dataclasses.asdict(report) for report in generator.runner.report()],
        "prefill_graph_reason": generator.prefill_graph_reason,
        "prefill_buckets": [
            {"max_num_reqs": runner.buffers.max_num_reqs, **dataclasses.asdict(report)}
            for runner in generator.prefill_runners
            for report in runner.report()
        ],
        "fusion": generator.fusion_report and generator.fusion_report.to_dict(),
    }
