"""Vision-language models of transformers, tiny and random, through a `PagedCache` without further arguments,
against transformers' own eager attention in float32, with pictures.

Six checks, each over logits, and so over greedy tokens; towers run under torchpaged, too:

    generate   rows of one picture, of two and of none, padded on the left, through generate()
    window     an even batch shorter than the window, decoded until its pictures leave it
    forward    one forward over ``generate``'s batch, called directly; every position that is a token
    uncached   the same without a cache
    turns      ``generate``, then a second call on the same cache with another picture
    compiled   ``generate`` again, its decode step under ``fullgraph=True``; ``window`` by direct forwards for
               models that generate() does not compile; counted in graphs
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from model_coverage.checks import (
    Beat,
    Row,
    compiling,
    counted_graphs,
    difference,
    eager_failed,
    judge_bad,
    kind_of,
    outcome_of,
    run_checks,
    run_compiled,
)
from model_coverage.encoders import Attended
from model_coverage.vision_models import (
    FAMILIES,
    IMAGE_TOKEN,
    batch_of,
    model_of,
    model_types,
    picture_features,
    tokens_per_picture,
)
from torchpaged.hf import PagedCache, attach

__all__ = ["MODES", "examine", "model_types"]

MODES = ("paged", "latent", "dense", "refused", "wrong", "broken", "unexamined")
NEW_TOKENS = 8
_ROWS, _EVEN, _AGAIN = ("tit", "titit", "ttt"), ("itt", "itt"), ("it", "t", "tit")

Call = dict[str, Tensor]


def generate(model: PreTrainedModel, call: Call, cache: Any = None, **options: Any) -> Any:
    """What generate() gives: ``logits`` of every new token, ``sequences`` and the cache."""
    given = {} if cache is None else {"past_key_values": cache}
    return model.generate(
        **call,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        eos_token_id=None,
        **{"disable_compile": True, **given, **options},
    )


def _logits(out: Any) -> Tensor:
    return torch.stack(out.logits)


def _forward(model: PreTrainedModel, call: Call, **options: Any) -> Tensor:
    """Logits of all positions that are tokens, ``[tokens, vocab]``."""
    with torch.no_grad():
        logits: Tensor = model(**call, **options).logits
    return logits[call["attention_mask"].bool()]


def _turns(model: PreTrainedModel, name: str, call: Call, cache: Any = None) -> Tensor:
    """Logits of a second call that goes on where the first one ended, with pictures of its own."""
    first = generate(model, call, cache)
    more = batch_of(model, name, _AGAIN, tokens_per_picture(model, name), seed=2)
    new, length = more["input_ids"], first.sequences.shape[1]
    # Rows are filled up with text: a row can't be padded again.
    new = torch.where(more["attention_mask"].bool(), new, torch.full_like(new, 7))
    # What was generated may be the token that stands for pictures.
    said = first.sequences[:, call["input_ids"].shape[1] :]
    said = torch.where(said == IMAGE_TOKEN, torch.full_like(said, 7), said)
    joined = {"input_ids": torch.cat([call["input_ids"], said, new], 1)}
    ones = torch.ones(len(new), joined["input_ids"].shape[1] - call["attention_mask"].shape[1])
    joined["attention_mask"] = torch.cat([call["attention_mask"], ones.long()], 1)
    types = FAMILIES[name].types
    if types:
        text = torch.full((len(new), length - call[types].shape[1]), FAMILIES[name].text_type)
        joined[types] = torch.cat([call[types], text, more[types]], 1)
    told = {"input_ids", "attention_mask", types}
    pictures = {key: value for key, value in more.items() if key not in told}
    return _logits(generate(model, {**joined, **pictures}, first.past_key_values))


def tower_of(model: PreTrainedModel, name: str) -> str:
    """On what the attention of the vision tower runs, of a model under torchpaged."""
    counts = Attended()
    with counts:
        picture_features(model, name)
    return "SDPA" if counts.sdpa else "varlen" if counts.ours else "own attention"


def _decode(model: PreTrainedModel, step: Callable[..., Any], cache: Any, call: Call, want: Tensor) -> Tensor:
    """``window`` again with forwards of our own: ``step`` decodes what ``want`` says."""
    with torch.no_grad():
        found = [model(**call, past_key_values=cache).logits[:, -1]]
        for token in want.argmax(-1)[:-1]:
            found.append(step(input_ids=token[:, None], past_key_values=cache).logits[:, -1])
    return torch.stack(found)


def _compiled(
    model: PreTrainedModel, make_cache: Callable[[], PagedCache], calls: Any, wants: Any, row: Row
) -> str:
    """The decode step of generate() as one graph; called directly where transformers does not compile it."""
    with counted_graphs(row) as counter:
        options = compiling(counter)
        got, want = _logits(generate(model, calls["generate"], make_cache(), **options)), wants["generate"]
        if not counter.frame_count:
            step, want = torch.compile(model, fullgraph=True, backend=counter), wants["window"]
            call = {name: x for name, x in calls["window"].items() if name != "attention_mask"}
            got = _decode(model, step, make_cache(), call, want)
    return difference(got, want) if counter.frame_count else "error: nothing was compiled"


def examine(model_type: str, *, compiled: bool = True, beat: Beat | None = None) -> Row:
    """Run all checks of one family; arguments and result as of `checks.examine`."""
    say = beat or (lambda phase, **_: None)
    row = Row(model_type)
    torch.set_num_threads(1)
    try:
        say("building")
        model = model_of(model_type)
        row.kind = kind_of(model).removesuffix(", own attention")  # which is a tower's
        say("eager")
        tokens = tokens_per_picture(model, model_type)
        calls = {"generate": batch_of(model, model_type, _ROWS, tokens)}
        calls["window"] = batch_of(model, model_type, _EVEN, tokens)
        wants = {name: _logits(generate(model, call)) for name, call in calls.items()}
        wants["forward"] = wants["uncached"] = _forward(model, calls["generate"], use_cache=False)
        others = {**calls["generate"], "pixel_values": -calls["generate"]["pixel_values"]}
        if difference(_forward(model, others, use_cache=False), wants["forward"]) == "right":
            raise ValueError("its logits do not depend on the pictures")
    except Exception as error:
        return eager_failed(row, error)
    turns = outcome_of(lambda: wants.update(turns=_turns(model, model_type, calls["generate"])) or "right")
    made: list[PagedCache] = []

    def make_cache() -> PagedCache:
        made.append(PagedCache(model.config, 3, 8 * tokens + 64, block_size=4))
        return made[-1]

    runs: dict[str, Callable[[], Tensor]] = {
        "generate": lambda: _logits(generate(model, calls["generate"], make_cache())),
        "window": lambda: _logits(generate(model, calls["window"], make_cache())),
        "forward": lambda: _forward(model, calls["generate"], past_key_values=make_cache()),
        "uncached": lambda: _forward(model, calls["generate"], use_cache=False),
        "turns": lambda: _turns(model, model_type, calls["generate"], make_cache()),
    }
    run_checks(row, lambda: attach(model) is model, runs, wants, say)
    if row.checks["attach"] == "right" and not FAMILIES[model_type].tokens:
        row.kind += f"; {tower_of(model, model_type)}"
    _judge(row, made)
    if turns != "right":
        row.checks["turns"] = f"not examined: transformers' own: {turns}"
    if compiled and row.mode in MODES[:3]:
        run_compiled(row, say, lambda: _compiled(model, make_cache, calls, wants, row))
    return row


def _judge(row: Row, made: list[PagedCache]) -> None:
    # What a family has no attention for without a cache, or in a later turn, does not change its mode.
    others = {name: row.checks.get(name, "") for name in ("uncached", "turns")}
    refused = [f"{name}: {outcome}" for name, outcome in others.items() if outcome.startswith("refused")]
    bad = [
        outcome
        for name, outcome in row.checks.items()
        if outcome != "right" and not (name in others and outcome.startswith("refused"))
    ]
    if judge_bad(row, bad):
        return
    latent = any(layer.latent for layer in made[-1].paged)
    row.mode = "dense" if made[-1].dense else "latent" if latent else "paged"
    row.reason = "; ".join(filter(None, (made[-1].dense_reason if row.mode == "dense" else "", *refused)))
