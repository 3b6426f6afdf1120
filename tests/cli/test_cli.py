"""The command line as a user meets it: JSON, several prompts, one-line errors, explanations."""

import io
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command import ROOT, Captured, Done, refused, run, run_process

from torchpaged.engine import Generator


def test_json_has_everything_and_nothing_else(folder: str) -> None:
    arguments = ("generate", "hello", "a longer prompt", "--model", folder, "--max-new-tokens", "5", "--json")
    done = run_process(*arguments)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    assert [len(o["token_ids"]) for o in document["outputs"]] == [5, 5]
    assert document["outputs"][0]["finish_reason"] == "length"
    assert document["backend"] in ("cpu", "reference", "triton")
    assert document["stats"]["new_tokens"] == 10
    assert document["graph_reason"] == "eager capture on a CPU"
    assert document["compile_reason"] == "automatic: eager on a CPU"
    assert [report["bucket"] for report in document["buckets"]] == [1, 2]
    assert document["fusion"] is None
    assert document["prefill_buckets"] == []
    assert document["prefill_graph_reason"].startswith("automatic: on a CPU")


def test_fused_whole_steps_give_the_same_tokens(folder: str) -> None:
    prompts = (
        *("generate", "hello", "a longer prompt", "bye", "--model", folder, "--max-new-tokens", "9"),
        *("--json", "--device", "cpu"),
    )
    plain = json.loads(run(*prompts).stdout)
    done = run(*prompts, "--fuse", "--steps-per-launch", "4", "--buckets", "1,2", "--prefill-buckets", "8,32")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [o["token_ids"] for o in document["outputs"]] == [o["token_ids"] for o in plain["outputs"]]
    assert [report["bucket"] for report in document["buckets"]] == [1, 2]  # the third prompt waited
    assert (
        0
        < sum(report["hits"] for report in document["buckets"])
        < sum(report["hits"] for report in plain["buckets"])
    )
    sizes = [(report["max_num_reqs"], report["bucket"]) for report in document["prefill_buckets"]]
    assert sizes == [(1, 8), (1, 32), (2, 8), (2, 32)]
    assert plain["prefill_buckets"] == []
    assert sum(report["hits"] for report in document["prefill_buckets"]) == 2
    assert "[8, 32] was given" in document["prefill_graph_reason"]
    assert document["fusion"]["complete"]
    assert document["fusion"]["replaced"]["qkv"] == ["layers.0", "layers.1"]


def test_verbose_explains_on_stderr(folder: str) -> None:
    arguments = (
        *("generate", "hello", "--model", folder, "--max-new-tokens", "4", "--device", "cpu"),
        *("--fuse", "--buckets", "1,4"),
    )
    quiet, verbose = run(*arguments), run(*arguments, "--prefill-buckets", "none", "--verbose")
    assert verbose.returncode == 0, verbose.stderr
    for words in (
        "graphs: eager capture on a CPU",
        "prefill graphs: switched off by prefill_buckets=[]",
        "compile: automatic: eager on a CPU",
        "fused: LlamaForCausalLM, 2 layers",
        "padded rows",
    ):
        assert words in verbose.stderr, words
        assert words not in verbose.stdout, words
        assert words not in quiet.stderr, words
    table = verbose.stderr[verbose.stderr.index("bucket ") :].splitlines()
    assert [line.split()[0] for line in table[1:3]] == ["1", "4"], "bucket 4 was never needed"
    assert table[2].split()[1] == "-", "bucket 4 was never needed"


def test_text_and_summary(folder: str) -> None:
    done = run("generate", "hello", "--model", folder, "--max-new-tokens", "4", "--backend", "reference")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("hello"), done.stderr
    assert "5 prompt tokens, 4 new tokens | prefill " in done.stdout
    one = run("generate", "h", "--model", folder, "--max-new-tokens", "2").stdout  # computed as a decode
    assert "1 prompt token, 2 new tokens | decode " in one
    assert "backend reference: backend='reference' was given" in done.stdout


