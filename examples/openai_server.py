"""OpenAI's completions and chat completions over a Generator's background loop, on Starlette.

    pip install starlette uvicorn
    python examples/openai_server.py HuggingFaceTB/SmolLM2-135M-Instruct --port 8000
    curl localhost:8000/v1/completions -d '{"prompt": "The capital of France is", "max_tokens": 8}'

An example without keys and limits. A field that it does not know is refused, not ignored. A client that goes
away cancels its request.
"""

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from torchpaged import ArgumentError, RequestError, TorchpagedError
from torchpaged.engine import Generator, SamplingParams, TokenEvent

RENAMED = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens"}
SAMPLING = {"temperature", "top_p", "seed", "stop", "top_k", "min_p", "repetition_penalty", "ignore_eos"}
#: Ends that OpenAI's clients know.
REASONS = {"stop": "stop", "length": "length", "out_of_blocks": "length"}
#: The status of an error is its nearest class's; the first three are what a wrong body raises.
STATUS: dict[Any, int] = dict.fromkeys([ValueError, TypeError, RecursionError], 400)
STATUS |= {ArgumentError: 400, TorchpagedError: 503, RequestError: 500, Exception: 500}


def sampling_of(body: dict[str, Any], chat: bool) -> SamplingParams:
    """The request's sampling; refuses what it does not know, unless it says nothing."""
    given: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 16}
    for name, value in body.items():
        if name in ("model", "messages" if chat else "prompt", "stream", "user") or value is None:
            continue
        if name in RENAMED and all(body.get(each) is not None for each in RENAMED):
            raise ArgumentError(name, "one of the two names", "both")
        if name in RENAMED or name in SAMPLING:
            given[RENAMED.get(name, name)] = value
        elif (name, value) not in (("n", 1), ("frequency_penalty", 0), ("presence_penalty", 0)):
            known = ", ".join(sorted(SAMPLING | set(RENAMED)))
            raise ArgumentError("body", f"fields of {known}", f"{name}={value!r}", "leave it out")
    stop = given.pop("stop", ())
    return SamplingParams(**given, stop=(stop,) if isinstance(stop, str) else stop)


def prompt_of(body: dict[str, Any], tokenizer: Any, chat: bool) -> Any:
    """Token ids, as given or of the text."""
    if (given := body.get(name := "messages" if chat else "prompt")) is None:
        raise ArgumentError(name, "a prompt", "none")
    if not chat:
        return tokenizer(given)["input_ids"] if isinstance(given, str) else given
    try:
        return tokenizer.apply_chat_template(given, add_generation_prompt=True, return_dict=True)["input_ids"]
    except Exception as error:  # whatever the model's template raises of messages that it does not take
        raise ArgumentError(name, "messages of the model's template", repr(error)) from error


def choice(chat: bool, text: str, reason: str | None, part: bool) -> dict[str, Any]:
    """One choice of an answer, or of a part of it."""
    message = {"delta" if part else "message": {"role": "assistant", "content": text}}
    content: dict[str, Any] = message if chat else {"text": text}
    return {"index": 0, **content, "logprobs": None, "finish_reason": REASONS.get(reason or "")}


def good(event: TokenEvent) -> TokenEvent:
    """The event, unless its request failed."""
    if event.finish_reason in ("error", "cancelled"):
        raise event.error or TorchpagedError("the server ends")
    return event


def make_app(generator: Generator, name: str) -> Any:
    """The application over a generator that is started."""
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route

    def failure(error: Exception) -> dict[str, Any]:
        return {"error": {"message": str(error), "type": type(error).__name__}}

    async def refuse(_: Request, error: Exception) -> Response:
        status = next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)
        return JSONResponse(failure(error), getattr(error, "status_code", status))

    async def parts(said: Any, answered: Any, head: dict[str, Any], chat: bool) -> AsyncIterator[str]:
        try:
            while said is not None:
                one = choice(chat, good(said).text, said.finish_reason, part=True)
                yield f"data: {json.dumps({**head, 'choices': [one]})}\n\n"
                said = await anext(answered, None)
        except TorchpagedError as error:  # the status is sent already
            yield f"data: {json.dumps(failure(error))}\n\n"
        yield "data: [DONE]\n\n"

    async def made(body: dict[str, Any], chat: bool) -> Response:
        if (streams := body.get("stream")) not in (None, False, True):
            raise ArgumentError("stream", "true or false", repr(streams))
        sampling = sampling_of(body, chat)
        # In a thread: a prompt of megabytes takes seconds, in which others have their tokens.
        prompt = await asyncio.to_thread(prompt_of, body, generator.tokenizer, chat)
        answered = generator.answer(prompt, sampling)
        first = await anext(answered)  # it is queued, or refused, by now
        kind = ("chat.completion.chunk" if streams else "chat.completion") if chat else "text_completion"
        head = {"id": f"cmpl-{time.time_ns():x}", "created": int(time.time()), "model": name, "object": kind}
        if streams:
            return StreamingResponse(parts(first, answered, head, chat), media_type="text/event-stream")
        said = [first, *[event async for event in answered]]
        one = choice(chat, "".join(event.text for event in said), good(said[-1]).finish_reason, part=False)
        n, count = len(prompt), sum(event.token_id is not None for event in said)
        usage = {"prompt_tokens": n, "completion_tokens": count, "total_tokens": n + count}
        return JSONResponse({**head, "choices": [one], "usage": usage})

    async def answer(request: Request, chat: bool) -> Response:
        if not isinstance(body := await request.json(), dict):
            raise ArgumentError("body", "a JSON object", type(body).__name__)
        making = asyncio.ensure_future(made(body, chat))
        try:
            while not making.done() and not await request.is_disconnected():
                await asyncio.wait([making], timeout=0.1)
            return making.result() if making.done() else Response(status_code=499)
        finally:
            making.cancel()

    known = {"object": "list", "data": [{"id": name, "object": "model"}]}
    posts = {"/v1/completions": False, "/v1/chat/completions": True}
    routes = [Route(path, partial(answer, chat=chat), methods=["POST"]) for path, chat in posts.items()]
    routes.append(Route("/v1/models", lambda _: JSONResponse(known)))
    routes.append(Route("/metrics", lambda _: PlainTextResponse(generator.metrics().prometheus())))
    return Starlette(routes=routes, exception_handlers=dict.fromkeys([*STATUS, HTTPException], refuse))


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a model as OpenAI's API does.")
    parser.add_argument("model", help="folder or hub id")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    import torch
    import uvicorn
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").to(device)
    with Generator(model, AutoTokenizer.from_pretrained(args.model), max_batch_size=32).start() as generator:
        uvicorn.run(make_app(generator, args.model), port=args.port)


if __name__ == "__main__":
    main()
