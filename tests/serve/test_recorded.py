"""Requests that a real vLLM answered, asked of a real hotstart: the same statuses, fields and kinds.

``recorded/answers.json`` holds the pairs and the command that served them. Values differ, since the model
does; fields that were null in every answer are features of vLLM that nobody asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from running_server import RunningServer

PAIRS = json.loads((Path(__file__).parents[1] / "recorded" / "answers.json").read_text())["pairs"]
OWN_TO_A_BUILD = {"system_fingerprint"}


@pytest.fixture(scope="module")
def server(
    tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    log = tmp_path_factory.mktemp("recorded") / "log"
    with RunningServer(tiny_model(), log=log) as running:
        yield running.until_ready()


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair['path']} {list(pair['request'] or ())[1:]}")
def test_vllms_answer_and_ours_have_the_same_fields(server: RunningServer, pair: dict[str, Any]) -> None:
    request = pair["request"]
    if request is not None and request["model"] == "m":
        request = {**request, "model": "tiny"}
    response = server.http.request(pair["method"], pair["path"], json=request)
    assert response.status_code == pair["status"]
    if request is not None and request.get("stream"):
        lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]" == pair["answer"][-1]
        first, last = json.loads(lines[0]), json.loads(lines[-2])
        assert missing(pair["answer"][0], first) == []
        assert missing(pair["answer"][-2], last) == []
    else:
        assert missing(pair["answer"], response.json()) == []


def missing(theirs: Any, ours: Any, at: str = "") -> list[str]:
    """Paths where vLLM says something and we say nothing, or something of another kind."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        if theirs and all(key.isdigit() for key in theirs):
            return missing(next(iter(theirs.values())), next(iter(ours.values())), f"{at}.*")  # token ids
        found: list[str] = []
        for key, value in theirs.items():
            if key in OWN_TO_A_BUILD or value is None or at.endswith(".top_logprobs[0]"):
                continue
            found += missing(value, ours.get(key), f"{at}.{key}")
        return found
    if isinstance(theirs, list) and isinstance(ours, list):
        pairs = [(a, b) for a, b in zip(theirs, ours, strict=False) if a is not None]
        return missing(*pairs[0], f"{at}[0]") if pairs else []
    alike = type(theirs) is type(ours) or {type(theirs), type(ours)} == {int, float}
    return [] if alike or at.endswith((".finish_reason", ".stop_reason")) else [at]
