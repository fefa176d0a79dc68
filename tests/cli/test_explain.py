"""``hotstart check --explain``, and what a start says of its reads before and after them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hotstart.checkpoint.base import Checkpoint, ShardFile
from hotstart.cli.explain import Expectation, plan_for
from hotstart.cli.main import main
from hotstart.loading.explain import Plan, plan_of
from hotstart.timeline import Phase, Timeline
from object_servers import SECRET, S3Server

TinyModel = Callable[..., Path]
GB = 10**9


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSTART_CACHE_ROOT", str(tmp_path / "cache"))


def check(model: str, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    main(["check", model, "--port", "0", "--device", "cpu", *flags])
    return capsys.readouterr().out


def test_explain_adds_the_read_plan_to_the_report(
    tiny_model: TinyModel, capsys: pytest.CaptureFixture[str]
) -> None:
    text = check(str(tiny_model("llama", shards=2)), capsys, "--explain")
    plan = text.partition("\nread plan\n")[2]
    topics = [line[2:].split(" ", 1)[0] for line in plan.splitlines() if line[2] != " "]
    assert topics == ["medium", "strategy", "file", "reads", "memory", "expected"]


def test_without_it_nothing_is_probed(tiny_model: TinyModel, capsys: pytest.CaptureFixture[str]) -> None:
    assert "read plan" not in check(str(tiny_model()), capsys)


def test_ordered_strategy_is_explained_as_an_order(
    tiny_model: TinyModel, capsys: pytest.CaptureFixture[str]
) -> None:
    text = check(str(tiny_model()), capsys, "--explain", "--read-strategy", "buffered")
    assert "buffered: as ordered by --read-strategy" in text


def test_model_without_weights_has_no_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "read plan\n  none: " in check(str(tmp_path), capsys, "--explain")


def test_another_library_has_no_plan_and_the_command_that_measures_it_is_named(
    tiny_model: TinyModel, capsys: pytest.CaptureFixture[str]
) -> None:
    text = check(str(tiny_model()), capsys, "--explain", "--load-format", "fastsafetensors")
    plan = text.partition("\nread plan\n")[2]
    assert plan.startswith("  none: fastsafetensors reads by itself, ")
    assert plan.endswith("hotstart bench load measures it\n")


def test_plan_of_an_object_store_names_endpoint_and_rate_and_no_secret(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model("llama", shards=2)
    with S3Server(model.parent.parent) as s3:
        for name, value in s3.environ.items():
            monkeypatch.setenv(name, value)
        text = check(f"s3://{model.parent.name}/{model.name}", capsys, "--explain")
    plan = text.partition("\nread plan\n")[2]
    assert s3.endpoint in plan
    assert "ranges: " in plan
    assert "/s by a probe of " in plan
    assert SECRET not in text


def expectation(tmp_path: Path, size: int = 2 * GB) -> Expectation:
    file = ShardFile("s3://b/m/model.safetensors", size, 8)
    return Expectation(plan_of(Checkpoint("s3://b/m", (file,), {}), store="a store"), str(tmp_path))


def read_in(seconds: float, nbytes: int = 2 * GB) -> Timeline:
    timeline = Timeline("frontend", origin=0.0)
    timeline.merge(Phase(name="read weights", process="engine", start=1.0, end=1.0 + seconds, bytes=nbytes))
    return timeline


def test_first_start_has_nothing_to_compare_with(tmp_path: Path) -> None:
    expected = expectation(tmp_path)
    assert "expected" not in str(expected)
    assert expected.outcome(read_in(2.0)).startswith(
        "2.00 GB in 2.00 s, 1.00 GB/s, the first start from here"
    )


def test_later_start_knows_what_to_expect_and_what_share_came_of_it(tmp_path: Path) -> None:
    expectation(tmp_path).outcome(read_in(2.0))
    later = expectation(tmp_path)
    assert "expected 2.00 s: 1.00 GB/s in the best of earlier starts" in str(later)
    assert ", 0.50 of the 1.00 GB/s in the best of earlier starts" in later.outcome(read_in(4.0))


def test_start_that_read_nothing_has_no_outcome(tmp_path: Path) -> None:
    assert expectation(tmp_path).outcome(Timeline("frontend", origin=0.0)) == ""


def test_load_half_of_which_lay_in_the_page_cache_is_no_measure(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hotstart.checkpoint.layout import open_checkpoint
    from hotstart.loading import choice

    monkeypatch.setattr(choice, "resident_fraction", lambda *place: 0.5)
    plan = plan_of(open_checkpoint(str(tiny_model())), strategy="buffered")
    outcome = Expectation(plan, str(tmp_path)).outcome(read_in(1.0))
    assert outcome == "2.00 GB in 1.00 s, 2.00 GB/s"
    assert not (tmp_path / "read-rates.json").exists()


def test_mapping_what_memory_holds_is_no_measure_of_the_storage(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hotstart.checkpoint.layout import open_checkpoint
    from hotstart.loading import choice

    monkeypatch.setattr(choice, "resident_fraction", lambda *place: 1.0)
    plan = plan_of(open_checkpoint(str(tiny_model())))
    assert plan.files[0].choice.kind == "map"
    outcome = Expectation(plan, str(tmp_path)).outcome(read_in(1.0))
    assert outcome == "2.00 GB in 1.00 s, 2.00 GB/s"
    assert not (tmp_path / "read-rates.json").exists()


def test_log_of_a_start_names_the_store_and_leaves_its_settings_to_the_line_before(tmp_path: Path) -> None:
    file = ShardFile("s3://b/m/model.safetensors", 2 * GB, 8)
    plan = plan_of(Checkpoint("s3://b/m", (file,), {}), store="endpoint http://s3 (X), region r, path style")
    line = str(Expectation(plan, str(tmp_path)))
    assert line.startswith("1 file ranges from endpoint http://s3 (X) (")
    assert "region" not in line


def test_file_that_goes_before_it_is_probed_is_told_in_place_of_the_plan(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from hotstart.cli import explain

    model = shutil.copytree(tiny_model(), tmp_path / "model")

    def plan_and_remove(*args: Any) -> Plan:
        plan = plan_for(*args)
        (model / "model.safetensors").unlink()
        return plan

    monkeypatch.setattr(explain, "plan_for", plan_and_remove)
    plan = check(str(model), capsys, "--explain").partition("\nread plan\n")[2]
    assert plan == f"  none: {model}/model.safetensors does not exist.\n"
