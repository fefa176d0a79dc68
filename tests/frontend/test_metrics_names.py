"""The page of the metrics lists what a server exposes, in both languages, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hotstart.messages import AddRequests, BytesRead, FinishReason, LoadStats, PhaseEvent
from hotstart.timeline import Phase

from .conftest import Launch, Running
from .fake_engine import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
LOAD = LoadStats(
    read=[BytesRead("ext4", "map", 700), BytesRead("ext4", "direct", 300)],
    longest_stall=0.25,
    resident=0.5,
    retried=3,
    replaced=2,
)
_EVERYWHERE = {"model_name", "engine", "le"}


@pytest.fixture
def loaded(launch: Launch) -> Running:
    """A server that has loaded a thousand bytes and answered a request."""
    server = launch()
    start = server.timeline.origin
    phase = Phase(name="read weights", process="engine", start=start, end=start + 2, bytes=1000, total=1000)
    server.engine.send(PhaseEvent(phase))
    server.engine.send(LOAD)
    server.make_ready()
    server.engine.answer_with([5, 6])
    answer = server.ask("/v1/completions", prompt=[5, 6, 7], max_tokens=2, n=2)
    assert answer.result(PATIENCE).status_code == 200
    return server


def scraped(server: Running) -> dict[str, tuple[str, dict[tuple[tuple[str, str], ...], float]]]:
    """Type and samples of every name, as it stands in the table."""
    with server.client() as client:
        families = text_string_to_metric_families(client.get("/metrics").text)
    return {
        family.name + ("_total" if family.type == "counter" else ""): (
            family.type,
            {
                tuple(s.labels.items()): s.value
                for s in family.samples
                if not s.name.endswith(("_sum", "_count"))
            },
        )
        for family in families
    }


def value(server: Running, name: str, **labels: str) -> float:
    return sum(v for given, v in scraped(server)[name][1].items() if set(labels.items()) <= set(given))


@pytest.mark.parametrize("page", ["docs/metrics.md", "docs/metrics.zh-CN.md"])
def test_the_page_lists_every_metric_with_its_type_and_labels(loaded: Running, page: str) -> None:
    rows = re.findall(
        r"^\| `([\w:]+)` \| (\w+) \|([^|]*)\| [^|]+ \|$", (ROOT / page).read_text("utf-8"), re.M
    )
    listed = {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    exposed = {
        name: (kind, {label for given in samples for label, _ in given} - _EVERYWHERE)
        for name, (kind, samples) in scraped(loaded).items()
    }
    assert listed == exposed


def test_a_load_is_told_by_source_and_strategy(loaded: Running) -> None:
    assert value(loaded, "hotstart:load_bytes_total", source="ext4", strategy="map") == 700
    assert value(loaded, "hotstart:load_bytes_total", source="ext4", strategy="direct") == 300
    assert value(loaded, "hotstart:load_retries_total") == 3
    assert value(loaded, "hotstart:load_replaced_total") == 2
    assert value(loaded, "hotstart:load_page_cache_ratio") == 0.5
    assert value(loaded, "hotstart:load_longest_stall_seconds") == 0.25
    assert value(loaded, "hotstart:startup_phase_bytes", phase="read weights") == 1000


def test_what_is_copied_to_the_disk_after_the_start_is_counted(loaded: Running) -> None:
    assert value(loaded, "hotstart:disk_copy_written_bytes_total") == 0
    loaded.engine.send(LoadStats(read=LOAD.read, copied=4096))
    loaded.engine.answer_with([5])
    assert loaded.ask("/v1/completions", prompt=[5]).result(PATIENCE).status_code == 200  # in order
    assert value(loaded, "hotstart:disk_copy_written_bytes_total") == 4096


def test_ready_and_first_token_are_told_once_they_were(launch: Launch) -> None:
    server = launch()
    names = "hotstart:startup_ready_seconds", "hotstart:startup_first_token_seconds"
    assert value(server, "hotstart:ready") == 0
    assert not set(names) & set(scraped(server))
    server.make_ready()
    assert value(server, "hotstart:ready") == 1
    assert set(names) & set(scraped(server)) == {names[0]}
    server.engine.answer_with([5])
    for _ in range(2):
        assert server.ask("/v1/completions", prompt=[5]).result(PATIENCE).status_code == 200
    first = value(server, names[1])
    assert first > value(server, names[0])
    assert server.ask("/v1/completions", prompt=[5]).result(PATIENCE).status_code == 200
    assert value(server, names[1]) == first


def test_the_longest_answer_to_a_prompt_is_counted_once(launch: Launch) -> None:
    server = launch()
    server.make_ready()
    answer = server.ask("/v1/completions", prompt=[5, 6, 7], max_tokens=3, n=2)
    message = server.engine.next(AddRequests)
    assert isinstance(message, AddRequests)
    one, two = (request.id for request in message.requests)
    server.engine.step([(one, 5, FinishReason.RUNNING), (two, 5, FinishReason.STOP)])
    server.engine.step([(one, 5, FinishReason.LENGTH)])
    assert answer.result(PATIENCE).status_code == 200
    with server.client() as client:
        text = client.get("/metrics").text
    name = r"vllm:request_max_num_generation_tokens_{}\{{.*\}} (.+)"
    assert [re.search(name.format(part), text)[1] for part in ("count", "sum")] == ["1.0", "2.0"]  # type: ignore[index]
