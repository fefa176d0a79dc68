"""``hotstart bench throughput`` as a script made for vLLM's would use it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hotstart.cli.main import main

SMALL = ("--device", "cpu", "--threads", "1", "--kv-cache-memory-bytes", "2MiB", "--num-prompts", "3")
LONG, SHORT = "You may obtain a copy of the License at any time.", "Yes."


@pytest.fixture
def model(tiny_model: Callable[..., Path]) -> str:
    return str(tiny_model("llama"))


@pytest.fixture
def run(model: str, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Run with further flags; what is in the JSON."""

    def command(*flags: str) -> dict[str, Any]:
        out = tmp_path / "throughput.json"
        assert main(["bench", "throughput", model, *SMALL, *flags, "--output-json", str(out)]) == 0
        return dict(json.loads(out.read_text()))

    return command


def sharegpt(path: Path, *conversations: tuple[str, ...]) -> str:
    entries = [{"conversations": [{"value": turn} for turn in turns]} for turns in conversations]
    path.write_text(json.dumps(entries))
    return str(path)


def test_lines_and_keys_are_vllms(
    model: str, run: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    result = run("--input-len", "7", "--output-len", "4", "--num-warmups", "1")
    assert result["model_id"] == model
    assert result["num_requests"] == 3
    assert result["total_num_tokens"] == 3 * (7 + 4)
    assert result["requests_per_second"] == pytest.approx(3 / result["elapsed_time"])
    assert result["tokens_per_second"] == pytest.approx(33 / result["elapsed_time"])
    printed = capsys.readouterr().out
    [figures] = re.findall(
        r"^Throughput: ([\d.]+) requests/s, ([\d.]+) total tokens/s, ([\d.]+) output tokens/s$", printed, re.M
    )
    assert float(figures[0]) == pytest.approx(result["requests_per_second"], abs=0.01)
    assert "\nTotal num prompt tokens:  21\nTotal num output tokens:  12\n" in printed


def test_without_a_path_the_prompts_are_random(
    run: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    run("--dataset-name", "sharegpt", "--random-input-len", "5", "--random-output-len", "2")
    assert "When dataset path is not set, it will default to random dataset" in capsys.readouterr().out


def test_common_beginning_of_prompts_is_told_from_the_prefix_cache(
    run: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--input-len", "4", "--output-len", "2", "--random-prefix-len", "32", "--max-num-seqs", "1")
    assert run(*flags)["num_cached_tokens"] == 64
    assert "Prefix cache: 64 prompt tokens (59.3%) were not computed" in capsys.readouterr().out
    assert run(*flags, "--no-enable-prefix-caching")["num_cached_tokens"] == 0


def test_conversations_are_filtered_by_length_and_taken_again(
    run: Callable[..., dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = sharegpt(tmp_path / "chats.json", (LONG, LONG), (SHORT, LONG), (LONG,), (LONG * 400, LONG))
    result = run("--dataset-path", path, "--output-len", "2")
    assert result["num_requests"] == 3
    assert result["total_output_tokens"] == 6
    assert "1 conversation of a fitting length, taken again to make 3" in capsys.readouterr().err
    assert run("--dataset-path", path, "--output-len", "2", "--no-oversample")["num_requests"] == 1


def test_answer_is_as_long_as_the_conversations(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    by_prompt = run("--dataset-path", sharegpt(tmp_path / "a.json", (LONG, LONG)), "--no-oversample")
    assert by_prompt["total_num_tokens"] == 2 * by_prompt["total_output_tokens"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "there is no length for random prompts"),
        (("--dataset-path", "no-such.json"), "--dataset-path no-such.json cannot be read: No such file"),
        (("--backend", "hf"), "--backend hf is refused: hotstart's Python API is what is measured"),
        (("--input-len", "5", "--output-len", "9999"), "5 tokens and 9999 tokens of output are 10004"),
    ],
)
def test_what_cannot_be_measured_is_said_instead(
    model: str, flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "throughput", model, *SMALL, *flags]) in (2, 4)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[{]", "is no JSON"),
        ("{}", "holds no conversation of two turns"),
        ('[{"conversations": [1, 2]}]', "holds no conversation of two turns"),
        ('[{"conversations": [{"value": "a"}, {"value": "b"}]}]', "none of 1 conversation in"),
    ],
)
def test_file_of_another_form_is_refused_with_the_form(
    model: str, text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "chats.json"
    path.write_text(text)
    assert main(["bench", "throughput", model, *SMALL, "--dataset-path", str(path)]) == 2
    assert message in capsys.readouterr().err
