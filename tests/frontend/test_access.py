"""Keys, request ids, cross-origin requests and path prefixes."""

from __future__ import annotations

import logging

import openai
import pytest

from .conftest import Launch, Running
from .fake_engine import PATIENCE

OPEN = [
    "/health",
    "/livez",
    "/readyz",
    "/ping",
    "/version",
    "/metrics",
    "/load",
    "/startup",
    "/startup/events",
    "/startup.json",
    "/openapi.json",
]


@pytest.fixture
def guarded(launch: Launch) -> Running:
    server = launch(http={"api_key": ("first", "second")})
    server.make_ready()
    return server


@pytest.mark.parametrize("key", ["first", "second"])
def test_any_of_the_keys_opens(guarded: Running, key: str) -> None:
    client = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=key, max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny"]


@pytest.mark.parametrize("header", [None, "Bearer wrong", "first", "Basic first", "Bearer firs\xff"])
def test_anything_else_does_not(guarded: Running, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header.encode("latin-1")}
    with guarded.client() as client:
        answers = [client.get(path, headers=headers) for path in ("/v1/models", "/nowhere")]
        answers.append(client.post("/v1/completions", json={"prompt": "the"}, headers=headers))
    assert [answer.status_code for answer in answers] == [401] * 3
    assert answers[0].json()["error"]["type"] == "AuthenticationError"
    assert answers[0].headers["www-authenticate"] == "Bearer"


def test_keys_guard_what_changes_state(guarded: Running) -> None:
    with guarded.client() as client:
        assert client.post("/reset_prefix_cache").status_code == 401


def test_what_keys_do_not_guard(guarded: Running) -> None:
    with guarded.client() as client:
        assert {path: client.get(path).status_code for path in OPEN} == dict.fromkeys(OPEN, 200)


def test_keys_guard_behind_a_path_prefix_too(launch: Launch) -> None:
    server = launch(http={"api_key": ("first",), "root_path": "/llm"})
    server.make_ready()
    with server.client() as client:
        assert client.get("/llm/v1/models").status_code == 401
        assert client.get("/llm/health").status_code == 200


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_a_proxy_may_strip_its_prefix_or_not(launch: Launch, prefix: str) -> None:
    server = launch(http={"root_path": "/llm"})
    server.make_ready()
    with server.client() as client:
        assert client.get(f"{prefix}/v1/models").status_code == 200


def test_request_ids_are_honoured_and_returned_when_enabled(launch: Launch) -> None:
    server = launch(http={"enable_request_id_headers": True})
    server.make_ready()
    server.engine.answer_with([5])
    with server.client() as client:
        answer = client.post("/v1/completions", json={"prompt": "the"}, headers={"X-Request-Id": "mine-1"})
        invented = client.get("/version").headers["x-request-id"]
        spoilt = client.get("/version", headers={"X-Request-Id": "a b"}).headers["x-request-id"]
    assert answer.headers["x-request-id"] == "mine-1"
    assert answer.json()["id"] == "cmpl-mine-1"
    assert len(invented) == len(spoilt) == 32


def test_request_ids_are_not_returned_otherwise(server: Running) -> None:
    with server.client() as client:
        assert "x-request-id" not in client.get("/version").headers


def test_requests_are_logged_with_their_id_when_asked_for(
    launch: Launch, caplog: pytest.LogCaptureFixture
) -> None:
    server = launch(log={"enable_log_requests": True, "max_log_len": 3})
    server.make_ready()
    server.engine.answer_with([5])
    with caplog.at_level(logging.INFO, "hotstart.frontend"), server.client() as client:
        client.post("/v1/completions", json={"prompt": "abcdef"}, headers={"X-Request-Id": "mine-2"})
    (record,) = [record for record in caplog.records if "received" in record.message]
    assert record.__dict__["request_id"] == "mine-2"
    assert "abcdef" not in record.message


def test_browsers_of_allowed_origins_may_ask(launch: Launch) -> None:
    server = launch(http={"allowed_origins": ("http://here",), "api_key": ("first",)})
    server.make_ready()
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    with server.client() as client:
        allowed = client.options("/v1/completions", headers={"Origin": "http://here", **asked})
        refused = client.options("/v1/completions", headers={"Origin": "http://there", **asked})
    assert allowed.headers["access-control-allow-origin"] == "http://here"
    assert "access-control-allow-origin" not in refused.headers


def test_the_openapi_document_can_be_switched_off(launch: Launch) -> None:
    server = launch(http={"disable_fastapi_docs": True})
    with server.client() as client:
        assert client.get("/openapi.json").status_code == 404


def test_the_engine_gets_nothing_from_a_request_without_key(guarded: Running) -> None:
    assert guarded.ask("/v1/completions", prompt="the").result(PATIENCE).status_code == 401
    assert guarded.engine.requests == []