def test_one_bad_prompt_among_good_ones(folder: str) -> None:
    done = run("generate", "hello", "x" * 70, "", "bye", "--model", folder, "--max-new-tokens", "3", "--json")
    outputs = json.loads(done.stdout)["outputs"]
    assert done.returncode == 2
    assert ["error" in o for o in outputs] == [False, True, True, False]
    assert "prompt 2: prompt: expected at most 63 tokens" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--backend", "nope"), "expected one of auto, cuda, triton, cpu, torch_sdpa, flex, reference"),
        (("--max-new-tokens", "0"), "max_new_tokens: expected an integer of at least 1, got 0"),
        (("--max-seq-len", "100"), "max_seq_len: expected 2 to 64"),
        (("--chat",), "chat template"),
        (("--dtype", "int8"), "expected one of fp32"),
        (("--dtype", "fp8_e4m3"), "got 'fp8_e4m3'"),
        (("--buckets", "1,,2"), "expected numbers of at least 1 such as 1,2,4, got '1,,2'"),
        (("--buckets", "0"), "expected numbers of at least 1"),
        (("--prefill-buckets", "some"), "expected numbers of at least 1 such as 1,2,4, got 'some'"),
        (("--prefill-buckets", "64,9000"), "prefill_buckets: expected numbers of tokens from 1 to 8192"),
        (("--num-blocks", str(10**12)), "num_blocks: expected pools that fit into"),
        (("--stop", os.fsdecode(b"\xff")), "--stop: expected text in UTF-8"),
        (("--system", "bye"), "--system: expected --chat with it"),
    ],
)
def test_errors_are_one_line(folder: str, arguments: tuple[str, ...], words: str) -> None:
    refused(words, "generate", "hello", "--model", folder, *arguments)


def test_a_missing_model_and_an_empty_prompt(folder: str) -> None:
    refused("does not exist", "generate", "hello", "--model", "./no/such/folder")
    refused("expected text, got an empty prompt", "generate", "", "--model", folder)
    refused("expected text, got none", "generate", "--model", folder)
    assert "Traceback" in run("generate", "hello", "--model", "./no/such/folder", TORCHPAGED_DEBUG="1").stderr


def test_backends_explains() -> None:
    report = json.loads(run("backends", "--dtype", "fp8_e4m3", "--json").stdout)
    assert report["chosen"] == ""
    assert all("dtype float8_e4m3fn is not one of" in " ".join(r) for r in report["rejected"].values())
    assert report["declared"]["flash_attn"]["planning"] == "EVERY_STEP"
    assert report["declared"]["flash_attn"]["other_names"] == ["FLASH_ATTN"]
    text = run("backends", "--dtype", "fp32").stdout
    assert "chosen:" in text
    assert "reference" in text


def test_a_stdout_that_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    monkeypatch.setattr(sys, "argv", ["torchpaged", "backends"])
    from torchpaged.cli import main

    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code


