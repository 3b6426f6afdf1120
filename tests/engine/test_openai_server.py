"""examples/openai_server.py, in this process."""

import asyncio
import contextlib
import importlib.util
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from torchpaged.engine import Generator, SamplingParams

pytest.importorskip("starlette", reason="starlette is not installed")
testclient = pytest.importorskip(
    "starlette.testclient", reason="its client is not installed", exc_type=Exception
)
pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).parents[2]
GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


class Words:
    """A tokenizer whose tokens are numbers: "5 9" is [5, 9]; a message is its own prompt."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(f" {token}" for token in ids)

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> dict[str, list[int]]:
        return self(messages[-1]["content"])


@pytest.fixture(scope="module")
def want(llama: Any) -> list[int]:
    with Generator(llama, max_seq_len=64, graphs=False) as generator:
        return generator.generate([[5, 9]], SamplingParams(max_new_tokens=6, ignore_eos=True))[0].token_ids


@pytest.fixture(scope="module")
def server() -> ModuleType:
    spec = importlib.util.spec_from_file_location("openai_server", ROOT / "examples" / "openai_server.py")
    assert spec is not None
    assert spec.loader is not None
    server = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(server)
    return server


@pytest.fixture(scope="module")
def client(llama: Any, want: list[int], server: ModuleType) -> Iterator[Any]:
    generator = Generator(llama, Words(), max_batch_size=4, max_seq_len=64, compile=False).start()
    with generator, testclient.TestClient(server.make_app(generator, "tiny")) as client:
        yield client


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def test_completions(client: Any, want: list[int]) -> None:
    answer = client.post("/v1/completions", json={"prompt": "5 9", **GREEDY}).json()
    [choice] = answer["choices"]
    assert numbers(choice["text"]) == want
    assert (choice["finish_reason"], answer["object"]) == ("length", "text_completion")
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8}
    assert client.post("/v1/completions", json={"prompt": [5, 9], **GREEDY}).json()["choices"] == [choice]


def test_chat(client: Any, want: list[int]) -> None:
    body = {"messages": [{"role": "user", "content": "5 9"}], "model": "tiny", **GREEDY}
    [choice] = client.post("/v1/chat/completions", json=body).json()["choices"]
    assert choice["message"]["role"] == "assistant"
    assert numbers(choice["message"]["content"]) == want


@pytest.mark.parametrize("chat", [False, True])
def test_streams(client: Any, want: list[int], chat: bool) -> None:
    prompt = {"messages": [{"role": "user", "content": "5 9"}]} if chat else {"prompt": "5 9"}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    lines = client.post(path, json={**prompt, **GREEDY, "stream": True}).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    parts = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-2]]
    text = "".join(part["delta"]["content"] if chat else part["text"] for part in parts)
    assert numbers(text) == want
    assert [part["finish_reason"] for part in parts] == [None] * 5 + ["length"]


def test_clients_side_by_side(client: Any, want: list[int]) -> None:
    def ask(_: int) -> list[int]:
        answer = client.post("/v1/completions", json={"prompt": "5 9", **GREEDY})
        return numbers(answer.json()["choices"][0]["text"])

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(16))) == [want] * 16


@pytest.mark.parametrize("gone", [asyncio.CancelledError, OSError], ids=["task", "connection"])
def test_a_client_that_is_gone_when_its_answer_begins(llama: Any, server: ModuleType, gone: Any) -> None:
    """Its request ends, and what was not read of it does not stay in memory."""
    body = json.dumps({"prompt": "5 9", "max_tokens": 50, "ignore_eos": True, "stream": True}).encode()
    where = {"method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    async def send(message: Any) -> None:
        raise gone

    async def main() -> None:
        scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, **where}
        with contextlib.suppress(Exception, asyncio.CancelledError):
            await server.make_app(generator, "tiny")(scope, receive, send)

    with Generator(llama, Words(), max_batch_size=4, max_seq_len=64, compile=False).start() as generator:
        asyncio.run(main())
        while not generator.metrics().finished:
            time.sleep(0.001)
        assert not generator.has_unfinished


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_while_it_waits(
    llama: Any, server: ModuleType, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Its request is cancelled, streamed or not; others go on."""
    body = {"prompt": "5 9", "max_tokens": 50, "ignore_eos": True, "stream": stream}
    where = {"method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
    generator = Generator(llama, Words(), max_batch_size=4, max_seq_len=64, compile=False)
    step = generator._stepper.step

    def slow() -> None:
        time.sleep(0.05)
        step()

    monkeypatch.setattr(generator._stepper, "step", slow)

    async def main() -> None:
        messages, leaves = (
            [{"type": "http.request", "body": json.dumps(body).encode()}],
            time.monotonic() + 0.2,
        )

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            if (left := leaves - time.monotonic()) > 0:
                await asyncio.sleep(left)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None: ...

        scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, **where}
        await server.make_app(generator, "tiny")(scope, receive, send)

    with generator.start():
        other = generator.submit([5, 9], SamplingParams(max_new_tokens=20, ignore_eos=True))
        asyncio.run(main())
        *_, last = generator.stream([other])
        assert (last.finish_reason, generator.metrics().finished) == ("length", {"cancelled": 1, "length": 1})


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": ""},
        {"prompt": "500"},
        {"prompt": "5", "temperature": -1},
        {"prompt": "5", "logit_bias": {"1": 5}},
        {"prompt": "5", "n": 2},
        {"prompt": "5", "stream": "false"},
        {"prompt": "5 " * 64},
        {"prompt": "5", "max_tokens": 2, "max_completion_tokens": 3},
        {"prompt": "5", "stop": 5},
        {"prompt": "5", "messages": [{"role": "user", "content": "5"}]},
        [1],
    ],
    ids=str,
)
def test_bad_requests(client: Any, body: Any) -> None:
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 400
    said = answer.json()["error"]
    assert ": expected" in said["message"]


