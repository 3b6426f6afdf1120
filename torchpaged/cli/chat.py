"""``torchpaged generate --chat`` without prompts: a conversation, a line of stdin each turn.

Ctrl-C ends an answer, which stays in the conversation as far as it came; Ctrl-D, or the end of stdin, ends
the conversation. Earlier turns are found in the engine's prefix cache: a turn computes what is new.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator

from torchpaged.cli.generation_report import begun, grown
from torchpaged.cli.jsonl import read_lines
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.engine import Generator, RequestOutput, SamplingParams

#: As chat templates read it: "role" and "content".
Message = dict[str, str]


def converse(
    generator: Generator,
    sampling: SamplingParams,
    encode: Callable[[list[Message], str], list[int]],
    refused: dict[int, str],
) -> dict[int, RequestOutput]:
    """Answer line by line until stdin ends.

    Args:
        generator, sampling: for each turn.
        encode: tokens of a line behind the messages so far; raises `ArgumentError`.
        refused: why a turn was refused, by its number from 0; it is left out of the conversation.

    Returns:
        Each turn's output; one with an error is left out of the conversation, too.
    """
    messages, outputs = list[Message](), dict[int, RequestOutput]()
    for turn, line in enumerate(_turns()):
        try:
            request = generator.submit(encode(messages, line), sampling)
        except ArgumentError as error:
            refused[turn] = str(error)
            print(f"error: turn {turn + 1}: {error}", file=sys.stderr)
            continue
        outputs[request] = output = _answer(generator, request)
        if output.error is not None:
            print(f"error: turn {turn + 1}: {output.error.reason}", file=sys.stderr)
            continue
        messages += {"role": "user", "content": line}, {"role": "assistant", "content": output.text}
    return outputs


def _turns() -> Iterator[str]:
    """Lines with text: typed behind a prompt on a terminal, else of stdin as it is."""
    if sys.stdin is None or not sys.stdin.isatty():
        yield from (line.rstrip("\r\n") for line in read_lines("-", "stdin") if line.strip())
        return
    with contextlib.suppress(ImportError):  # here, since it may write to a terminal
        import readline  # noqa: F401  `input` has its history and keys then
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        if line.strip():
            yield line


def _answer(generator: Generator, request: int) -> RequestOutput:
    """Print an answer as it comes."""
    output = begun(request)
    try:
        for event in generator.stream([request]):
            print(event.text, end="", flush=True)
            output = grown(output, event)
    except KeyboardInterrupt:  # between two steps: the engine holds it back within one
        generator.cancel(request)
    print(flush=True)
    return output
