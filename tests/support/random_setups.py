"""Random set-ups of the engine under faults: families, options (graphs, mixed steps, prefix cache, few
blocks), requests, samples of a prompt, ways to call it, errors in forwards, one or two Ctrl-C anywhere,
several engines over one PagedModel. Requests must get the tokens that they get alone, and every block and
ring must come back.

    PYTHONPATH=. python tests/support/random_setups.py 0 500    # seeds; prints those that failed
"""

import gc
import random
import signal
import sys
import tempfile
import traceback
from collections import Counter, defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from tiny_models import tiny_model

import torchpaged.engine
import torchpaged.hf
from torchpaged.backends import Limits
from torchpaged.custom_ops.errors import CaptureError
from torchpaged.engine import Generator, SamplingParams
from torchpaged.hf import PagedModel, fuse
from torchpaged.prefixes import CascadeCosts

COMMON = {"head_dim": 8, "max_position_embeddings": 128, "tie_word_embeddings": False}
LLAMA_4: dict[str, Any] = {
    "attention_chunk_size": 8,
    "layer_types": ["chunked_attention", "full_attention"],
    "no_rope_layers": [1, 0],
    "floor_scale": 8,
    "attn_scale": 0.7,
    "intermediate_size_mlp": 48,
    "num_local_experts": 2,
    "moe_layers": [],
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 8},
    "Gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 8},
    "Llama4Text": LLAMA_4,
}
#: Two passes always pay.
FREE = CascadeCosts(0.0, 0.0, 1.0, 1e9, "whatever is shared pays")
LENGTH, SLOTS = 96, 3
FOLDERS = tuple(Path(module.__file__ or "").parent for module in (torchpaged.engine, torchpaged.hf))
#: A tracer can raise between a with-statement's body and its release of a lock, where no signal arrives.
LOCKED = ("calls.py", "call_lock.py", "hand_out.py")
TRACED = {str(path) for folder in FOLDERS for path in folder.rglob("*.py") if path.name not in LOCKED}


@cache
def model_of(family: str, fused: bool) -> Any:
    """A tiny model; several engines have it one after the other."""
    model = tiny_model(family, **COMMON, **FAMILIES[family])
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                # Or else the last token decides alone which comes next, and a wrong key is not seen.
                gain = 3.0 if "o_proj" in name or "down_proj" in name else 1.2
                weight.copy_(
                    torch.randn_like(weight) * (0.3 if "embed" in name else gain / weight.shape[-1] ** 0.5)
                )
    if fused:
        fuse(model, count=False)
    return model


@cache
def _alone(family: str) -> Generator:
    options: dict[str, Any] = {"graphs": False, "share_prefixes": False, "rolling": False, "block_size": 16}
    return Generator(
        model_of(family, False), max_batch_size=1, max_seq_len=LENGTH, prefill_chunk_size=LENGTH, **options
    )


@cache
def alone(family: str, prompt: tuple[int, ...], sampling: SamplingParams) -> list[int]:
    """The tokens of a request that has an engine to itself."""
    return _alone(family).generate([list(prompt)], sampling)[0].token_ids


class Fault(Exception):
    """Raised in the middle of a forward."""


class Faults:
    """Raises `Fault` where a layer asks for its batch the n-th time, or SIGINT at the n-th line of the
    engine, twice in every third case: the second one does not wait. No other one comes while a request is
    looked for that an error is about: it would be taken for it."""

    def __init__(self, paged: PagedModel, rng: random.Random) -> None:
        self.rng, self.layers, self.lines, self.signals, self.raised = rng, 0, 0, 1, 0
        self.engine: Generator | None = None
        self._metadata_of = paged._cache.metadata_of
        paged._cache.metadata_of = self._forward  # type: ignore[method-assign]

    def _forward(self, *args: Any) -> Any:
        self.layers -= 1
        if self.layers == 0:
            self.raised += 1
            raise Fault
        return self._metadata_of(*args)

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            self.lines -= 1
            if self.lines == 0:
                self.raised += 1
                sys.settrace(None)
                for _time in range(self.signals):
                    signal.raise_signal(signal.SIGINT)
        return self._line

    def __enter__(self) -> None:
        kind = self.rng.random()
        searches = self.engine is not None and self.engine._stepper._bisection is not None
        self.layers = self.rng.randint(1, 6) if kind < 0.15 and not searches else 0
        self.lines = self.rng.randint(1, 3000) if kind > 0.75 else 0
        self.signals = 2 if kind > 0.92 else 1
        self.handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        if self.lines:
            sys.settrace(lambda frame, *_: self._line if frame.f_code.co_filename in TRACED else None)

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> bool:
        sys.settrace(None)
        signal.signal(signal.SIGINT, self.handler)
        self.layers = self.lines = 0
        error = error.__cause__ if isinstance(error, CaptureError) else error
        return isinstance(error, (Fault, KeyboardInterrupt))


