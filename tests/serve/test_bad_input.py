"""Bad input at the level of the command: one row for each thing that operators and clients get wrong.

Rows of the table go through ``hotstart check``, which runs what ``hotstart serve`` runs first; a few
go through ``serve`` to show that it ends at once and leaves nothing behind.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny_models
from checkpoint_files import (
    STUB,
    file_of,
    read_index,
    shard_name,
    weights,
    write_index,
    write_model,
    write_shard,
)
from engine_faults import SLOW_CHECKS, frontend_fault
from hotstart.cli.main import main
from running_server import RunningServer, run_to_end

Damage = Callable[[Path], object]
FIRST, SECOND = shard_name(1, 2), shard_name(2, 2)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_model(tmp_path_factory.mktemp("whole") / "model", vocab_size=tiny_models.VOCAB)
    tiny_models.write_tokenizer(directory)
    return directory


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "model")


def config(**changes: Any) -> Damage:
    def damage(model: Path) -> None:
        path = model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return damage


def cut(name: str, *, to: int = 0, by: int = 0) -> Damage:
    return lambda model: os.truncate(model / name, to or (model / name).stat().st_size - by if by else to)


def written(name: str, content: bytes) -> Damage:
    return lambda model: (model / name).write_bytes(content)


def removed(*names: str) -> Damage:
    return lambda model: [(model / name).unlink() for name in names]


def emptied(model: Path) -> None:
    shutil.rmtree(model)
    model.mkdir()


def mistyped(model: Path) -> None:
    model.rename(model.with_name("modell"))


def index_outside(model: Path) -> None:
    write_index(model, dict.fromkeys(read_index(model), "../../etc/passwd"))


def older_index(model: Path) -> None:
    for number in (1, 2):
        (model / shard_name(number, 2)).rename(model / f"new-{number:05}-of-00002.safetensors")


def twice_the_same_tensors(model: Path) -> None:
    removed("model.safetensors.index.json")(model)
    shutil.copy(model / FIRST, model / SECOND)


def directory_as_shard(model: Path) -> None:
    (model / FIRST).unlink()
    (model / FIRST).mkdir()


def only_pickles(model: Path) -> None:
    for path in model.glob("model*"):
        path.unlink()
    written("pytorch_model.bin", b"\x80\x02")(model)


def without_head(model: Path) -> None:
    names = [name for name in read_index(model) if name != "lm_head.weight"]
    for path in model.glob("model*"):
        path.unlink()
    tensors = weights(json.loads((model / "config.json").read_text()))
    write_shard(model / "model.safetensors", {name: tensors[name] for name in names})


def tensor(**entry: Any) -> Damage:
    """A first shard that holds one tensor, with this entry in its header."""
    whole = {"dtype": "BF16", "shape": [2, 4], "data_offsets": [0, 16]}
    return written(FIRST, file_of({"model.norm.weight": whole | entry}, bytes(16)))


def template_broken(model: Path) -> None:
    written("chat_template.jinja", b"{% for message in %}")(model)


def more_tokens_than_embeddings(model: Path) -> None:
    for path in model.glob("model*"):
        path.unlink()
    write_model(model, vocab_size=300)


ENTRY = '"a":{"dtype":"BF16","shape":[8],"data_offsets":[0,16]}'

Row = tuple[Damage, int, list[str]]
ROWS: dict[str, Row] = {
    "a path with a typo": (mistyped, 3, ["model does not exist", "there is no 'model' in", "Did you mean"]),
    "an empty directory": (emptied, 3, ["is empty", "If a volume should be mounted there"]),
    "weights without config": (removed("config.json"), 3, ["holds weights but no config.json"]),
    "config that is no JSON": (written("config.json", b"{,"), 3, ["config.json", "line 1, column 2"]),
    "config in another encoding": (written("config.json", b'{"a": "\xff"}'), 3, ["is not UTF-8"]),
    "config too deep": (written("config.json", b"[" * 200_000), 3, ["nests too deeply"]),
    "a shard cut by a byte": (cut(SECOND, by=1), 3, [SECOND, "1 too few", "copy the file again"]),
    "a shard cut in its header": (cut(FIRST, to=60), 3, [FIRST, "has 60 bytes and ends inside its header"]),
    "a shard cut to 7 bytes": (cut(FIRST, to=7), 3, [FIRST, "has 7 bytes"]),
    "a shard cut to nothing": (cut(FIRST), 3, [FIRST, "is empty (0 bytes)"]),
    "a shard that is a stub": (written(FIRST, STUB), 3, [FIRST, "pointer stub", "4.98 GB", "git lfs pull"]),
    "a tokenizer that is a stub": (written("tokenizer.json", STUB), 3, ["tokenizer.json", "pointer stub"]),
    "an absent shard": (removed(SECOND), 3, ["names 1 absent file", SECOND, "of 21 expected tensors"]),
    "an index that leaves the directory": (index_outside, 3, ["outside the model's directory"]),
    "an index older than complete files": (older_index, 3, ["21 of 21 expected", "--ignore-index"]),
    "a tensor in two files": (twice_the_same_tensors, 3, ["stored in more than one file", FIRST, SECOND]),
    "a head where it is tied": (config(tie_word_embeddings=True), 3, ["lm_head.weight", "differs from"]),
    "no head where it is not tied": (without_head, 3, ["has no lm_head.weight", "tie_word_embeddings"]),
    "missing tensors": (config(num_hidden_layers=3), 3, ["9 tensors missing", "model.layers.2."]),
    "unknown tensors": (config(num_hidden_layers=1), 3, ["9 tensors that the model has no place for"]),
    "wrong shapes": (config(intermediate_size=32), 3, ["of another shape", "[24, 16]", "[32, 16]"]),
    "an unsupported architecture": (
        config(architectures=["MambaForCausalLM"]),
        3,
        ["MambaForCausalLM is not supported", "LlamaForCausal"],
    ),
    "an unsupported layer type": (
        config(layer_types=["linear_attention", "full_attention"]),
        3,
        ["'linear_attention'", "full_attention"],
    ),
    "a quantised checkpoint": (config(quantization_config={"quant_method": "gptq"}), 3, ["quantised (gptq)"]),
    "a header of 2^63 bytes": (
        written(FIRST, (1 << 63).to_bytes(8, "little") * 9),
        3,
        ["9223372036854775808"],
    ),
    "overlapping tensors": (
        written(
            FIRST,
            file_of(
                {
                    "a": {"dtype": "BF16", "shape": [8], "data_offsets": [0, 16]},
                    "b": {"dtype": "BF16", "shape": [8], "data_offsets": [8, 24]},
                },
                bytes(24),
            ),
        ),
        3,
        [FIRST, "overlap"],
    ),
    "offsets out of range": (tensor(data_offsets=[0, 1 << 40]), 3, [FIRST, "model.norm.weight"]),
    "a size that is not the dtype's": (tensor(dtype="F32"), 3, [FIRST, "model.norm.weight"]),
    "duplicate keys": (written(FIRST, file_of(f"{{{ENTRY},{ENTRY}}}", bytes(16))), 3, [FIRST, "'a' twice"]),
    "a header that is not UTF-8": (written(FIRST, file_of(b'{"\xff":{}}')), 3, [FIRST, "UTF-8"]),
    "a directory as shard": (directory_as_shard, 3, [FIRST, "is a directory"]),
    "pickled weights": (only_pickles, 3, ["pickled weights only", "save_pretrained"]),
    "a broken template": (template_broken, 3, ["chat_template.jinja is broken at line 1", "--chat-template"]),
    "no tokenizer": (
        removed("tokenizer.json"),
        3,
        ["There is no tokenizer in", "vocab.json with merges.txt"],
    ),
    "half a tokenizer": (cut("tokenizer.json", to=3000), 3, ["tokenizer.json cannot be used", "line"]),
    "more tokens than embeddings": (more_tokens_than_embeddings, 3, ["has 512 tokens", "embedding 300"]),
    "an end token that is no id": (
        config(eos_token_id=["</s>"]),
        3,
        ["config.json sets eos_token_id to ['</s>']"],
    ),
    "a default that is no number": (
        written("generation_config.json", b'{"temperature": "hot"}'),
        3,
        ["temperature to 'hot'", "from 0 to 100"],
    ),
}


@pytest.mark.parametrize("what", ROWS)
def test_check_names_what_was_found_and_where(
    what: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, code, texts = ROWS[what]
    damage(model)
    assert main(["check", str(model), "--port", "0"]) == code
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "it would not start" in captured.out
    for text in texts:
        assert text in captured.out


FLAGS: dict[str, tuple[list[str], int, list[str]]] = {
    "a context beyond the model's": (
        ["--max-model-len", "4096"],
        2,
        ["context of 128 tokens", "--hf-overrides"],
    ),
    "more KV cache than memory": (["--kv-cache-memory", "900TB"], 5, ["is more than is free", "weights"]),
    "no room for one request": (
        ["--gpu-memory-utilization", "0.001"],
        5,
        ["one request of the model's whole context needs", "x 0.001", "raise --gpu-memory-utilization to 0."],
    ),
    "no room for any context": (
        ["--gpu-memory-utilization", "0.001", "--max-model-len", "auto"],
        5,
        ["--gpu-memory-utilization to 0."],
    ),
    "a template of the flag that is broken": (
        ["--chat-template", "{% for %}"],
        2,
        ["--chat-template is broken"],
    ),
    "a host that does not resolve": (["--host", "host.invalid"], 2, ["host.invalid does not resolve"]),
    "a socket's path too long": (["--uds", "/tmp/" + "s" * 103], 2, ["is 108 bytes long", "at most 107"]),
    "a socket in a missing directory": (["--uds", "/nowhere/s.sock"], 2, ["--uds /nowhere/s.sock", "bound"]),
    "a mount that is absent": (["--expect-mount", "/nowhere"], 4, ["--expect-mount /nowhere"]),
    "defaults of a directory without any": (
        ["--generation-config", "/nowhere"],
        3,
        ["--generation-config /nowhere", "generation_config.json does not exist"],
    ),
    "a default of the flag out of range": (
        ["--override-generation-config", '{"top_p": 7}'],
        2,
        ["--override-generation-config sets top_p to 7"],
    ),
}


@pytest.mark.parametrize("what", FLAGS)
def test_check_names_the_flag_that_cannot_work(
    what: str, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, code, texts = FLAGS[what]
    port = [] if "--uds" in flags else ["--port", "0"]
    assert main(["check", str(whole), "--device", "cpu", *port, *flags]) == code
    out = capsys.readouterr().out
    for text in texts:
        assert text in out


def test_consolidated_copies_are_left_alone_and_said(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(model / FIRST, model / "consolidated.safetensors")
    main(["check", str(model), "--port", "0"])
    assert "not read: consolidated.safetensors" in capsys.readouterr().out


def test_an_end_token_that_can_never_come_is_a_warning(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config(eos_token_id=[0, 99_999])(model)
    assert main(["check", str(model), "--port", "0"]) == 0
    assert "eos_token_id 99999 in config.json is beyond the vocabulary of 512" in capsys.readouterr().out


def test_a_padding_token_without_an_embedding_is_a_warning(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads((model / "tokenizer_config.json").read_text())
    content["pad_token"] = "<padding>"
    (model / "tokenizer_config.json").write_text(json.dumps(content))
    assert main(["check", str(model), "--port", "0"]) == 0
    out = capsys.readouterr().out
    assert "1 added tokens (<padding>) lie beyond the model's vocabulary of 512" in out


def test_serve_reports_every_problem_at_once_and_reads_no_weights(model: Path) -> None:
    cut(FIRST, by=1)(model)
    template_broken(model)
    removed("tokenizer.json")(model)
    code, output = run_to_end(model)
    assert code == 3
    assert output.count("hotstart: model error: ") == 3
    assert "read weights" not in output
    assert "Traceback" not in output


def test_the_lowest_code_of_several_problems_is_the_exit_code(model: Path) -> None:
    cut(FIRST, by=1)(model)
    code, output = run_to_end(model, "--chat-template", "{% for %}", "--expect-mount", "/nowhere")
    assert code == 2
    for kind in ("configuration error", "model error", "storage error"):
        assert f"hotstart: {kind}: " in output


def test_serve_says_before_any_weight_is_read_that_chat_is_off(server: RunningServer) -> None:
    before = server.output[: server.output.index("read weights")]
    assert "This model has no chat template: none was found in chat_template.jinja and" in before


@pytest.fixture(scope="module")
def server(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A model of 512 tokens and a context of 128, without a chat template."""
    folder = tmp_path_factory.mktemp("server")
    model = shutil.copytree(whole, folder / "model")
    content = json.loads((model / "tokenizer_config.json").read_text())
    content.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(content))
    flags = ("--max-logprobs", "-1", "--max-body-bytes", "1MB")
    with RunningServer(model, *flags, log=folder / "log") as running:
        yield running.until_ready()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a token beyond the vocabulary": (
        {"prompt": [512]},
        "The prompt has token 512, but the vocabulary has 512",
    ),
    "a negative token": ({"prompt": [-1]}, "prompt[0]: expected `int` >= 0"),
    "an empty prompt": ({"prompt": ""}, "The prompt is empty"),
    "a prompt of the wrong type": ({"prompt": {"a": 1}}, "prompt"),
    "a prompt beyond the context": ({"prompt": "word " * 400}, "maximum context length is 128 tokens"),
    "a huge prompt": ({"prompt": "x" * 900_000}, "maximum context length is 128 tokens"),
    "an answer beyond the context": ({"max_tokens": 10**6}, "you requested 100000"),
    "a negative number of tokens": ({"max_tokens": -1}, "max_tokens: expected `int` >= 0"),
    "a negative temperature": ({"temperature": -0.1}, "temperature: expected"),
    "a number as a word": ({"top_p": "high"}, "top_p: expected"),
    "10 000 stop strings": ({"stop": ["a"] * 10_000}, "stop: expected `array` of length <= 64"),
    "an empty stop string": ({"stop": [""]}, "stop"),
    "more log probabilities than tokens": (
        {"logprobs": 10**5},
        "logprobs 100000 is more than the 512 tokens",
    ),
    "a bias on no token": ({"logit_bias": {"512": 1}}, "logit_bias names token 512"),
    "2 049 prompts": ({"prompt": ["a"] * 2049}, "at most 2048 prompts"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_request_is_refused_with_its_reason(what: str, server: RunningServer) -> None:
    fields, text = REFUSED[what]
    response = server.http.post("/v1/completions", json={"model": "tiny", "prompt": "Hello", **fields})
    assert response.status_code == 400
    assert text in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"min_tokens": 3, "stop_token_ids": [10**6]},
        {"seed": 2**63 - 1, "n": 3},
        {"seed": -(2**63), "temperature": 1e-4},
        {"temperature": 100, "top_k": 2**31 - 1, "min_p": 1.0},
        {"repetition_penalty": 1e-300, "top_p": 1e-320},
        {"logprobs": 512, "prompt_logprobs": 512},
        {"prompt": [511] * 120, "logit_bias": {"511": 100, "0": -100}},
        {"prompt": "\x00\ufffd\U0001f600", "stop": ["\ufffd"] * 64},
    ],
)
def test_values_at_the_edge_are_answered(fields: dict[str, Any], server: RunningServer) -> None:
    """Each reaches an index, a logarithm or a division in the engine, which no request may end."""
    assert (
        server.complete(**{"max_tokens": 4, "temperature": 1.0, **fields})["usage"]["completion_tokens"] >= 4
    )


