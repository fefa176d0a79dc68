from __future__ import annotations

import os
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

import tiny_models

COMPLETE = frozenset({"storage", "loading", "checkpoint"})
"""Folders none of whose tests may be skipped where ``HOTSTART_TEST_COMPLETE`` is set: everything is there."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that is skipped fails there: a line that nobody reads would say that it passed."""
    report = yield
    complete = os.environ.get("HOTSTART_TEST_COMPLETE") and item.path.parent.name in COMPLETE
    if complete and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, though HOTSTART_TEST_COMPLETE is set: {report.longrepr}"
    return report


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny_model("qwen3", dtype="bfloat16", shards=2)``: a model directory, written once a session."""
    written: dict[tuple[object, ...], Path] = {}

    def get(name: str = "llama", *, dtype: str = "float32", shards: int = 1) -> Path:
        key = (name, dtype, shards)
        if key not in written:
            directory = tmp_path_factory.mktemp("models") / f"{name}-{dtype}-{shards}"
            written[key] = tiny_models.write(name, directory, dtype=dtype, shards=shards)
        return written[key]

    return get