@pytest.mark.parametrize(("errors", "shown"), [("strict", rb"caf\xe9"), ("replace", b"caf?")])
def test_a_stdout_of_few_characters(
    folder: str, errors: str, shown: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are escaped, unless its owner has said what becomes of them."""
    from torchpaged.cli import main

    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", errors=errors))
    given = ("generate", "caf\N{LATIN SMALL LETTER E WITH ACUTE}", "--model", folder, "--max-new-tokens", "2")
    monkeypatch.setattr(sys, "argv", ["torchpaged", *given])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    sys.stdout.flush()
    assert raw.getvalue().startswith(shown)


def test_env_report() -> None:
    report = json.loads(run("env", "--json").stdout)
    assert report["packages"]["torch"]
    assert "native_kernels" in report["cpu"]
    assert "TORCHPAGED_CACHE" in report["environment"]
    assert "TORCHPAGED_CHECK" in run("env").stdout


def test_compile_cache_is_written_then_read(folder: str, tmp_path: Path) -> None:
    path = tmp_path / "code.tpc"
    arguments = [
        *("generate", "hello", "--model", folder, "--max-new-tokens", "3", "--compile-cache", str(path))
    ]
    first, second = run(*arguments), run(*arguments)
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert "MiB written" in first.stderr
    assert "MiB read in" in second.stderr
    assert path.stat().st_size > 0
    path.write_bytes(b"damaged")
    refused("expected a file of save_compile_cache()", *arguments)
    words = "--compile-cache: expected a file in a folder that exists"
    refused(words, *arguments[:-1], str(tmp_path / "no" / "code.tpc"))


def test_profile_writes_a_trace_and_counts_kernels(folder: str, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    done = run(
        *("generate", "hello", "a longer prompt", "--model", folder, "--max-new-tokens", "5"),
        *("--json", "--profile", str(path)),
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    names = [
        event["name"]
        for event in json.loads(path.read_text())["traceEvents"]
        if event.get("cat") == "user_annotation"
    ]
    assert {
        "generation",
        "step",
        "prefill batch=2 tokens=20",
        "attention layer=1",
        "replay batch=2 padded=2",
        "module model.layers.0.mlp",
    } <= set(names)
    kernels = document["profile"]["kernels"]
    assert document["profile"]["trace"] == str(path)
    assert {"prefill", "decode"} <= set(kernels)
    decode = {row["module"]: row["kernels"] for row in kernels["decode"]["modules"]}
    assert kernels["decode"]["steps"] == names.count("replay batch=2 padded=2")
    assert [(k["name"], k["count"]) for k in decode["model.layers.1.self_attn.q_proj"]] == [
        ("aten::linear", kernels["decode"]["steps"])
    ]
    assert [row["layers"] for row in kernels["decode"]["layers"]] == ["model.layers.0-1"]


def test_profile_prints_a_table(folder: str, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    done = run("generate", "hello", "--model", folder, "--max-new-tokens", "3", "--profile", str(path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("hello"), done.stderr
    assert "lm_head" not in done.stdout, done.stderr
    assert f"trace: {path}" in done.stderr
    assert "model.layers.0-1" in done.stderr
    assert "lm_head" in done.stderr
    assert "Warning" not in done.stderr


def test_profile_is_written_when_generation_fails(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchpaged.engine.stepper import Stepper

    step = Stepper.step

    def failing(self: Stepper) -> Any:
        if self.stats.steps == 2:
            raise ValueError("midway")
        return step(self)

    monkeypatch.setattr(Stepper, "step", failing)
    path = tmp_path / "out.json"
    done = run("generate", "hello", "--model", folder, "--profile", str(path))
    assert done.returncode == 2
    assert "error: midway" in done.stderr
    assert "Traceback" not in done.stderr
    assert "prefill batch=1 tokens=5" in path.read_text()
    words, nowhere = "--profile: expected a file in a folder that exists", str(tmp_path / "no" / "out.json")
    refused(words, "generate", "hello", "--model", folder, "--profile", nowhere)


@pytest.mark.parametrize("command", [("generate", "hello"), ("backends",)], ids=lambda c: c[0])
@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("cuda", "--device: expected a device of this machine, got 'cuda'; "),
        ("cuda:3", "--device: expected a device of this machine, got 'cuda:3'; "),
        ("tpu", "--device: expected auto, cpu, cuda or cuda:1, got 'tpu'\n"),
        ("cuda:x", "--device: expected auto, cpu, cuda or cuda:1, got 'cuda:x'\n"),
        ("cuda:", "--device: expected auto, cpu, cuda or cuda:1, got 'cuda:'\n"),
        ("", "--device: expected auto, cpu, cuda or cuda:1, got ''\n"),
        ("meta", "--device: expected auto, cpu, cuda or cuda:1, got 'meta'\n"),
    ],
)
def test_a_device_that_is_not_there_is_one_line(
    command: tuple[str, ...], device: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = refused(words, *command, "--device", device).stderr
    assert said.startswith("error: ")
    assert said.count("\n") == 1


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "torch.bfloat16", "bf16"])
def test_dtypes_by_their_long_names(folder: str, name: str) -> None:
    arguments = (
        *("generate", "hello", "--model", folder, "--device", "cpu", "--max-new-tokens", "2"),
        *("--json", "--dtype", name),
    )
    dtype = {"bf16": "bfloat16"}.get(name, name.removeprefix("torch."))
    assert json.loads(run(*arguments).stdout)["dtype"] == dtype


def test_a_request_that_fails_is_said_and_the_others_go_on(folder: str, tmp_path: Path) -> None:
    """NaN in the embedding of one letter."""
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    model, tokenizer = LlamaForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        model.model.embed_tokens.weight[tokenizer("z")["input_ids"][0]] = float("nan")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    arguments = (
        *("generate", "aza", "bab", "--model", str(tmp_path), "--device", "cpu"),
        *("--max-new-tokens", "2", "--json"),
    )
    said = run(*arguments)
    assert said.returncode == 2
    bad, good = json.loads(said.stdout)["outputs"]
    assert bad["finish_reason"] == "error"
    assert "NaN" in bad["error"]
    assert good["finish_reason"] == "length"
    assert "error: prompt 1: its output token 0 could not be drawn" in said.stderr


def test_backends_asks_for_every_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a backend can declare away, an option asks for; without it nothing is asked."""
    import dataclasses

    from torchpaged.backends import Backend, get_backend, register_backend
    from torchpaged.backends.choose import names as names_module
    from torchpaged.backends.features import FEATURES
    from torchpaged.custom_ops import BACKEND_OPS

    same = "window", "alibi", "sinks", "chunked", "bidirectional", "lse", "deterministic", "block_sparse"
    same += "batch_invariant", "fp8_queries", "output_scale"
    options = {name: "--" + name.replace("_", "-") for name in same}
    options |= {"logits_soft_cap": "--soft-cap", "tree_mask": "--tree"}
    options |= {"different_head_dim_v": "--head-dim-v=64"}
    able = get_backend("reference").capabilities
    switches = {field.name for field in dataclasses.fields(able) if getattr(able, field.name) is True}
    assert {*options, "latent", "fp8_latents"} == switches | {*FEATURES}
    monkeypatch.setattr(names_module, "REGISTERED", {})
    nothing = dataclasses.replace(able, features=frozenset(), **dict.fromkeys(switches, False))
    register_backend(Backend("mine", nothing, BACKEND_OPS["reference"], lambda: None))

    def rejected(*given: str) -> list[str]:
        done = run("backends", "--dtype", "fp32", "--device", "cpu", "--json", *given)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["rejected"].get("mine", [])

    assert rejected() == []
    for option in options.values():
        assert len(rejected(option)) == 1, option
    assert len(rejected(*options.values())) == len(options)
    assert any("latent" in reason for reason in rejected("--latent"))
    latent = dataclasses.replace(nothing, features=frozenset({"latent"}))
    register_backend(Backend("mine", latent, BACKEND_OPS["reference"], lambda: None))
    assert not any("e4m3" in reason for reason in rejected("--latent"))
    assert any("e4m3" in reason for reason in rejected("--latent", "--kv-dtype", "fp8_e4m3"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--head-dim", "0"), "--head-dim"),
        (("--block-size", "-1"), "--block-size"),
        (("--num-heads", "7", "--num-kv-heads", "3"), "expected a divisor of --num-heads (7), got 3"),
    ],
)
def test_backends_refuses_an_attention_that_cannot_be(arguments: tuple[str, ...], words: str) -> None:
    refused(words, "backends", *arguments)


def write(name: str, text: str | bytes) -> Callable[[Path], None]:
    """Puts a file into a model's folder."""
    return lambda path: (
        path.joinpath(name).write_bytes(text.encode() if isinstance(text, str) else text) and None
    )


def drop(pattern: str) -> Callable[[Path], None]:
    """Takes files out of it."""
    return lambda path: [file.unlink() for file in path.glob(pattern)] and None


def config(**changes: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        held = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**held, **changes}))

    return change


