"""``hotstart bench latency`` as a script made for vLLM's would use it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from hotstart.bench.latency import percentile
from hotstart.cli.main import main

SMALL = ("--device", "cpu", "--threads", "1", "--kv-cache-memory-bytes", "2MiB", "--input-len", "6")
FEW = ("--num-iters-warmup", "1", "--num-iters", "3", "--batch-size", "2")


@pytest.fixture
def model(tiny_model: Callable[..., Path]) -> str:
    return str(tiny_model("llama"))


def test_lines_and_keys_are_vllms(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "latency.json"
    words = ["bench", "latency", "--model", model, "--output-len", "4", "--dtype", "float32"]
    assert main([*words, *SMALL, *FEW, "--output-json", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["model_id"] == model
    assert len(result["latencies"]) == 3
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 3)
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert result["percentiles"]["50"] == sorted(result["latencies"])[1]
    printed = capsys.readouterr().out
    assert f"Avg latency: {result['avg_latency']} seconds\n" in printed
    shown = re.findall(r"^(\d+)% percentile latency: (.+) seconds$", printed, re.M)
    assert {percent: float(seconds) for percent, seconds in shown} == result["percentiles"]


def test_output_throughput_counts_every_answer(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "latency", model, *SMALL, *FEW, "--output-len", "3", "--n", "2"]) == 0
    assert "(12 tokens a run)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--output-len", "100000"), "a prompt of 6 tokens and 100000 tokens of output are 100006"),
        (("--output-json", "no/such/place.json"), "--output-json no/such/place.json cannot be written"),
        (("--use-beam-search",), "--use-beam-search is refused: there is no beam search"),
        (("--port", "8000"), "there is no flag --port"),
        (("--dtype", "int3"), "--dtype is int3"),
    ],
)
def test_what_cannot_be_measured_is_said_instead(
    model: str, flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "latency", model, *SMALL, *FEW, *flags]) in (2, 4)
    printed = capsys.readouterr()
    assert message in printed.err
    assert not printed.out


def test_percentiles_lie_between_their_neighbours() -> None:
    assert [percentile([4.0, 1.0, 3.0, 2.0], p) for p in (0, 50, 90, 100)] == pytest.approx([1, 2.5, 3.7, 4])
    assert percentile([7.0], 99) == 7.0
