"""One architecture, checked: what a `PagedCache` made without further arguments gives, against transformers'
eager attention in float32.

Four checks, each over logits, and so over greedy tokens:

    generate   a left-padded batch through generate(); one row is longer than the window, the other crosses
               it while it decodes
    window     an even batch shorter than the window, decoded past it
    forward    one forward over the left-padded batch, called directly; every position that is a token
    compiled   ``generate`` again, its decode step under ``fullgraph=True``; ``window`` by direct forwards for
               models that generate() does not compile; counted in graphs

Logits agree if they differ by 1e-4 of their scale at most (the largest magnitude, at least 1), and if they
name the same tokens.

Decoders of which this transformers makes no causal mask (`torchpaged.hf.support.lacks_causal_mask`) are
compared with its eager attention under one.
"""

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from greedy import greedy
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import CompileConfig, PreTrainedModel

from model_coverage.architectures import model_of
from torchpaged.custom_ops.errors import UnsupportedModelError
from torchpaged.hf import PagedCache, attach
from torchpaged.hf.families import family_of
from torchpaged.hf.support import lacks_causal_mask

TOLERANCE = 1e-4
NEW_TOKENS = 8
MODES = ("paged", "latent", "states", "dense", "no cache", "refused", "wrong", "broken", "unexamined")
RUNS = ("paged", "latent", "states", "dense")  # the modes in which torchpaged runs layers
_MAX_SEQ_LEN = 32

Beat = Callable[..., None]
Wants = dict[str, Tensor]


@dataclass
class Row:
    """What came out for one architecture.

    Attributes:
        model_type: transformers' name of it.
        kind: what its layers are made of, in words.
        mode: "paged", "latent", "states" or "dense" (every check but the compiled one is right), "no cache"
            (it keeps no keys and values, and runs as without torchpaged), "refused", "wrong" (numbers differ,
            and nothing said so), "broken" (an error that is not a refusal), "unexamined" (transformers'
            own eager attention fails, so that there is nothing to compare with).
        checks: name -> "right", or what happened.
        graphs: of the compiled decode; None if it did not run.
        reason: why it is not paged, or not compiled; empty if it is both.
        seconds: that the checks took.
    """

    model_type: str
    kind: str = ""
    mode: str = ""
    checks: dict[str, str] = field(default_factory=dict)
    graphs: int | None = None
    reason: str = ""
    seconds: float = 0.0

    @property
    def is_one_graph(self) -> bool:
        """Whether the compiled check is right, with one graph."""
        return self.checks.get("compiled") == "right" and self.graphs == 1


