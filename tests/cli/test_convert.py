"""``hotstart convert``: what a person types and reads."""

from __future__ import annotations

import pytest

from hotstart.cli.main import main


def test_the_kinds_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "--help"]) == 0
    kinds = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    assert kinds == ["safetensors", "sharded", "tensorizer"]


@pytest.mark.parametrize("kind", ["safetensors", "sharded", "tensorizer"])
def test_each_kind_explains_its_arguments_and_flags(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", kind, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: hotstart convert {kind} SRC DST [--flag [value] …]")
    assert "--memory-limit" in out


def test_a_wrong_kind_names_what_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "shards", "a", "b"]) == 2
    assert "Did you mean `hotstart convert sharded`?" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["one"], ["one", "two", "three"], []])
def test_exactly_two_arguments_are_taken(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "safetensors", *words]) == 2
    assert f"which is {len(words)} of 2 arguments" in capsys.readouterr().err


def test_a_wrong_size_is_refused_with_what_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "safetensors", "a", "b", "--shard-size", "big"]) == 2
    assert "--shard-size is big; expected a size" in capsys.readouterr().err