def test_a_field_that_is_not_served_is_named(client: Any) -> None:
    answer = client.post("/v1/completions", json={"prompt": "5", "n": 2})
    assert "got n=2; leave it out" in answer.json()["error"]["message"]


def test_messages_that_the_template_refuses(client: Any) -> None:
    """Templates raise errors of their own kinds."""
    answer = client.post("/v1/chat/completions", json={"messages": [{"role": "user"}]})
    assert answer.status_code == 400
    assert "KeyError('content')" in answer.json()["error"]["message"]


def test_paths_and_methods_that_are_not_served(client: Any) -> None:
    answers = client.get("/v1/nothing"), client.get("/v1/completions")
    assert [answer.status_code for answer in answers] == [404, 405]
    assert [answer.json()["error"]["message"] for answer in answers] == [
        "404: Not Found",
        "405: Method Not Allowed",
    ]


class Unreadable(Words):
    """No token has a text."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        raise OverflowError("no such letter")


def test_requests_that_fail(llama: Any, server: ModuleType) -> None:
    """Where the answer has begun the error is its last part."""
    body = {"prompt": "5 9", **GREEDY}
    with Generator(llama, Unreadable(), max_batch_size=4, max_seq_len=64, compile=False).start() as generator:
        client = testclient.TestClient(server.make_app(generator, "tiny"))
        answer = client.post("/v1/completions", json=body)
        parts = client.post("/v1/completions", json={**body, "stream": True}).text.split("\n\n")
    closed = client.post("/v1/completions", json=body)
    errors = [each.json()["error"] for each in (answer, closed)]
    errors.append(json.loads(parts[-3].removeprefix("data: "))["error"])
    assert (answer.status_code, closed.status_code, parts[-2]) == (500, 503, "data: [DONE]")
    assert [error["type"] for error in errors] == ["RequestError", "ClosedError", "RequestError"]
    assert "no such letter" in errors[0]["message"]


class Meeting(Words):
    """Reads two prompts at a time."""

    both = threading.Barrier(2)

    def __call__(self, text: str) -> dict[str, list[int]]:
        self.both.wait(60)
        return super().__call__(text)


def test_a_prompt_that_takes_long_to_read(llama: Any, server: ModuleType, want: list[int]) -> None:
    """Others are answered meanwhile."""
    generator = Generator(llama, Meeting(), max_batch_size=4, max_seq_len=64, compile=False).start()
    app = server.make_app(generator, "tiny")
    with generator, testclient.TestClient(app) as client, ThreadPoolExecutor(2) as pool:
        bodies = [{"prompt": "5 9", **GREEDY}] * 2
        answers = pool.map(lambda body: client.post("/v1/completions", json=body), bodies)
        assert [numbers(answer.json()["choices"][0]["text"]) for answer in answers] == [want] * 2


def test_metrics_and_models(client: Any) -> None:
    assert "torchpaged_requests_running 0" in client.get("/metrics").text
    assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