def prompts(rows: int = 2, length: int = 20, padding: int = 7) -> dict[str, Tensor]:
    """Token ids ``[rows, length]`` int64 and their mask; the first row has ``padding`` tokens of left
    padding."""
    ids = torch.randint(3, 99, (rows, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    ids[0, :padding], mask[0, :padding] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def _generate(
    model: PreTrainedModel, inputs: dict[str, Tensor], cache: Any = None, **options: Any
) -> tuple[Tensor, Any]:
    """Logits of every new token ``[tokens, rows, vocab]``, and the cache behind them."""
    return greedy(model, inputs, cache, **{"max_new_tokens": NEW_TOKENS, "eos_token_id": None, **options})


def _forward(model: PreTrainedModel, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    """Logits of all positions that are tokens, ``[tokens, vocab]``."""
    with torch.no_grad():
        logits: Tensor = model(**inputs, **options).logits
    return logits[inputs["attention_mask"].bool()]


def _masked(model: PreTrainedModel, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    """Logits ``[batch, length, vocab]`` under a causal mask made here, without a cache."""
    ids, tokens = inputs["input_ids"], inputs["attention_mask"].bool()
    seen = tokens[:, None, None] & torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids, attention_mask=mask, use_cache=False, **options).logits
    return logits


def generate_masked(
    model: PreTrainedModel, inputs: dict[str, Tensor], new_tokens: int = NEW_TOKENS
) -> Tensor:
    """Logits of every new token ``[tokens, rows, vocab]`` of a model that makes no causal mask itself, if it
    had one: transformers' eager attention, without a cache."""
    ids, tokens = inputs["input_ids"], inputs["attention_mask"]
    found: list[Tensor] = []
    for _ in range(new_tokens):
        places = {"position_ids": (tokens.cumsum(-1) - 1).clamp_min(0)}
        given = places if "position_ids" in inspect.signature(model.forward).parameters else {}
        found.append(_masked(model, {"input_ids": ids, "attention_mask": tokens}, **given)[:, -1])
        ids = torch.cat((ids, found[-1].argmax(-1, keepdim=True)), 1)
        tokens = torch.cat((tokens, torch.ones_like(tokens[:, :1])), 1)
    return torch.stack(found)


def _wants(
    model: PreTrainedModel, padded: dict[str, Tensor], even: dict[str, Tensor], eager: Tensor
) -> Wants:
    """What the checks compare with; ``eager``: transformers' own generate() over ``padded``."""
    if model.config.model_type == "recurrent_gemma":  # its own states read the padding
        return _wants_of_rows(model, padded, even)
    if model.config.model_type == "minimax":  # its decodes lose the padding with a cache of its own
        eager = _generate(model, padded, use_cache=False)[0]
    if lacks_causal_mask(model):
        return {
            "generate": generate_masked(model, padded),
            "window": generate_masked(model, even),
            "forward": _masked(model, padded)[padded["attention_mask"].bool()],
        }
    return {
        "generate": eager,
        "window": _generate(model, even)[0],
        "forward": _forward(model, padded, use_cache=False),
    }


def _wants_of_rows(model: PreTrainedModel, padded: dict[str, Tensor], even: dict[str, Tensor]) -> Wants:
    """Of each row by itself, without padding and without a cache."""
    rows = [ids[mask.bool()][None] for ids, mask in zip(*padded.values(), strict=True)]
    calls = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in rows]
    return {
        "generate": torch.cat([_generate(model, call, use_cache=False)[0] for call in calls], 1),
        "window": _generate(model, even, use_cache=False)[0],
        "forward": torch.cat([_forward(model, call, use_cache=False) for call in calls]),
    }


def difference(got: Tensor, want: Tensor, names_tokens: bool = True) -> str:
    """ "right", or how far off; ``names_tokens``: the largest one of each row must be the same, too."""
    if got.shape != want.shape:
        return f"wrong: {list(got.shape)} logits instead of {list(want.shape)}"
    scale = max(float(want.abs().max()), 1.0)
    error = float((got - want).abs().max()) / scale
    if not error <= TOLERANCE:
        return f"wrong: off by {error:.1e} of the logits' scale"
    same = not names_tokens or torch.equal(got.argmax(-1), want.argmax(-1))
    return "right" if same else "wrong: other tokens"


def _keeps_keys(model_type: str, cache: Any) -> bool:
    """Or states alone, that a `PagedCache` keeps."""
    if family_of(model_type).states_alone:
        return True
    cache = getattr(cache, "self_attention_cache", cache)
    return any(isinstance(getattr(layer, "keys", None), Tensor) for layer in getattr(cache, "layers", ()))


def without_folders(text: str) -> str:
    """Files in it by their package, or by name alone: a table is the same wherever Python is installed."""
    text = re.sub(r"(?<![\w.:/])/[^\s\"']*/(?:site|dist)-packages/", "", text)
    return re.sub(r"(?<![\w.:/])/(?:[\w.+-]+/)+", "", text)


def sentence(error: BaseException) -> str:
    """What an error says, on one line."""
    text = without_folders(" ".join(str(error).split()))
    return (text or type(error).__name__)[:300]


def outcome_of(check: Callable[[], str]) -> str:
    """What ``check`` says, or how it ended."""
    try:
        return check()
    except UnsupportedModelError as error:
        return f"refused: {sentence(error)}"
    except Exception as error:
        cause = error.__cause__
        if isinstance(cause, UnsupportedModelError):
            return f"refused: {sentence(cause)}"
        return f"error: {type(error).__name__}: {sentence(error)}"


def kind_of(model: PreTrainedModel) -> str:
    """What the layers are made of, as far as the config and the parameters say."""
    config = model.config.get_text_config(decoder=True)
    layers = [str(kind) for kind in getattr(config, "layer_types", None) or ()]
    words = sorted({kind.removesuffix("_attention").replace("_", " ") for kind in layers} or {"full"})
    if not layers and getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        words = ["sliding"]
    names = " ".join(name for name, _ in model.named_parameters())
    facts = {
        "latent": getattr(config, "kv_lora_rank", None),
        "soft cap": getattr(config, "attn_logit_softcapping", None),
        "sinks": "sinks" in names or "sink_bias" in names,
        "shared keys": getattr(config, "num_kv_shared_layers", None),
        "ALiBi": getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"),
        "experts": any(getattr(config, f"num_{name}", None) for name in ("experts", "local_experts"))
        or getattr(config, "n_routed_experts", None),
        "own attention": not type(model)._can_set_attn_implementation(),
    }
    return ", ".join([*words, *(word for word, fact in facts.items() if fact)])


def eager_failed(row: Row, error: Exception) -> Row:
    """The row of a model that transformers' own attention can't run."""
    row.mode = "unexamined"
    row.reason = f"transformers' own eager attention: {type(error).__name__}: {sentence(error)}"
    return row


def run_checks(
    row: Row, attached: Callable[[], bool], runs: dict[str, Callable[[], Tensor]], wants: Wants, say: Beat
) -> None:
    """Attach, then run each check whose result is known: into ``row.checks``."""
    row.checks["attach"] = outcome_of(lambda: "right" if attached() else "")
    for name, run in runs.items():
        if row.checks["attach"] == "right" and name in wants:
            say("generate" if name == "turns" else name)  # which is one, for limits of time
            row.checks[name] = outcome_of(lambda run=run, name=name: difference(run(), wants[name]))  # type: ignore[misc]


def judge_bad(row: Row, bad: list[str]) -> bool:
    """Mode and reason from outcomes that are not right; whether there are any."""
    if not bad:
        return False
    kinds = {outcome.partition(":")[0] for outcome in bad}
    row.mode = "wrong" if "wrong" in kinds else "broken" if "error" in kinds else "refused"
    word = {"broken": "error"}.get(row.mode, row.mode)
    reason = next(outcome for outcome in bad if outcome.startswith(word))
    row.reason = reason.partition(": ")[2] if row.mode == "refused" else reason
    return True


def run_compiled(row: Row, say: Beat, check: Callable[[], str]) -> None:
    """The compiled check, and what it changes of mode and reason."""
    say("compiling")
    row.checks["compiled"] = outcome_of(check)
    if row.checks["compiled"].startswith("wrong"):
        row.mode = "wrong"
    if row.checks["compiled"] != "right":
        row.reason = "; ".join(filter(None, (row.reason, f"compiled: {row.checks['compiled']}")))


@contextlib.contextmanager
def counted_graphs(row: Row) -> Iterator[CompileCounterWithBackend]:
    """A compiler that counts its graphs, into ``row.graphs``; dynamo knows nothing before and after."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    try:
        yield counter
    finally:
        row.graphs = counter.frame_count
        torch._dynamo.reset()


def compiling(counter: CompileCounterWithBackend) -> dict[str, Any]:
    """Options of generate() that compile its decode step."""
    # generate() copies an object; a function stays the same.
    config = CompileConfig(backend=lambda graph, inputs: counter(graph, inputs), mode=None, fullgraph=True)
    config._compile_all_devices = True  # transformers' own switch for testing the path on a CPU
    return {"compile_config": config, "disable_compile": False}


def _compiled(model: PreTrainedModel, make_cache: Callable[[], PagedCache], wants: Wants, row: Row) -> str:
    """The decode step of generate() as one graph; called directly where transformers does not compile it."""
    with counted_graphs(row) as counter:
        got, _ = _generate(model, prompts(), make_cache(), **compiling(counter))
        want = wants["generate"]
        if not counter.frame_count:
            want = wants["window"]
            got = _decode(model, torch.compile(model, fullgraph=True, backend=counter), make_cache(), want)
    return difference(got, want) if counter.frame_count else "error: nothing was compiled"


def _decode(model: PreTrainedModel, step: Callable[..., Any], cache: PagedCache, want: Tensor) -> Tensor:
    """The ``window`` check again with forwards of our own: ``step`` decodes what ``want`` says."""
    ids, tokens = prompts(length=12, padding=0)["input_ids"], want.argmax(-1)
    with torch.no_grad():
        found = [model(input_ids=ids, past_key_values=cache).logits[:, -1]]
        for position, token in enumerate(tokens[:-1], ids.shape[1]):
            where = torch.full((len(token), 1), position)
            found.append(
                step(input_ids=token[:, None], position_ids=where, past_key_values=cache).logits[:, -1]
            )
    return torch.stack(found)


def examine(model_type: str, *, compiled: bool = True, beat: Beat | None = None) -> Row:
    """Run all checks of one architecture.

    Args:
        model_type: a key of transformers' CausalLM mapping that is not in `architectures.LEFT_OUT`.
        compiled: whether to run the compiled check.
        beat: told what comes next, by name.

    Returns:
        The `Row`; no check raises.
    """
    say = beat or (lambda phase, **_: None)
    row = Row(model_type)
    torch.set_num_threads(1)
    try:
        say("building")
        model = model_of(model_type, "eager")
        row.kind = kind_of(model)
        say("eager")
        padded, even = prompts(), prompts(length=12, padding=0)
        want, cache = _generate(model, padded)
    except Exception as error:
        return eager_failed(row, error)
    if not _keeps_keys(model_type, cache):
        _pass_through(model_type, want, row)
        return row
    wants = _wants(model, padded, even, want)
    made: list[PagedCache] = []

    def make_cache() -> PagedCache:
        made.append(PagedCache(model.config, 2, _MAX_SEQ_LEN, block_size=4, sliding_step=2))
        return made[-1]

    runs: dict[str, Callable[[], Tensor]] = {
        "generate": lambda: _generate(model, padded, make_cache())[0],
        "window": lambda: _generate(model, even, make_cache())[0],
        "forward": lambda: _forward(model, padded, past_key_values=make_cache()),
    }
    run_checks(row, lambda: attach(model) is model, runs, wants, say)
    _judge(row, made)
    if compiled and row.mode in RUNS:
        run_compiled(row, say, lambda: _compiled(model, make_cache, wants, row))
    return row


def _judge(row: Row, made: list[PagedCache]) -> None:
    """Mode and reason, from the checks that ran."""
    if not judge_bad(row, [outcome for outcome in row.checks.values() if outcome != "right"]):
        latent = any(layer.latent for layer in made[-1].paged)
        row.mode = (
            "dense" if made[-1].dense else "latent" if latent else "paged" if made[-1].paged else "states"
        )
        row.reason = getattr(made[-1], "dense_reason", "") if row.mode == "dense" else ""


def _pass_through(model_type: str, want: Tensor, row: Row) -> None:
    """A model that keeps no keys and values: built with our name it must run as before."""
    row.checks["generate"] = outcome_of(
        lambda: difference(_generate(model_of(model_type, "torchpaged"), prompts())[0], want)
    )
    row.mode = (
        "no cache"
        if row.checks["generate"] == "right"
        else "wrong"
        if row.checks["generate"].startswith("wrong")
        else "broken"
    )
    row.reason = "keeps no keys and values" if row.mode == "no cache" else row.checks["generate"]