def test_bodies_that_are_no_request(server: RunningServer) -> None:
    for body, status in [(b"{", 400), (b"[1]", 400), (b"", 400), (b"\xff\xfe", 400), (b" " * 1_100_000, 413)]:
        response = server.http.post(
            "/v1/completions", content=body, headers={"content-type": "application/json"}
        )
        assert response.status_code == status, (body[:10], response.text)
        assert response.json()["error"]["message"]


def test_an_unknown_model_is_named_beside_the_served_one(server: RunningServer) -> None:
    response = server.http.post("/v1/completions", json={"model": "other", "prompt": "Hello"})
    assert response.status_code == 404
    assert "`other` does not exist; served here: tiny" in response.json()["error"]["message"]


def test_without_a_template_completions_work_and_chat_says_what_to_do(server: RunningServer) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
    response = server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert "--chat-template FILE, or use /v1/completions" in response.json()["error"]["message"]
    assert server.complete()["usage"]["completion_tokens"] == 8


def test_slow_checks_report_all_problems_although_the_engine_met_one_of_them_first(
    model: Path, tmp_path: Path
) -> None:
    config(num_hidden_layers=1)(model)
    written("chat_template.jinja", b"{% for %}")(model)

    status, output = run_to_end(model, env=frontend_fault(tmp_path, SLOW_CHECKS))

    assert status == 3
    assert "that the model has no place for" in output
    assert "chat_template.jinja is broken" in output
