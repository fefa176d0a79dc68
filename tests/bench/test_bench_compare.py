"""What a command of ``--compare`` says of its server: port, model, name."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotstart.bench import compare, diskstats
from hotstart.bench.startup import STARTUP
from hotstart.errors import ConfigError


@pytest.mark.parametrize(
    ("command", "port"),
    [
        ("vllm serve m --port 9001", 9001),
        ("vllm serve m --port=9002", 9002),
        ("vllm serve m", 8000),
        ("A=1 B=2 /opt/bin/hotstart serve m", 8000),
        ("llama-server -m x.gguf", 8080),
        ("python3 -m sglang.launch_server --model-path m", 30000),
    ],
)
def test_port_is_what_the_command_says_or_the_programs_own(command: str, port: int) -> None:
    assert compare.parsed(command)[1] == port


def test_each_compare_adds_a_command() -> None:
    arguments = STARTUP.parse(["--compare", "a --x", "--compare=b", "--iterations", "1"])
    assert arguments.values["compare"] == ("a --x", "b")
    assert not arguments.notes
    assert STARTUP.parse([]).values["compare"] == ()


def test_free_port_is_put_where_the_command_wants_one() -> None:
    argv, port = compare.parsed("server --listen 127.0.0.1:{port}")
    assert argv == ("server", "--listen", f"127.0.0.1:{port}")
    assert port > 0


def test_command_without_a_port_is_refused_with_the_way_to_give_one() -> None:
    with pytest.raises(ConfigError, match="does not say where its server listens") as caught:
        compare.parsed("my-server m")
    assert "my-server --port {port}" in caught.value.advice


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("vllm serve /m/llama", "/m/llama"),
        ("vllm serve /m/llama --served-model-name l", "l"),
        ("llama-server -m x.gguf --alias=l", "l"),
        ("llama-server -m x.gguf", ""),
    ],
)
def test_model_is_asked_for_as_the_command_names_it(command: str, name: str) -> None:
    assert compare.served_name(compare.split_command(command)) == name


def named(*commands: str) -> list[str]:
    return compare.names([compare.parsed(command) for command in commands])


def test_servers_are_called_by_their_program() -> None:
    assert named("/a/b/vllm serve m", "X=1 python3 -m sglang.launch_server", "python s.py --port 9") == [
        "vllm",
        "sglang.launch_server",
        "s.py",
    ]


def test_two_of_a_program_are_told_apart_by_what_differs() -> None:
    assert named("hotstart serve m -O0 --port {port}", "V=1 /x/hotstart serve m --port {port}") == [
        "hotstart -O0",
        "hotstart V=1",
    ]


def test_the_same_command_twice_is_numbered() -> None:
    assert named("vllm serve m --port 1", "vllm serve m --port 2") == ["vllm", "vllm (2)"]


def test_files_of_the_models_in_a_command_are_found(tmp_path: Path) -> None:
    model, gguf = tmp_path / "model", tmp_path / "x.gguf"
    model.mkdir()
    for file in (model / "config.json", model / "a.safetensors", gguf):
        file.write_bytes(b"x")
    words = ["server", f"--model={model}", str(gguf), str(tmp_path)]
    assert compare.model_files(words) == sorted(
        map(str, (model / "config.json", model / "a.safetensors", gguf))
    )
    assert compare.model_directory([["other"], words]) == str(model)


def test_disks_count_what_they_read_and_no_partition_is_a_disk() -> None:
    before = diskstats.read_bytes()
    assert all((Path("/sys/block") / name.replace("/", "!")).exists() for name in before)
    assert diskstats.since(dict.fromkeys(before, 0)) == {
        name: value for name, value in diskstats.read_bytes().items() if value
    }