class SetUp:
    """One random set-up; ``str`` says what it is."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.family, fused = rng.choice(list(FAMILIES)), rng.random() < 0.3
        self.model = model_of(self.family, fused and self.family != "Llama4Text")
        self.heads = [tuple(rng.choices(range(5, 99), k=rng.choice((4, 17, 33)))) for _ in range(2)]
        rolls, size = rng.random() < 0.5, rng.choice((4, 8))
        self.paged = PagedModel(
            self.model,
            num_blocks=rng.choice((SLOTS * LENGTH, 128, 72, 72)) // size + 1,
            block_size=size,
            limits=Limits(SLOTS, 24, -(-LENGTH // size)),
            sliding_step=12 if rolls else None,
        )
        self.met: Counter[str] = Counter()
        self.said: list[Any] = [seed, self.family, size, self.paged.kv_cache.num_blocks, rolls]

    def engine(self) -> Generator:
        """Another engine over the paged model."""
        rng, graphs = self.rng, self.rng.random() < 0.7
        shares = "auto" if self.paged.rings is not None else self.rng.choice(("auto", False))
        options: dict[str, Any] = {
            "graphs": graphs,
            "steps_per_launch": rng.choice((1, 2, 3)) if graphs else 1,
            "prefill_buckets": rng.choice((None, [12])) if graphs else None,
            "prefill_chunk_size": rng.choice((5, 12)) if not graphs else 12,
            "lookahead": rng.choice((None, 8)),
            "capture_ahead": rng.choice((True, False)) and graphs,
            "cascade": rng.choice((FREE, False)),
            "mixed_steps": rng.choice(("auto", "auto", False)),
            "share_prefixes": shares,
            "prefix_cache": rng.choice(("auto", "auto", False)),
            **rng.choice(({}, self.swapping(shares))),
            "max_batch_size": rng.randint(1, SLOTS),
            "max_seq_len": LENGTH,
        }
        self.said.append(options)
        return Generator(self.paged, compile=False, **options)

    def swapping(self, shares: Any) -> dict[str, Any]:
        """Blocks go to the host, where there are blocks to keep."""
        if shares is False or self.paged.rings is not None:
            return {}
        host = {"prefix_cache": "auto", "host_cache_memory": 1 << 16, "preemption": "swap"}
        if self.rng.random() < 0.5:
            return host
        row = self.paged.kv_cache.bytes_per_block  # few on the host, so that most come from the disk
        size = self.rng.choice((4, 1000)) * row
        disk = {"disk_cache_path": tempfile.gettempdir(), "disk_cache_size": size}
        return {**host, "host_cache_memory": self.rng.choice((2, 6, 12)) * row, **disk}

    def request(self) -> tuple[tuple[int, ...], SamplingParams]:
        """A prompt, often with the beginning of others, and how to sample."""
        rng = self.rng
        head = rng.choice((*self.heads, ()))
        prompt = head[: rng.randint(0, len(head))] + tuple(rng.choices(range(5, 99), k=rng.randint(1, 9)))
        warm = {"temperature": 0.8, "seed": rng.randrange(9)} if rng.random() < 0.3 else {}
        return prompt, SamplingParams(max_new_tokens=rng.randint(1, 20), ignore_eos=True, **warm)

    def serve(self, generator: Generator, faults: Faults) -> None:
        """Some requests to their ends, or cancelled, through faults; checks the tokens."""
        rng, waiting = self.rng, [self.request() for _ in range(self.rng.randint(1, 6))]
        faults.engine = generator
        asked: dict[int, tuple[tuple[int, ...], SamplingParams]] = {}
        got: dict[int, list[int]] = defaultdict(list)
        ended: dict[int, str] = {}
        for _ in range(2000):
            if not waiting and not generator.has_unfinished:
                break
            if waiting and rng.random() < 0.4:
                prompt, sampling = waiting.pop()
                with faults:
                    asked[generator.submit(list(prompt), sampling)] = prompt, sampling
            if asked and rng.random() < 0.03:
                victim = rng.choice(list(asked))
                with faults:
                    generator.cancel(victim)
            if rng.random() < 0.05:
                with faults:
                    self.samples(generator)
            events = []
            with faults:
                events = generator.step()
            for event in events:
                assert event.request_id in asked, f"an event of no request: {event}"
                assert event.request_id not in ended, f"an event of no request: {event}"
                got[event.request_id] += [] if event.token_id is None else [event.token_id]
                if event.finish_reason is not None:
                    ended[event.request_id] = event.finish_reason
        assert not generator.has_unfinished, "no end"
        for request, (prompt, sampling) in asked.items():
            want = alone(self.family, prompt, sampling)
            reason = ended[request]
            assert reason in ("length", "cancelled"), reason
            right = (
                got[request] == want[: len(got[request])] if reason == "cancelled" else got[request] == want
            )
            assert right, f"request {request}: {got[request]} for {want}"
        assert generator.pool.num_used == 0, "blocks were lost"
        assert self.paged.rings is None or self.paged.rings.num_used == 0, "rings were lost"

    def samples(self, generator: Generator) -> None:
        """One or more samples of a prompt, which share its blocks; checks the tokens."""
        prompt, sampling = self.request()
        sampling = replace(sampling, n=3 if sampling.temperature and self.rng.random() < 0.7 else 1)
        outputs = generator.generate([list(prompt)], sampling)
        for output, one in zip(outputs, sampling.samples(), strict=True):
            assert output.token_ids == alone(self.family, prompt, one), "generate() next to others"
        self.met["samples"] += sampling.n > 1

    def note(self, generator: Generator) -> None:
        """What the engine did, together, so that a run tells which combinations it had."""
        stats = generator.stats
        facts = {
            "graphs": generator.runner is not None,
            "hits": stats.shared_tokens > 0,
            "mixed": stats.mixed_steps > 0,
            "put back": stats.preemptions > 0,
            "swapped": stats.prefix_cache.host_tokens > 0,
            "from a disk": stats.prefix_cache.disk_tokens > 0,
        }
        self.met[" + ".join(name for name, is_so in facts.items() if is_so) or "plain"] += 1

    def run(self) -> int:
        """Several engines in turns, one of them dropped in the middle; returns how many faults it met."""
        engines = [self.engine() for _ in range(self.rng.randint(1, 2))]
        faults = Faults(self.paged, self.rng)
        for turn in range(self.rng.randint(1, 4)):
            self.serve(engines[turn % len(engines)], faults)
            self.note(engines[turn % len(engines)])
            if self.rng.random() < 0.3:  # left with requests, and gone
                left = engines.pop(turn % len(engines))
                prompt, sampling = self.request()
                left.submit(list(prompt), sampling)
                left.step()
                if self.rng.random() < 0.5:
                    del left
                    gc.collect()
                engines.append(self.engine())
        return faults.raised


def main(first: int, count: int) -> None:
    """Run ``count`` seeds."""
    failed, met, did = [], 0, Counter[str]()
    for seed in range(first, first + count):
        setup = None
        try:
            setup = SetUp(seed)
            met += setup.run()
            did += setup.met
        except Exception:
            failed.append(seed)
            print(setup and setup.said)
            traceback.print_exc(file=sys.stdout)
        if (seed - first) % 50 == 49:
            print(f"{seed - first + 1} set-ups, {met} faults met, failed: {failed}", flush=True)
    print(f"{count} set-ups, {met} faults met, failed: {failed}")
    print(dict(did.most_common()))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