def pickled(path: Path) -> None:
    """Weights that would run a command when they are read."""

    class Command:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {path}/ran",)

    (path / "model.safetensors").unlink()
    (path / "pytorch_model.bin").write_bytes(pickle.dumps(Command()))


def cut_weights(path: Path) -> None:
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:500])


def other_weights(path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, str(path / "model.safetensors"), metadata={"format": "pt"})


SIZES = {"hidden_size": 2**20, "intermediate_size": 2**22, "num_hidden_layers": 100}
TEMPLATE = "a chat template that transformers can read"
CONFIG, WEIGHTS = "a config.* that transformers can read", "a config and weights that transformers can read"
#: What is done to a good folder -> how the line goes on; templates are for a chat.
BAD_FOLDERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no tokenizer": (drop("tokenizer*"), "a folder without tokenizer.json; tokenizer.save_pretrained"),
    "empty": (drop("*"), "a HuggingFace folder, hub id or .gguf file, got .*without config.json"),
    "weights alone": (
        lambda path: [drop("*")(path), write("a.gguf", b"GGUF")(path)],
        "give the file: --model .*a.gguf",
    ),
    "no weights": (drop("*.safetensors"), WEIGHTS),
    "weights cut": (cut_weights, f"{WEIGHTS}.*SafetensorError"),
    "others' weights": (other_weights, "weights of every parameter.* lacks .* random numbers"),
    "pickled weights": (pickled, WEIGHTS),
    "config cut": (write("config.json", '{"model_type": "llama",'), CONFIG),
    "config list": (write("config.json", "[1, 2]"), CONFIG),
    "config of bytes": (write("config.json", b"\xff\xfe"), CONFIG),
    "config type": (config(model_type="nonesuch"), CONFIG),
    "config heads": (config(num_attention_heads=0), CONFIG),
    "config text": (config(hidden_size="32"), CONFIG),
    "config activation": (config(hidden_act="nope"), CONFIG),
    "encoder-decoder": (write("config.json", '{"model_type": "t5"}'), "t5, an encoder-decoder; run it by"),
    "a vision model": (write("config.json", '{"model_type": "vit"}'), "a causal language model, got .*vit"),
    "sizes": (config(**SIZES), "one that fits into the .* M parameters, .* GiB in fp32"),
    "tokenizer cut": (write("tokenizer.json", '{"version": '), "a tokenizer that transformers can read"),
    "tokenizer list": (write("tokenizer.json", "[]"), "a tokenizer that transformers can read"),
    "end as text": (write("generation_config.json", '{"eos_token_id": "x"}'), "eos_token_id: expected token"),
    "end too large": (
        write("generation_config.json", f'{{"eos_token_id": {2**70}}}'),
        "eos_token_id: expected",
    ),
    "template raises": (write("chat_template.jinja", "{{ raise_exception('no') }}"), TEMPLATE),
    "template spies": (write("chat_template.jinja", "{{ ''.__class__.x }}"), TEMPLATE),
    "template empty": (write("chat_template.jinja", "{# #}"), "a template that make tokens"),
    "template divides": (write("chat_template.jinja", "{{ 1 / 0 }}"), TEMPLATE),
    "template cut": (write("chat_template.jinja", "{% for %}"), TEMPLATE),
}


