"""The prompts of ``bench serve``, by the flags that are typed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tiny_models
from hotstart.bench.serving.datasets import groups, samples
from hotstart.bench.serving.datasets_tokenizer import DirectoryTokenizer, read_tokenizer
from hotstart.bench.serving.requests import SampleRequest
from hotstart.config.command import Command
from hotstart.errors import ConfigError, HotstartError

LONG, SHORT = "You may obtain a copy of the License at any time.", "Yes."
PREFIXES = ("--dataset-name", "prefix_repetition", "--prefix-repetition-num-prefixes", "3")

Sample = Callable[..., list[SampleRequest]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer and a template, and nothing else."""
    path = tmp_path_factory.mktemp("tokenizer")
    tiny_models.write_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> DirectoryTokenizer:
    return read_tokenizer(str(directory))


@pytest.fixture
def sample(tokenizer: DirectoryTokenizer) -> Sample:
    """The requests of a command line."""

    def make(*flags: str, seed: int = 1, **further: Any) -> list[SampleRequest]:
        values = Command("bench serve", "", groups()).parse(list(flags)).values
        return samples({**values, "seed": seed, **further}, tokenizer)

    return make


def sharegpt(path: Path, *conversations: tuple[str, ...]) -> str:
    entries = [{"conversations": [{"value": turn} for turn in turns]} for turns in conversations]
    path.write_text(json.dumps(entries))
    return str(path)


def lines(path: Path, *entries: dict[str, Any]) -> str:
    path.write_text("\n".join(json.dumps(entry) for entry in entries) + "\n")
    return str(path)


def test_random_prompts_have_as_many_tokens_as_text_as_were_asked_for(
    sample: Sample, tokenizer: DirectoryTokenizer
) -> None:
    flags = ("--num-prompts", "20", "--random-input-len", "40", "--random-output-len", "9")
    found = sample(*flags, "--random-prefix-len", "10")
    assert {(request.prompt_len, request.expected_output_len) for request in found} == {(50, 9)}
    assert {len(tokenizer.encode(str(request.prompt))) for request in found} == {50}
    assert len({str(request.prompt)[:12] for request in found}) == 1
    assert len({request.prompt for request in found}) == 20


def test_special_tokens_that_a_server_adds_are_part_of_the_length(directory: Path, tmp_path: Path) -> None:
    content = json.loads((directory / "tokenizer.json").read_text())
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    framed = read_tokenizer(str(tmp_path))
    values = Command("bench serve", "", groups()).parse(["--random-input-len", "30", "--num-prompts", "5"])
    found = samples({**values.values, "seed": 1}, framed)
    assert {request.prompt_len for request in found} == {30}
    assert {len(framed.encode(str(request.prompt))) for request in found} == {30}


def test_range_ratio_spreads_lengths_evenly_around_what_is_asked(sample: Sample) -> None:
    lengths = ("--random-input-len", "10", "--random-output-len", "10", "--num-prompts", "300")
    both = sample(*lengths, "--random-range-ratio", "0.2")
    assert {request.prompt_len for request in both} == {8, 9, 10, 11, 12}
    assert {request.expected_output_len for request in both} == {8, 9, 10, 11, 12}
    each = sample(*lengths, "--random-range-ratio", '{"input": 0, "output": 0.1}')
    assert {request.prompt_len for request in each} == {10}
    assert {request.expected_output_len for request in each} == {9, 10, 11}


def test_same_seed_gives_the_same_prompts_and_another_seed_gives_none_of_them(sample: Sample) -> None:
    flags = ("--num-prompts", "5", "--random-input-len", "30")
    assert sample(*flags) == sample(*flags)
    assert not {r.prompt for r in sample(*flags)} & {r.prompt for r in sample(*flags, seed=2)}


