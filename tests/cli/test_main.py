"""The door, as a user meets it."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from hotstart import __version__
from hotstart.cli import main as door
from hotstart.cli.main import main
from hotstart.errors import ConfigError, ModelError, ProblemsFound, StorageError


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"hotstart {__version__}\n"


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_the_commands(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    out = capsys.readouterr().out
    assert all(command in out for command in door.COMMANDS)


@pytest.mark.parametrize("words", [["serve", "--help"], ["help", "serve"], ["serve", "/m", "-h"]])
def test_help_of_serve_lists_its_flags_and_defaults(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: hotstart serve MODEL")
    assert "--port N" in out
    assert "[8000]" in out
    assert "--no-hold-requests" in out
    assert "--enable-lora" not in out


def test_help_with_a_word_also_shows_what_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help=lora"]) == 0
    out = capsys.readouterr().out
    assert "refused: LoRA adapters are not supported" in out
    assert "--port" not in out


def test_help_points_only_at_what_is_installed_and_names_no_refused_value(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["serve", "--help"])
    out = capsys.readouterr().out
    assert "docs/" not in out
    assert "priority" not in out
    hidden = re.search(r"(\d+) more flags known from vLLM", out)
    assert hidden is not None
    listed = ""
    for topic in ("refused", "effect"):
        assert f"--help={topic}" in out
        main(["serve", f"--help={topic}"])
        listed += capsys.readouterr().out
    assert len(re.findall(r"(?:^  |, )--?[A-Za-z][\w-]*", listed, re.MULTILINE)) == int(hidden[1])


def test_help_says_which_values_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    main(["serve", "--help=tensor-parallel"])
    assert "others than 1 are refused: this version runs one rank" in " ".join(
        capsys.readouterr().out.split()
    )


def test_no_line_of_help_is_wider_than_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    main(["serve", "--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 70


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["serv", "/m"], "Did you mean `hotstart serve`?"),
        (["bench", "startp"], "Did you mean `hotstart bench startup`?"),
        (["/models/llama"], "To serve a model: `hotstart serve /models/llama`."),
        (["xyzzy"], "`hotstart --help` lists the commands."),
    ],
)
def test_an_unknown_command_names_what_was_meant(
    words: list[str], advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    err = capsys.readouterr().err.splitlines()
    assert err[0].startswith("hotstart: configuration error: there is no command")
    assert err[1] == f"  {advice}"


def test_bad_flags_end_with_one_paragraph_each_and_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "/m", "--port", "x", "-tp", "2"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "hotstart: configuration error: --port is x; expected a whole number, from 0 to 65535.",
        "hotstart: configuration error: -tp 2 is refused: this version runs one rank.",
        "  Leave it out.",
    ]


def run_raising(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    def run(argv: list[str]) -> int:
        raise error

    monkeypatch.setitem(door.COMMANDS, "serve", run)
    return main(["serve", "/m"])


def test_the_lowest_code_of_several_problems_wins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    problems = ProblemsFound([StorageError("disk gone", advice="mount it"), ModelError("no config.json")])
    assert run_raising(problems, monkeypatch) == 3
    assert capsys.readouterr().err.splitlines() == [
        "hotstart: storage error: disk gone.",
        "  Mount it.",
        "hotstart: model error: no config.json.",
    ]


def test_each_kind_of_error_has_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_raising(ConfigError("x"), monkeypatch) == 2
    assert run_raising(StorageError("x"), monkeypatch) == 4


def test_ctrl_c_is_130_and_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_raising(KeyboardInterrupt(), monkeypatch) == 130
    assert capsys.readouterr().err == ""


def test_a_defect_shows_its_traceback_and_says_whose_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_raising(ZeroDivisionError("oops"), monkeypatch) == 1
    err = capsys.readouterr().err
    assert "ZeroDivisionError: oops" in err
    assert "this is a defect of hotstart" in err


def test_a_reader_that_goes_away_is_no_defect() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "hotstart", "serve", "--help"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.stderr == ""


def modules_after(statement: str) -> set[str]:
    script = f"import sys; before = set(sys.modules)\n{statement}\nprint(*set(sys.modules) - before)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    return set(done.stdout.splitlines()[-1].split())


PARSE = (
    "from hotstart.cli import main\n"
    "from hotstart.config.parse import parse_serve\n"
    "parsed = parse_serve(['/m', '--port', '8001', '-tp', '1', '--served-model-name', 'a'], {})"
)


def test_the_engine_waits_for_no_import_but_the_parser() -> None:
    outside = {name for name in modules_after(PARSE) if not name.startswith("hotstart")}
    at_every_start = {"os", "os.path", "posixpath", "genericpath", "stat", "_stat", "_collections_abc"}
    assert outside <= {"__future__", *at_every_start}


def test_settings_cost_msgspec_and_nothing_heavier() -> None:
    heavy = {"torch", "transformers", "asyncio", "logging", "argparse", "numpy", "yaml", "ssl"}
    assert not heavy & modules_after(f"{PARSE}\nparsed.config")


def test_help_and_version_stay_light() -> None:
    heavy = {"torch", "transformers", "asyncio", "logging", "numpy", "yaml", "ssl"}
    for words in (["--version"], ["--help"], ["serve", "--help"]):
        assert not heavy & modules_after(f"from hotstart.cli.main import main\nmain({words})")


def test_bench_alone_lists_the_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["bench"], ["bench", "--help"]):
        assert main(words) == 0
        listed = [line.split("  ")[0].split(" MODEL")[0] for line in capsys.readouterr().out.splitlines()]
        assert listed == [name for name in door.COMMANDS if name.startswith("bench ")]
