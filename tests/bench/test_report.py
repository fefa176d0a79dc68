"""The figures of a start as a table, as JSON and as a picture."""

from __future__ import annotations

import json
import struct

import pytest

from hotstart.bench import report, waterfall
from hotstart.bench.client import Target
from hotstart.bench.first_minute import FirstMinute
from hotstart.bench.floor import Floor
from hotstart.bench.launch import Server, Start
from hotstart.bench.startup import Plan, Runs

SERVER = Server("hotstart", ("hotstart", "serve", "my model"), Target("127.0.0.1", 1))
PLAN = Plan("/models/tiny", [], [SERVER])
MINUTE = FirstMinute([10.0] * 5 + [20.0] * 5 + [30.0] * 2, failed=2)
PHASES = ({"process": "engine", "name": "import torch", "start": 0.1, "end": 0.9},)


def start(first_token: float, *, held: bool = True) -> Start:
    disks = {"vda": 2_100_000_000}
    times = 0.2, first_token - 0.1, first_token, held, 0.06, 0.04
    return Start(*times, PHASES, read_bytes=2_000_000_000, device_bytes=disks, peak_rss=3_000_000_000)


@pytest.fixture
def runs() -> Runs:
    runs = Runs("cold", resident=[0.0, 0.02, 0.01], imports=[1.0, 1.2, 1.1], reads=[0.5, 0.4, 0.6])
    runs.floors = [Floor(1.0, 1.1, 1.2, 0.9, 2_000_000_000), Floor(1.0, 1.2, 1.4, 0.9, 2_000_000_000)]
    runs.starts = {"hotstart": [start(1.3), start(1.6), start(1.5)], "other": [start(30.0, held=False)]}
    return runs


def row(text: str, label: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(label)]
    return line[len(label) :].split()


def test_rows_hold_median_range_and_ratios_of_medians(runs: Runs) -> None:
    table = report.table(runs, "models/tiny").partition("other\n")[0]
    assert row(table, "import torch") == ["1.100", "[1.000", "-", "1.200]"]
    assert row(table, "floor") == ["1.300", "[1.200", "-", "1.400]", "1.18", "1.00"]
    assert row(table, "  first token") == ["1.500", "[1.300", "-", "1.600]", "1.36", "1.15"]


def test_table_names_model_bytes_and_cache(runs: Runs) -> None:
    assert "tiny, 2.00 GB, page cache cold, rounds: 3" in report.table(runs, "models/tiny/")


def test_cold_table_says_what_was_still_cached_and_how_fast_a_plain_read_is(runs: Runs) -> None:
    table = report.table(runs, "tiny")
    assert "weights in the page cache just before a start: 1%" in table
    assert "best plain parallel read: 4.00 GB/s" in table


def test_first_request_is_compared_with_the_second_only_when_it_was_not_held(runs: Runs) -> None:
    table = report.table(runs, "tiny")
    assert "hotstart: first request held until ready in 3 of 3 starts" in table
    assert "other: first request took 1.50 x the second" in table


def test_reads_and_memory_are_rows_of_each_server(runs: Runs) -> None:
    table = report.table(runs, "tiny").partition("other\n")[0]
    [read] = [line for line in table.splitlines() if line.startswith("  read from storage")]
    assert read.endswith("2.00 GB by its processes; by all of the machine: vda 2.10 GB")
    [peak] = [line for line in table.splitlines() if line.startswith("  peak memory")]
    assert "3.00 GB (resident in each process" in peak


def test_server_whose_reads_are_not_told_says_so(runs: Runs) -> None:
    runs.starts["other"] = [Start(0.2, 1.4, 1.5, True, 0.06, 0.04)]
    assert "not told of its processes" in report.table(runs, "tiny").partition("other\n")[2]


def test_first_minute_is_a_row_of_rates_with_its_load_below(runs: Runs) -> None:
    runs.minutes["hotstart"] = MINUTE
    table = report.table(runs, "tiny")
    assert row(table, "  tokens/s, by 5 s") == ["10", "20", "30"]
    assert "tokens/s: after the first token, with 4 requests at once" in table
    assert "hotstart: 2 requests of the first minute failed" in table


def test_servers_are_compared_with_the_first_one(runs: Runs) -> None:
    assert "first token of other: 20.00 x that of hotstart" in report.table(runs, "tiny")


def test_file_that_stayed_in_the_page_cache_is_named(runs: Runs) -> None:
    runs.kept = {"/m/a.safetensors": 0.01, "/m/b.safetensors": 0.93}
    table = report.table(runs, "tiny")
    assert "not cold: the page cache held up to 93% of b.safetensors" in table
    assert "a.safetensors" not in table


def test_server_that_failed_is_a_row_with_the_reason(runs: Runs) -> None:
    runs.failed["third"] = "third ended with exit code 3 before it answered; its last lines:\n    x"
    runs.failed["other"] = "other has not answered within 9 s; its last lines:\n    x"
    table = report.table(runs, "tiny")
    assert " ".join(row(table, "third")) == "failed: ended with exit code 3 before it answered"
    assert "other: failed after these: has not answered within 9 s" in table


def test_phases_appear_with_their_process(runs: Runs) -> None:
    assert row(report.table(runs, "tiny").partition("other\n")[0], "    engine: import torch")[0] == "0.800"


def test_no_name_of_a_phase_is_cut_and_the_columns_stay_in_line(runs: Runs) -> None:
    name = "a phase with a name that is longer than all others"
    phases = ({"process": "frontend", "name": name, "start": 0.0, "end": 0.1},)
    runs.starts["other"] = [Start(0.2, 1.4, 1.5, True, 0.06, 0.04, phases)]
    lines = report.table(runs, "tiny").splitlines()
    [long] = [line for line in lines if line.startswith(f"    frontend: {name}  0.100")]
    [head] = [line for line in lines if line.strip().startswith("seconds")]
    assert head.index("seconds") == long.index("0.100")


def test_start_without_a_model_has_no_floor(runs: Runs) -> None:
    runs.floors, runs.reads = [], []
    assert "floor" not in report.table(runs, "")


def test_json_holds_every_round(runs: Runs) -> None:
    document = json.loads(report.as_json([runs], PLAN))
    starts = document["states"][0]["starts"]["hotstart"]
    assert [entry["first_token"] for entry in starts] == [1.3, 1.6, 1.5]


def test_json_has_the_medians_and_the_command_of_each_server(runs: Runs) -> None:
    document = json.loads(report.as_json([runs], PLAN))
    summary = document["summary"]["cold"]
    assert summary["floor"] == pytest.approx(1.3)
    assert summary["hotstart"]["first_token"] == 1.5
    assert summary["hotstart"]["x_floor"] == pytest.approx(1.5 / 1.3)
    assert document["servers"] == {"hotstart": "hotstart serve 'my model'"}


def test_picture_shows_the_median_start_beside_the_floor(runs: Runs) -> None:
    bars = {bar.label: (bar.start, bar.end) for bar in waterfall.bars(runs)}
    assert bars["hotstart: until the first token"] == (0.0, 1.5)
    assert bars["floor: one eager forward"] == pytest.approx((1.1, 1.2))
    assert bars["   engine: import torch"] == (0.1, 0.9)


def size(picture: bytes) -> tuple[int, int]:
    assert picture.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", picture[16:24])
    return width, height


def test_picture_is_a_png_with_room_for_the_first_minute(runs: Runs) -> None:
    width, height = size(waterfall.draw([runs], "tiny"))
    assert width == 1200
    assert height > 200
    runs.minutes["hotstart"] = MINUTE
    assert size(waterfall.draw([runs], "tiny"))[1] > height + 100