def test_prompts_are_divided_evenly_among_repeated_prefixes(
    sample: Sample, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = ("--prefix-repetition-prefix-len", "30", "--prefix-repetition-suffix-len", "8")
    found = sample(*PREFIXES, *lengths, "--num-prompts", "8", "--prefix-repetition-output-len", "4")
    assert {(request.prompt_len, request.expected_output_len) for request in found} == {(38, 4)}
    begins = [str(request.prompt)[:20] for request in found]
    assert sorted(begins.count(begin) for begin in set(begins)) == [2, 2, 2]
    assert "2 prompts for each of 3 prefixes: 6 of 8" in capsys.readouterr().err


def test_conversations_are_filtered_by_turns_and_lengths_and_taken_again(
    sample: Sample, tmp_path: Path, tokenizer: DirectoryTokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    path = sharegpt(
        tmp_path / "chats.json", (LONG, LONG + SHORT), ("", LONG), (LONG,), (LONG * 400, LONG), (LONG, "")
    )
    flags = ("--dataset-name", "sharegpt", "--dataset-path", path, "--num-prompts", "3")
    [first, *others] = sample(*flags)
    assert (first.prompt, first.prompt_len) == (LONG, len(tokenizer.encode(LONG)))
    assert first.expected_output_len == len(tokenizer.encode(LONG + SHORT))
    assert [request.prompt for request in others] == [LONG, LONG]
    assert "1 conversation of a fitting length, taken again to make 3" in capsys.readouterr().err
    assert len(sample(*flags, "--no-oversample")) == 1
    assert {r.expected_output_len for r in sample(*flags, "--sharegpt-output-len", "2")} == {2}


def test_sharegpt_without_a_path_is_the_usual_file_of_the_working_directory(
    sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ("--dataset-name", "sharegpt", "--num-prompts", "1")
    with pytest.raises(ConfigError, match=r"no ShareGPT_V3_\S+ in .*`wget https://\S+split\.json`"):
        sample(*flags)
    sharegpt(tmp_path / "ShareGPT_V3_unfiltered_cleaned_split.json", (LONG, LONG))
    assert [request.prompt for request in sample(*flags)] == [LONG]


def test_lines_of_a_file_say_prompt_and_length(sample: Sample, tmp_path: Path) -> None:
    path = lines(tmp_path / "prompts.jsonl", {"prompt": "One"}, {"prompt": "Two", "output_tokens": 7})
    flags = ("--dataset-name", "custom", "--dataset-path", path, "--skip-chat-template", "--disable-shuffle")
    every = sample(*flags, "--num-prompts", "0")
    assert [(request.prompt, request.expected_output_len) for request in every] == [
        ("One", 256),
        ("Two", 256),
    ]
    with pytest.raises(ConfigError, match='has no "output_tokens", and --custom-output-len is -1'):
        sample(*flags, "--custom-output-len", "-1")
    path = lines(tmp_path / "prompts.jsonl", {"prompt": "Two", "output_tokens": 7})
    assert sample(*flags, "--custom-output-len", "-1", "--num-prompts", "1")[0].expected_output_len == 7


def test_a_chat_template_is_applied_once_here_or_by_the_server(sample: Sample, tmp_path: Path) -> None:
    path = lines(tmp_path / "prompts.jsonl", {"prompt": "One"})
    flags = ("--dataset-name", "custom", "--dataset-path", path, "--num-prompts", "1")
    assert sample(*flags, backend="openai")[0].prompt == "<|user|>\nOne\n<|assistant|>\n"
    assert sample(*flags, backend="openai-chat")[0].prompt == "One"


def test_requests_have_names_of_their_own(sample: Sample) -> None:
    found = sample("--num-prompts", "3", "--random-input-len", "4", request_id_prefix="bench-")
    assert [request.request_id for request in found] == ["bench-0", "bench-1", "bench-2"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--dataset-name", "hf"), "--dataset-name hf is refused: prompts are random tokens"),
        (("--dataset-name", "custom"), "custom has no --dataset-path; expected a file with"),
        (("--dataset-path", "x.json"), "--dataset-path x.json is given, and --dataset-name random reads no"),
        (("--num-prompts", "0"), "--num-prompts is 0; expected 1 or more"),
        (("--random-range-ratio", "1"), "--random-range-ratio is 1; expected a share from 0 to 0.999"),
        (("--random-range-ratio", '{"input": 1}'), "expected a share from 0 to 0.999"),
        (("--random-input-len", "0"), "random prompts of 0 tokens could be empty"),
        ((*PREFIXES, "--num-prompts", "2"), "2 prompts for 3 prefixes; expected at least one"),
        (("--dataset-name", "custom", "--dataset-path", "/none"), "/none cannot be read: No such file"),
    ],
)
def test_what_makes_no_prompts_is_refused(sample: Sample, flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(HotstartError) as caught:
        sample(*flags)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("sharegpt", b" \n", "is empty; expected ShareGPT's form"),
        ("sharegpt", b"[{]", "is no JSON"),
        ("sharegpt", b"\xff\xfe\xff", "is no text in UTF-8"),
        ("sharegpt", b'[{"conversations": [{"value": "a"}]}]', "holds no conversation of two turns"),
        ("sharegpt", b'[{"conversations": [{"value": ""}, {"value": ""}]}]', "has a fitting length"),
        ("custom", b"", "is empty; expected a line for each prompt"),
        ("custom", b'{"prompt": "a"}\n{"prompt"}\n', "line 2 is no JSON"),
        ("custom", b'\n{"text": "a"}\n', 'line 2 has no "prompt" that is a text'),
        ("custom", b'{"prompt": "a", "output_tokens": "x"}', 'line 1 says "output_tokens": "x"'),
    ],
)
def test_file_of_another_form_is_refused_with_the_form(
    sample: Sample, name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        sample("--dataset-name", name, "--dataset-path", str(tmp_path / "file"))
    assert message in str(caught.value)
    assert "expected" in str(caught.value)
