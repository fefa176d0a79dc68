"""What happens before the model is there: requests are held, probes tell how far the start is."""

from __future__ import annotations

import threading

import pytest

from hotstart.errors import EngineError, ModelError, StorageError
from hotstart.frontend.liveness import Liveness
from hotstart.frontend.startup import Startup, State
from hotstart.messages import FinishReason, PhaseEvent
from hotstart.timeline import Phase, Timeline

from .conftest import Launch, Running
from .fake_engine import PATIENCE, READY


def test_a_request_before_the_checks_is_answered_after_them(launch: Launch) -> None:
    server = launch()
    answer = server.ask("/v1/completions", prompt="the")
    wait_for_load(server, 1)
    server.engine.answer_with(server.ids(" fox"))
    server.make_ready()
    assert answer.result(PATIENCE).json()["choices"][0]["text"] == " fox"


def test_held_requests_reach_the_engine_before_it_is_ready(launch: Launch) -> None:
    server = launch()
    answer = server.ask("/v1/completions", prompt="the")
    server.pass_checks()
    request = server.engine.next_request()
    assert server.startup.state is State.LOADING
    server.engine.ready()
    server.engine.step([(request.id, server.ids(" fox")[0], FinishReason.LENGTH)])
    assert answer.result(PATIENCE).json()["choices"][0]["text"] == " fox"


def test_an_unknown_context_length_holds_requests_until_the_engine_tells_it(launch: Launch) -> None:
    server = launch(context=None)
    server.engine.answer_with([5])
    server.pass_checks()
    answer = server.ask("/v1/chat/completions", messages=[{"role": "user", "content": "hello"}])
    wait_for_load(server, 1)
    assert server.engine.requests == []
    server.engine.ready(max_model_len=32)
    assert answer.result(PATIENCE).status_code == 200
    assert (server.engine.requests[0].params.max_tokens or 0) < 32


def test_no_more_requests_are_held_than_allowed(launch: Launch) -> None:
    server = launch(http={"max_held_requests": 1})
    held = server.ask("/v1/completions", prompt="the")
    wait_for_load(server, 1)
    refused = server.ask("/v1/completions", prompt="the").result(PATIENCE)
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    server.engine.answer_with([5])
    server.make_ready()
    assert held.result(PATIENCE).status_code == 200


def test_nothing_is_held_when_holding_is_off(launch: Launch) -> None:
    server = launch(http={"hold_requests": False})
    refused = server.ask("/v1/completions", prompt="the").result(PATIENCE)
    assert refused.status_code == 503
    assert refused.json()["error"]["type"] == "ServiceUnavailableError"
    assert int(refused.headers["retry-after"]) >= 1


def test_a_held_request_that_is_wrong_is_refused_at_once(launch: Launch) -> None:
    refused = launch().ask("/v1/completions", prompt="the", temperature=-1).result(PATIENCE)
    assert refused.status_code == 400


def test_a_held_client_that_leaves_is_forgotten(launch: Launch) -> None:
    server = launch()
    leave = server.leave("/v1/completions", prompt="the")
    wait_for_load(server, 1)
    leave()
    wait_for_load(server, 0)
    server.make_ready()
    server.engine.answer_with([5])
    assert server.ask("/v1/completions", prompt="the").result(PATIENCE).status_code == 200
    assert len(server.engine.requests) == 1


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/tiny"])
def test_models_are_not_listed_before_they_can_be_served(launch: Launch, path: str) -> None:
    server = launch()
    with server.client() as client:
        early = client.get(path)
        server.make_ready()
        assert (early.status_code, client.get(path).status_code) == (503, 200)
    assert "retry-after" in early.headers


@pytest.mark.parametrize("path", ["/health", "/readyz", "/ping"])
def test_readiness_turns_when_the_engine_is_ready(launch: Launch, path: str) -> None:
    server = launch()
    with server.client() as client:
        assert client.get(path).status_code == 503
        server.make_ready()
        assert client.get(path).status_code == 200


