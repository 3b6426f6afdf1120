"""What ``torchpaged generate`` does: load a model, submit the prompts, stream or write, summarise; with
``--profile`` traced."""

import contextlib
import dataclasses
import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from torchpaged import profiling
from torchpaged.backends.choose.names import requested_name
from torchpaged.cli.chat import Message, converse
from torchpaged.cli.commands import show
from torchpaged.cli.demo import ensure_smollm2
from torchpaged.cli.generation_report import begun, bucket_tables, decisions, document, grown, summary
from torchpaged.cli.jsonl import lines_of_stdin, read_prompts, sole_writer, write_outputs
from torchpaged.cli.model import load, read_config, read_tokenizer, reading
from torchpaged.cli.settings import Settings
from torchpaged.compile.compile_cache import load_compile_cache, save_compile_cache
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.engine import Generator, RequestOutput, SamplingParams
from torchpaged.engine.prompts import require_text
from torchpaged.profiling.kernel_report import KernelReport, report_table
from torchpaged.profiling.kernel_report.attribute import kernels_of_generation
from torchpaged.profiling.kernel_report.trace import module_ranges, read_trace
from torchpaged.profiling.ranges import check_writable

ERRORS = Console(stderr=True)


def check_options(settings: Settings) -> SamplingParams:
    """Refuse what no model is needed for to refuse, before one is fetched or loaded.

    Raises:
        TorchpagedError, OSError: the trace can't be written there, a number of the sampling is none, or the
            backend is none, or none of this device.
    """
    if settings.profile:
        check_writable(settings.profile, "--profile")
    sampling = SamplingParams(**settings.sampling)
    for text in sampling.stop:
        require_text("--stop", text)
    require_text("--system", settings.system)
    requested_name(settings.place.type, settings.backend)
    return sampling


def run(settings: Settings) -> int:
    """Run the command; returns the exit code: 0, or 2 if a prompt was refused or failed."""
    sampling = check_options(settings)
    with sole_writer(settings.output) if settings.input else contextlib.nullcontext():
        return _run(settings, sampling)


def _run(settings: Settings, sampling: SamplingParams) -> int:
    """Find prompts and model, and answer."""
    names: list[int | str] = []
    if settings.input:
        named = read_prompts(settings.input, settings.output)
        names, settings = list(named), dataclasses.replace(settings, prompts=list(named.values()))
        if not names:
            print(f"{settings.output}: nothing to do", file=sys.stderr)
            return 0
    elif "-" in settings.prompts:
        if (count := len(settings.prompts)) > 1:
            raise ArgumentError("PROMPTS", "- alone, for the lines of stdin", f"it among {count}")
        # no lines: refused as an empty prompt, since --chat without prompts is a conversation
        settings = dataclasses.replace(settings, prompts=lines_of_stdin() or [""])
        settings.check()
    if not settings.model:
        model = ensure_smollm2(offline=settings.offline, progress=not settings.as_json)
        settings = dataclasses.replace(settings, model=str(model))
    with _compile_cache(settings.compile_cache, quiet=settings.as_json):
        return _generate(settings, sampling, names)


def _generate(settings: Settings, sampling: SamplingParams, names: list[int | str]) -> int:
    """Read the prompts, load the model, and answer."""
    config = read_config(settings.model)
    tokenizer = read_tokenizer(settings.model)
    if settings.chat and not getattr(tokenizer, "chat_template", None):
        raise ArgumentError("--chat", "a model with a chat template", "none", "leave --chat out")
    refused: dict[int, str] = {}
    prompts: dict[int, list[int]] = {}
    for index, prompt in enumerate(settings.prompts):
        with _refusing(refused, index):
            prompts[index] = _prompt(tokenizer, settings, [], prompt)
    if not prompts and not settings.as_json and not settings.is_conversation:
        return 2
    model = load(settings, config)
    # Closed at the end: tools that trace the GPU lose what they hold when graphs outlive the program.
    with _generator(model, tokenizer, settings) as generator:
        return _answer(generator, model, tokenizer, settings, sampling, names, prompts, refused)