@pytest.mark.parametrize("what", BAD_FOLDERS)
def test_a_bad_folder_is_one_line(what: str, folder: str, tmp_path: Path) -> None:
    change, words = BAD_FOLDERS[what]
    model = Path(shutil.copytree(folder, tmp_path / "model"))
    change(model)
    options = ("--chat",) if what.startswith("template") else ()
    done = refused("error: ", "generate", "hello", "--model", str(model), "--device", "cpu", *options)
    errors = [line for line in done.stderr.splitlines() if line and not line.startswith("model: ")]
    assert len(errors) == 1, done.stderr
    assert re.search(f"^error: .*{words}", errors[0]), errors
    assert not (model / "ran").exists()


def test_an_adapter_over_a_model(folder: str, tmp_path: Path) -> None:
    """Its folder holds no config: the one of its base counts."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    from transformers import AutoModelForCausalLM

    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config)
    adapted.save_pretrained(tmp_path / "adapter")
    for file in Path(folder).glob("tokenizer*"):
        shutil.copy(file, tmp_path / "adapter")
    done = run("generate", "hello", "--model", str(tmp_path / "adapter"), "--max-new-tokens", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("hello"), done.stderr


@pytest.mark.parametrize("name", ["nope/nope", "n" * 5000], ids=["nope", "long"])
def test_a_name_that_is_no_folder(name: str) -> None:
    """It is looked for on the hub, whose errors do not say that nothing lies here."""
    from torchpaged.cli.model import reading

    words = f"got '{name}', no file or folder here: OSError: no network"
    with pytest.raises(ValueError, match=words), reading(name, "a config"):
        raise OSError("no network")


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    for name, words in (("model.gguf", "a config that transformers can read"), ("model.bin", "another file")):
        (tmp_path / name).write_bytes(b"GGUF")
        done = refused(words, "generate", "hello", "--model", str(tmp_path / name))
        assert len(done.stderr.splitlines()) == 1, done.stderr


def test_a_backend_is_looked_up_before_the_model() -> None:
    command = ("generate", "hello", "--model", "./no/such/folder")
    refused("backend: expected one of auto, cuda", *command, "--backend", "nope")
    refused("backend: expected one of auto, cuda", *command, TORCHPAGED_BACKEND="nope")
    words = "backend 'cuda' (backend='cuda' was given) cannot run this: "
    done = refused(words, *command, "--device", "cpu", "--backend", "cuda")
    assert "device cpu is not one of cuda" in done.stderr


def test_version_and_help() -> None:
    from torchpaged import __version__

    assert run("--version").stdout == f"torchpaged {__version__}\n"
    for arguments in (("-h",), ("generate", "-h"), ("backends", "-h")):
        assert re.match(r"Usage: .* \[OPTIONS\](.|\n)*\n  -h, --help ", run(*arguments).stdout), arguments


@pytest.mark.parametrize("command", [("-h",), ("generate", "-h"), ("backends",), ("env",)], ids=" ".join)
def test_nothing_is_cut_on_a_narrow_screen(command: tuple[str, ...]) -> None:
    """But for the list of commands, which has 80 columns at least."""
    done = run(*command, COLUMNS="80" if command == ("-h",) else "60")
    assert done.returncode == 0
    assert not re.search(r"…|\w\.\.\.(?! <)", done.stdout), done.stdout


@pytest.mark.parametrize("columns", [80, 110])
@pytest.mark.parametrize("command", [("env",), ("backends",), ("generate",)], ids=" ".join)
def test_reports_fit_a_terminal_and_are_whole_in_a_pipe(
    command: tuple[str, ...], columns: int, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal the same words, none of them cut."""
    if command == ("generate",):
        command = ("generate", "hello", "--model", folder, "--max-new-tokens", "2", "--verbose")
    piped = run(*command, COLUMNS=str(columns))
    monkeypatch.setattr(Captured, "terminal", True)
    shown = run(*command, COLUMNS=str(columns), NO_COLOR="1", TERM="dumb")
    for line in (shown.stdout + shown.stderr).splitlines():
        assert len(line) <= columns or " " not in line.strip(), line
    if command[0] != "generate":  # whose seconds differ
        assert shown.stdout.split() == piped.stdout.split()
    assert max(map(len, (piped.stdout + piped.stderr).splitlines())) > 110 or command == ("env",)


