"""The READMEs promise nothing that is not there, leave nothing out, and say the same in both languages."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hotstart.config.flags import IMPLEMENTED
from hotstart.config.table import SERVE
from hotstart.frontend import openapi
from hotstart.models.registry import ARCHITECTURES

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "README.zh-CN.md")


@pytest.fixture(params=PAGES)
def page(request: pytest.FixtureRequest) -> str:
    return (ROOT / request.param).read_text(encoding="utf-8")


def test_flags_of_serve_exist_and_are_implemented(page: str) -> None:
    table = [line for line in page.splitlines() if line.startswith("|") and "`--" in line]
    named = {flag for line in table for flag in re.findall(r"`(-[-a-zA-Z]+)`", line)}
    implemented = {name for row in SERVE.rows() if row.verdict is IMPLEMENTED for name in row.names}
    assert len(named) > 20
    assert named <= implemented


def test_every_architecture_is_listed_and_no_other(page: str) -> None:
    assert set(re.findall(r"`(\w+ForCausalLM)`", page)) == set(ARCHITECTURES)


def test_every_endpoint_is_listed(page: str) -> None:
    listed = set(re.findall(r"(?<=[ `])(/[\w./{}]+)(?=`)", page))
    assert set(openapi.document()["paths"]) <= listed


def test_commands_and_names_are_the_same_in_both_languages() -> None:
    english, chinese = ((ROOT / name).read_text(encoding="utf-8") for name in PAGES)
    code = re.compile(r"`([^`\n]+)`")
    assert code.findall(english) == code.findall(chinese)
    assert english.count("\n## ") == chinese.count("\n## ")


def test_the_request_asks_for_the_model_that_make_serve_serves(
    page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import demo

    flags = demo.serve_command(Path("model"))
    served = flags[flags.index("--served-model-name") + 1]
    [body] = re.findall(r"-d '(.*)'", page)
    assert json.loads(body)["model"] == served
    assert f"hotstart serve $MODEL --served-model-name {served}\n" in page