def _answer(
    generator: Generator,
    model: Any,
    tokenizer: Any,
    settings: Settings,
    sampling: SamplingParams,
    names: list[int | str],
    prompts: dict[int, list[int]],
    refused: dict[int, str],
) -> int:
    """Submit the prompts, stream or write what comes, under these names, summarise."""
    ids: dict[int, int] = {}
    for index, prompt_ids in prompts.items():
        with _refusing(refused, index):
            ids[generator.submit(prompt_ids, sampling)] = index
    with _profiled(settings, model), profiling.range("generation"):
        if names:
            named = {request: (names[index], settings.prompts[index]) for request, index in ids.items()}
            outputs = write_outputs(generator, named, settings.output, ERRORS, quiet=settings.as_json)
        elif settings.is_conversation:
            encode = functools.partial(_prompt, tokenizer, settings)
            outputs = converse(generator, sampling, encode, refused)
        else:
            outputs = _stream(generator, ids, settings)
    kernels = _kernels(settings.profile, model, generator) if settings.profile else {}
    if settings.as_json:
        result = document(generator, settings, outputs, refused)
        if settings.profile:
            result["profile"] = {
                "trace": settings.profile,
                "kernels": {phase: report.to_dict() for phase, report in kernels.items()},
            }
        print(json.dumps(result))
    else:
        if outputs:
            print()
            show(summary(generator))
        for table in bucket_tables(generator) if settings.verbose else ():
            print(table, file=sys.stderr)
        for phase, report in kernels.items():
            ERRORS.print(report_table(report, phase))
    return 2 if refused or any(output.error for output in outputs.values()) else 0


@contextlib.contextmanager
def _refusing(refused: dict[int, str], index: int) -> Iterator[None]:
    """A prompt that is refused inside is noted; the other prompts go on."""
    try:
        yield
    except ArgumentError as error:
        refused[index] = str(error)
        print(f"error: prompt {index + 1}: {error}", file=sys.stderr)


