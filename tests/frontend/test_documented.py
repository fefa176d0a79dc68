"""Requests of vLLM's documentation get answers with exactly its fields.

Each file of ``documented/`` holds a request and the answer that vLLM documents for it. What differs
from run to run, and from model to model, is a placeholder there: ``<id>``, ``<created>``,
``<text>``, ``<n>`` and ``<ids>``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hotstart.messages import FinishReason

from .conftest import Running
from .fake_engine import PATIENCE

FILES = sorted(Path(__file__).with_name("documented").glob("*.json"))


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_the_answer_has_the_documented_fields(server: Running, file: Path) -> None:
    pair = json.loads(file.read_text())
    request = pair["request"]
    if request is None:
        with server.client() as client:
            answer = client.get(pair["path"]).json()
    elif request.get("stream"):
        answer = list(streamed(server, pair))
    else:
        server.engine.answer_with(server.ids(pair["tokens"]), eos=1 if pair["eos"] else None)
        answer = server.ask(pair["path"], **request).result(PATIENCE).json()
    assert like(answer, pair["answer"]) == pair["answer"]


def streamed(server: Running, pair: Any) -> Iterator[Any]:
    """The events of two steps: one with text, one that ends."""
    events = server.stream(pair["path"], **pair["request"])
    request = server.engine.next_request()
    server.engine.step([(request.id, server.ids(pair["tokens"])[0], FinishReason.RUNNING)])
    yield json.loads(events.get(timeout=PATIENCE))
    yield json.loads(events.get(timeout=PATIENCE))
    server.engine.step([(request.id, 1, FinishReason.STOP)])
    while (event := events.get(timeout=PATIENCE)) != "[DONE]":
        yield json.loads(event)


def like(found: Any, documented: Any) -> Any:
    """``found`` with placeholders where ``documented`` has them and the kind of value is right."""
    kinds = {"<id>": str, "<created>": int, "<text>": str, "<n>": int, "<ids>": list}
    if isinstance(documented, str) and documented in kinds:
        return documented if isinstance(found, kinds[documented]) else found
    if isinstance(found, dict) and isinstance(documented, dict):
        # A null that the documentation leaves out of a usage says the same.
        return {
            key: like(value, documented.get(key))
            for key, value in found.items()
            if key in documented or value is not None
        }
    if isinstance(found, list) and isinstance(documented, list) and len(found) == len(documented):
        return [like(f, d) for f, d in zip(found, documented, strict=True)]
    return found
