"""The server behaves as its own OpenAPI document says, whatever schemathesis sends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from hotstart.checkpoint.base import ModelFiles
from hotstart.frontend.openapi import document

from .conftest import Running, running_servers

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
OPERATIONS = {
    operation.label: operation
    for operation in (
        result.ok() for result in schemathesis.openapi.from_dict(document()).get_all_operations()
    )
}


@pytest.fixture(scope="module")
def server(files: ModelFiles) -> Iterator[Running]:
    with running_servers(files) as launch:
        running = launch()
        running.make_ready()
        running.engine.answer_with(running.ids("the fox"), eos=1)
        yield running


def test_the_served_document_is_the_generated_one(server: Running) -> None:
    with server.client() as client:
        assert client.get("/openapi.json").json() == document()


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize(
    "label", [label for label in OPERATIONS if label.startswith("POST /v1") or "tokenize" in label]
)
def test_answers_to_bodies_conform_to_the_document(server: Running, label: str, mode: GenerationMode) -> None:
    @settings(
        max_examples=10, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        case = data.draw(OPERATIONS[label].as_strategy(generation_mode=mode))
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = "tiny"  # else nearly every answer is 404
        case.call_and_validate(base_url=server.url, checks=CHECKS)

    run()


@pytest.mark.parametrize(
    "label", [label for label in OPERATIONS if label.startswith("GET") and "{" not in label]
)
def test_answers_without_bodies_conform_to_the_document(server: Running, label: str) -> None:
    OPERATIONS[label].Case().call_and_validate(base_url=server.url, checks=CHECKS)