def _generator(model: Any, tokenizer: Any, settings: Settings) -> Generator:
    """The engine, its captures shown as they go, and what it decided."""
    with Progress(
        TextColumn("capturing"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        console=ERRORS,
        transient=True,
        disable=settings.as_json or not ERRORS.is_terminal,
    ) as bar:
        task = bar.add_task("", total=None, visible=False)
        generator = Generator(
            model,
            tokenizer,
            max_batch_size=max(settings.batch_sizes or [min(max(len(settings.prompts), 1), 64)]),
            buckets=settings.batch_sizes,
            max_seq_len=settings.max_seq_len or None,
            block_size=settings.block_size,
            num_blocks=settings.num_blocks or None,
            backend=settings.backend,
            compile="auto" if settings.compile is None else settings.compile,
            fuse=settings.fuse,
            steps_per_launch=settings.steps_per_launch,
            prefill_buckets=settings.prompt_sizes,
            progress=lambda done, total, text: bar.update(
                task, completed=done, total=total, description=text, visible=True
            ),
        )
    if not settings.as_json:
        show(f"cache: {generator.model.kv_cache.describe()}", sys.stderr)
        if settings.verbose:
            for line in decisions(generator):
                show(line, sys.stderr)
    return generator


@contextlib.contextmanager
def _compile_cache(path: str, quiet: bool) -> Iterator[None]:
    """With ``--compile-cache``: read the file before anything is compiled; write it at a good end if there
    was none."""
    present = bool(path) and Path(path).exists()
    if path and not present:
        check_writable(path, "--compile-cache")
    if present:
        report = load_compile_cache(path)  # another version's is left as it is, with a warning
        if report.loaded and not quiet:
            print(
                f"compile cache: {path}, {report.num_bytes / 2**20:.1f} MiB read in {report.seconds:.1f} s",
                file=sys.stderr,
            )
    yield
    if path and not present:
        report = save_compile_cache(path)
        if not quiet:
            print(f"compile cache: {path}, {report.num_bytes / 2**20:.1f} MiB written", file=sys.stderr)


@contextlib.contextmanager
def _profiled(settings: Settings, model: Any) -> Iterator[None]:
    """With ``--profile``, trace the block with a range per module. The file is written however the
    block ends."""
    if not settings.profile:
        yield
        return
    with profiling.trace(settings.profile), module_ranges(model):
        yield
    if not settings.as_json:
        print(f"trace: {settings.profile}", file=sys.stderr)


def _kernels(path: str, model: Any, generator: Generator) -> dict[str, KernelReport]:
    """Kernels of the traced generation by module; replays are matched with steps of the same size run now, on
    idle rows."""
    decode = generator.runner

    def prefill(num_reqs: int, num_tokens: int) -> None:
        runners = (runner for runner in generator.prefill_runners if runner.fits(num_reqs, num_tokens))
        if (runner := next(runners, None)) is not None:  # graphs may have been given up behind the trace
            runner.launch_padding(num_tokens)

    return kernels_of_generation(
        read_trace(path), model, None if decode is None else decode.launch_eager, prefill
    )


def _prompt(tokenizer: Any, settings: Settings, earlier: list[Message], prompt: str) -> list[int]:
    """Tokens of a prompt, behind the earlier messages of its conversation."""
    if not prompt:
        raise ArgumentError("prompt", "text", "an empty string")
    require_text("prompt", prompt)
    with reading(settings.model, "a chat template" if settings.chat else "a tokenizer"):
        if settings.chat:
            messages = [*earlier, {"role": "user", "content": prompt}]
            made = _in_template(tokenizer, settings.system, messages)
            if settings.system and made == _in_template(tokenizer, settings.system + ".", messages):
                raise ArgumentError(
                    "--system", "a chat template that has a place for it", "one that leaves it out"
                )
        else:
            made = tokenizer(prompt)["input_ids"]
        ids = [int(token) for token in made]
    if not ids:
        raise ArgumentError(
            "--model", "a tokenizer and a template that make tokens of text", f"none of {settings.model!r}"
        )
    return ids


def _in_template(tokenizer: Any, system: str, messages: list[dict[str, str]]) -> list[int]:
    first = [{"role": "system", "content": system}] if system else []
    made = tokenizer.apply_chat_template([*first, *messages], add_generation_prompt=True, return_dict=True)
    ids: list[int] = made["input_ids"]
    return ids


def _stream(generator: Generator, ids: dict[int, int], settings: Settings) -> dict[int, RequestOutput]:
    """Print tokens as they come: one prompt as plain text, several in turn, each under its own heading."""
    order = list(ids)
    outputs, ended = {request: begun(request) for request in order}, set[int]()
    # requests before order[shown] are printed whole; order[shown] streams, the others are kept until its end
    shown = 0

    def begin(request: int) -> None:
        if not settings.as_json:
            heading = f"\n[{ids[request] + 1}] " if len(order) > 1 else ""
            answer = "\n" if settings.chat else ""  # else it goes on where the prompt ends
            text = f"{heading}{settings.prompts[ids[request]]}{answer}{outputs[request].text}"
            print(text, end="", flush=True)

    if order:
        begin(order[0])
    for event in generator.stream():
        request = event.request_id
        outputs[request] = grown(outputs[request], event)
        if event.finish_reason:
            ended.add(request)
        if event.error is not None:  # the other prompts go on
            print(f"error: prompt {ids[request] + 1}: {event.error.reason}", file=sys.stderr)
        if settings.as_json:
            continue
        if shown < len(order) and request == order[shown]:
            print(event.text, end="", flush=True)
        while shown < len(order) and order[shown] in ended:
            print(flush=True)
            shown += 1
            if shown < len(order):
                begin(order[shown])
    return outputs
