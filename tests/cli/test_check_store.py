"""``hotstart check`` of a model in a store: what it says, and that it says it whatever is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fault_proxy import Fault, FaultServer
from hotstart.cli.main import main

TinyModel = Callable[..., Path]
Check = Callable[..., tuple[int, str]]


@pytest.fixture
def server(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultServer]:
    """A bucket of a store that asks nobody who he is: ``s3://models/tiny``."""
    model = tiny_model()
    files = {f"models/tiny/{path.name}": path.read_bytes() for path in model.iterdir()}
    with FaultServer(files) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("AWS_NO_SIGN_REQUEST", "1")
        yield server


@pytest.fixture
def check(
    server: FaultServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Check:
    """Exit code and output of ``hotstart check s3://models/tiny`` with flags."""
    monkeypatch.setenv("HOTSTART_CACHE_ROOT", str(tmp_path / "cache"))

    def run(*flags: str, model: str = "s3://models/tiny") -> tuple[int, str]:
        code = main(["check", model, "--port", "0", "--device", "cpu", *flags])
        return code, capsys.readouterr().out

    return run


def lines(output: str, name: str) -> list[tuple[str, str]]:
    """Status and text of a check."""
    rows = [line.split(maxsplit=1) for line in output.splitlines() if line.startswith("  ")]
    return [(status, text[len(name) :].strip()) for status, text in rows if text.startswith(f"{name} ")]


def test_a_bucket_is_described_by_its_address_and_not_by_rights_of_a_user(check: Check) -> None:
    code, output = check()
    assert code == 0
    [(status, text)] = lines(output, "model")
    assert (status, text.partition(", ")[0]) == ("ok", "s3://models/tiny")
    assert "uid" not in text


def test_a_disk_copy_without_a_directory_is_reported_beside_everything_else(check: Check) -> None:
    code, output = check("--disk-cache", ":5")
    assert code == 2
    assert lines(output, "disk cache") == [
        ("fail", "--disk-cache :5; expected a directory, or DIR:SIZE such as /var/cache/models:200GB")
    ]
    assert [status for status, _ in lines(output, "weights") + lines(output, "text")] == ["ok", "ok"]


def test_a_disk_copy_that_cannot_be_written_is_a_warning(check: Check) -> None:
    code, output = check("--disk-cache", "/proc/nowhere")
    assert code == 0
    [(status, text)] = lines(output, "disk cache")
    assert status == "warn"
    assert text.startswith("/proc/nowhere cannot be written (")


def test_a_disk_copy_says_where_it_is_and_what_bounds_it(check: Check, tmp_path: Path) -> None:
    _, output = check("--disk-cache", f"{tmp_path}/copies:2GB")
    assert lines(output, "disk cache") == [("ok", f"{tmp_path}/copies, the limit is 2.00 GB")]


def test_a_disk_copy_of_a_directory_is_passed_over(check: Check, tiny_model: TinyModel) -> None:
    code, output = check("--disk-cache", "/proc/nowhere", model=str(tiny_model()))
    assert code == 0
    assert [status for status, _ in lines(output, "disk cache")] == ["skip"]


def test_a_mount_is_not_expected_of_a_store(check: Check) -> None:
    code, output = check("--expect-mount", "/models:nfs4")
    assert code == 2
    [(status, text)] = lines(output, "mount")
    assert status == "fail"
    assert text.startswith(
        "--expect-mount /models:nfs4 is given, and s3://models/tiny is read over the network"
    )
    assert "Leave --expect-mount out" in output


def test_a_store_that_fails_while_it_is_probed_is_told_in_place_of_the_plan(
    check: Check, server: FaultServer
) -> None:
    def of_probe(begin: int, end: int) -> bool:
        return end <= len(server.files["models/tiny/model.safetensors"])  # for headers more is asked for

    denied = b"<Error><Code>AccessDenied</Code><Message>No more.</Message></Error>"
    server.faults += [
        Fault(path="model.safetensors", if_range=of_probe, nth=1, cut=1000),
        Fault(path="model.safetensors", if_range=of_probe, status=403, body=denied),
    ]
    code, output = check("--explain")
    assert code == 0
    plan = output.partition("\nread plan\n")[2]
    assert plan.startswith("  none: s3://models/tiny/model.safetensors: 403 AccessDenied: No more.")