def test_livez_reports_phase_and_progress(launch: Launch) -> None:
    server = launch()
    now = server.timeline.origin
    phase = Phase(name="read weights", process="engine", start=now, bytes=250, total=1000)
    merged = threading.Event()
    server.timeline.listen(lambda _: merged.set())
    server.engine.send(PhaseEvent(phase))
    assert merged.wait(PATIENCE)
    with server.client() as client:
        live = client.get("/livez")
    assert live.status_code == 200
    report = live.json()
    assert (report["status"], report["phase"]) == ("loading", "read weights")
    assert (report["bytes"], report["total"], report["percent"]) == (250, 1000, 25.0)
    assert report["seconds_left"] == pytest.approx(3 * report["elapsed"], rel=0.5)


def test_livez_of_a_ready_server_counts_the_weights(server: Running) -> None:
    with server.client() as client:
        report = client.get("/livez").json()
    assert (report["status"], report["phase"], report["percent"]) == ("ready", "ready", 100.0)
    assert (report["bytes"], report["total"]) == (READY.weights_bytes, READY.weights_bytes)


def test_startup_json_shows_the_phases_of_both_processes(launch: Launch) -> None:
    server = launch()
    with server.timeline.phase("check"):
        pass
    merged = threading.Event()
    server.timeline.listen(lambda _: merged.set())
    server.engine.send(PhaseEvent(Phase(name="import torch", process="engine", start=server.timeline.origin)))
    assert merged.wait(PATIENCE)
    with server.client() as client:
        content = client.get("/startup.json").json()
    assert content["state"] == "loading"
    assert {(p["process"], p["name"]) for p in content["phases"]} == {
        ("frontend", "check"),
        ("engine", "import torch"),
    }


def test_no_progress_counts_as_stalled_until_something_moves() -> None:
    time = [0.0]
    timeline = Timeline("frontend", origin=0.0)
    liveness = Liveness(Startup(), timeline, stall=60.0, clock=lambda: time[0])
    phase = timeline.begin("read weights", total=1000, start=0.0)
    time[0] = 61.0
    stalled = liveness.report()
    assert stalled.status == "stalled"
    assert stalled.message is not None
    assert "read weights" in stalled.message
    timeline.progress(phase, 10)
    assert liveness.report().status == "loading"


def test_problems_of_the_checks_end_the_server_with_the_lowest_code(launch: Launch) -> None:
    server = launch()
    held = server.ask("/v1/completions", prompt="the")
    wait_for_load(server, 1)
    server.startup.fail([StorageError("a shard cannot be read"), ModelError("config.json is damaged")])
    assert server.exit_code() == ModelError.exit_code
    answer = held.result(PATIENCE)
    assert answer.status_code == 503
    assert "config.json is damaged" in answer.json()["error"]["message"]


def test_a_failure_that_the_engine_reports_keeps_its_code(launch: Launch) -> None:
    server = launch()
    server.engine.fail(ModelError("a tensor is missing", advice="Fetch it"), EngineError("no step"))
    assert server.exit_code() == ModelError.exit_code
    assert str(server.startup.failed[0]) == "a tensor is missing. Fetch it."


def test_an_engine_that_dies_early_is_named_by_the_parent(launch: Launch) -> None:
    server = launch()
    server.startup.engine_exited("killed by signal 9")
    assert server.exit_code() == EngineError.exit_code
    assert "killed by signal 9" in str(server.startup.failed[0])


def test_states_follow_their_order() -> None:
    startup = Startup()
    with pytest.raises(RuntimeError, match="loading cannot become draining"):
        startup.drain()
    startup.fail([EngineError("gone")])
    startup.fail([ModelError("later")])
    assert [str(problem) for problem in startup.failed] == ["gone."]
    startup = Startup()
    startup.stop()
    with pytest.raises(RuntimeError, match="stopped cannot become draining"):
        startup.drain()


def test_a_failure_on_another_thread_wins_over_every_later_move() -> None:
    startup = Startup()
    startup.fail([EngineError("gone")])
    assert [startup.become_ready(READY), startup.drain(), startup.stop()] == [False] * 3
    assert startup.state is State.FAILED
    assert startup.ready is None


def wait_for_load(server: Running, count: int) -> None:
    """Poll ``/load``, which is what an operator sees of held requests."""
    with server.client() as client:
        for _ in range(2000):
            if client.get("/load").json()["server_load"] == count:
                return
    raise AssertionError(f"never {count} requests in the server")