def test_the_engine_is_closed_at_the_end(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However it ends: what traces a GPU loses records where graphs outlive the program."""
    import torchpaged.cli.generate as command
    from torchpaged.engine import Generator

    made: list[Generator] = []

    def kept(*arguments: Any, **options: Any) -> Generator:
        made.append(Generator(*arguments, **options))
        return made[-1]

    def fails(*_: Any) -> None:
        raise ValueError("no summary")

    monkeypatch.setattr(command, "Generator", kept)
    arguments = ("generate", "hello", "--model", folder, "--max-new-tokens", "2")
    assert run(*arguments).returncode == 0
    monkeypatch.setattr(command, "summary", fails)
    assert run(*arguments).returncode == 2
    assert [repr(generator) for generator in made] == ["Generator(closed)"] * 2


def test_an_argument_of_several_values_has_no_default() -> None:
    """click 8.1, which typer 0.15 brings, refuses one."""
    import inspect

    from torchpaged.cli.commands import command_of
    from torchpaged.cli.settings import Settings

    command = command_of(Settings, lambda settings: given.append(settings))
    parameters, given = inspect.signature(command).parameters, list[Settings]()
    assert parameters["prompts"].default is None
    command(prompts=None, model="a folder")
    assert given == [Settings(model="a folder")]


def test_bad_options_are_refused_before_a_model_is_fetched(tmp_path: Path) -> None:
    """With no --model the demo's would come over the network, 89 MiB, or be converted for 10 s."""
    for options, words in (
        (("--max-new-tokens", "0"), "max_new_tokens: expected"),
        (("--model", ""), "Invalid value for '--model': expected text, got none"),
        (("--output", ""), "Invalid value for '--output': expected text, got none"),
        (("--block-size", "0"), "Invalid value for '--block-size'"),
        (("--num-blocks", "-1"), "Invalid value for '--num-blocks'"),
        (("--max-seq-len", "-1"), "Invalid value for '--max-seq-len'"),
        (("--steps-per-launch", "0"), "Invalid value for '--steps-per-launch'"),
        (("-", "more"), "PROMPTS: expected - alone, for the lines of stdin, got it among 3"),
        (("--profile", str(tmp_path / "no" / "trace.json")), "--profile: "),
    ):
        done = refused(words, "generate", "hello", "--offline", *options, TORCHPAGED_CACHE=str(tmp_path))
        assert sum(not line.startswith(("Usage: ", "Try ")) for line in done.stderr.splitlines() if line) == 1
    assert not list(tmp_path.iterdir())


def test_backends_that_was_asked_for_one_by_name() -> None:
    for options in (("--backend", "nope"), ("--backend", "cpu", "--dtype", "fp8_e4m3")):
        assert run("backends", *options).returncode == run("backends", *options, "--json").returncode == 2
    assert run("backends", TORCHPAGED_BACKEND="nope").returncode == 2
    assert run("backends", "--backend", "cpu", "--dtype", "fp32").returncode == 0


def conversation(monkeypatch: pytest.MonkeyPatch, turns: Iterable[str], *arguments: str) -> Done:
    """The command, with the turns on stdin."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{turn}\n" for turn in turns)))
    return run("generate", "--chat", "--max-new-tokens", "4", *arguments)


@pytest.fixture
def talker(folder: str, tmp_path: Path) -> str:
    """That model with a template."""
    model = Path(shutil.copytree(folder, tmp_path / "model"))
    write("chat_template.jinja", "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}")(model)
    return str(model)


def test_a_chat_begins_the_answer_on_a_line_of_its_own(talker: str) -> None:
    options = ("--model", talker, "--max-new-tokens", "4")
    plain, chat = run("generate", "uhello", *options), run("generate", "hello", "--chat", *options)
    answer = plain.stdout.splitlines()[0].removeprefix("uhello")
    assert chat.stdout.splitlines()[:2] == ["hello", answer], chat.stdout


def test_the_systems_message_stands_ahead_of_the_prompt(talker: str) -> None:
    arguments = ("--model", talker, "--max-new-tokens", "4", "--json")
    plain = run("generate", "sbyeuhello", *arguments)
    chat = ("generate", "hello", "--chat", "--system", "bye", *arguments)
    one, other = (json.loads(done.stdout)["outputs"][0]["token_ids"] for done in (plain, run(*chat)))
    assert one == other
    of_users = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    write("chat_template.jinja", of_users)(Path(talker))
    done = run(*chat)
    assert done.returncode == 2
    assert "--system: expected a chat template that has a place for it" in done.stderr


def test_a_conversation_without_prompts(talker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = "hello", "", "bye"
    done = conversation(monkeypatch, turns, "--model", talker, "--system", "be")
    assert done.returncode == 0, done.stderr
    first, second, *_ = done.stdout.splitlines()
    known = "sbeuhello"
    for answer, said in ((first, ""), (second, f"a{first}ubye")):
        known += said
        alone = run("generate", known, "--model", talker, "--max-new-tokens", "4", "--json")
        assert json.loads(alone.stdout)["outputs"][0]["text"] == answer
    assert "8 new tokens" in done.stdout, done.stdout


def test_turns_that_are_typed(talker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal each behind a prompt, until Ctrl-D."""
    typed = iter(["hello", "", "bye"])

    def line(prompt: str) -> str:
        assert prompt == "> "
        if (said := next(typed, None)) is None:
            raise EOFError
        return said

    keys = Captured()
    keys.terminal = True
    monkeypatch.setattr("builtins.input", line)
    monkeypatch.setattr(sys, "stdin", keys)
    done = run("generate", "--chat", "--max-new-tokens", "4", "--model", talker)
    assert done.returncode == 0, done.stderr
    piped = conversation(monkeypatch, ["hello", "bye"], "--model", talker)
    assert done.stdout.splitlines()[:2] == piped.stdout.splitlines()[:2]


def test_a_turn_that_is_refused_is_left_out(talker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done = conversation(monkeypatch, ["hello", "x" * 99, "bye"], "--model", talker)
    assert done.returncode == 2
    assert "error: turn 2: " in done.stderr
    whole = conversation(monkeypatch, ["hello", "bye"], "--model", talker)
    assert done.stdout.splitlines()[:2] == whole.stdout.splitlines()[:2]


def test_ctrl_c_ends_an_answer_and_not_the_conversation(talker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, sent = Generator.stream, []

    def interrupted(self: Generator, requests: Any = None) -> Iterator[Any]:
        for event in stream(self, requests):
            yield event
            if not sent:
                sent.append(event.text)
                raise KeyboardInterrupt

    monkeypatch.setattr(Generator, "stream", interrupted)
    done = conversation(monkeypatch, ["hello", "bye"], "--model", talker)
    assert done.returncode == 0, done.stderr
    first, second, *_ = done.stdout.splitlines()
    assert first == sent[0]
    alone = run("generate", f"uhelloa{first}ubye", "--model", talker, "--max-new-tokens", "4", "--json")
    assert json.loads(alone.stdout)["outputs"][0]["text"] == second


def test_ctrl_c_says_that_it_was_seen(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a line of its own: the text may have come as far as the middle of one."""

    def interrupted(*_: Any) -> None:
        print("hel", end="")
        raise KeyboardInterrupt

    monkeypatch.setattr("torchpaged.cli.generate._stream", interrupted)
    done = run("generate", "hello", "--model", folder)
    assert (done.returncode, done.stdout) == (130, "hel")
    assert done.stderr.endswith("\ninterrupted\n")


def test_a_conversation_that_can_not_be(folder: str, talker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, turns, words in (
        (("--model", folder), ["hello"], "chat template"),
        (("--model", talker, "--json"), ["hello"], "prompts"),
        (("-", "--model", talker), [], "expected text"),
    ):
        done = conversation(monkeypatch, turns, *arguments)
        assert done.returncode == 2
        assert words in done.stderr


def test_a_prompt_that_is_no_utf8_leaves_the_others(folder: str) -> None:
    arguments = ("generate", "hello", os.fsdecode(b"\xff\xfe"), "bye", "--model", folder)
    done = run(*arguments, "--max-new-tokens", "3", "--json")
    assert done.returncode == 2
    assert "error: prompt 2: prompt: expected text in UTF-8" in done.stderr
    assert ["error" in output for output in json.loads(done.stdout)["outputs"]] == [False, True, False]


@pytest.mark.parametrize("command", ["generate", "env", "backends"])
def test_variables_are_read_before_anything_else(command: str, folder: str) -> None:
    arguments = ("generate", "hello", "--model", folder) if command == "generate" else (command,)
    for name, text, expected in (
        ("TORCHPAGED_DEBUG", "2", "0 or 1"),
        ("TORCHPAGED_NATIVE", "off", "0 or 1"),
        ("TORCHPAGED_CHECK", "", "0 or 1"),
        ("TORCHPAGED_CACHE", "~nouser/x", "a folder"),
    ):
        done = refused(f"error: {name}: expected {expected}, got {text!r}", *arguments, **{name: text})
        assert done.stderr.startswith("error: ")


def test_a_process_that_begins_with_a_bad_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not an import's traceback."""
    monkeypatch.setenv("TORCHPAGED_NATIVE", "off")
    done = run_process("env")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: TORCHPAGED_NATIVE: expected 0 or 1, got 'off'\n"


def test_an_interrupt_before_anything_is_imported(tmp_path: Path) -> None:
    """No traceback out of torch's imports; what can be caught is one line (`main`)."""
    begun = subprocess.Popen(
        [sys.executable, "-v", "-m", "torchpaged", "env"],  # -v: says on stderr what it imports
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert begun.stderr is not None
    for line in begun.stderr:
        if line.startswith("import 'torch._C"):
            break
    begun.send_signal(signal.SIGINT)
    out, errors = begun.communicate(timeout=60)
    assert begun.returncode == -signal.SIGINT
    assert out == ""
    assert "Traceback" not in errors
