"""``hotstart check``: everything that would stop a start, found together and before any weight is read."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny_models
from checkpoint_files import shard_name, weights, write_model, write_shard
from hotstart.cli import bind, check, check_place
from hotstart.cli.check import Report, fits_here, run_checks
from hotstart.config.settings import CacheConfig, Config, DeviceConfig, HttpConfig, LoadConfig, ModelConfig
from hotstart.engine.assemble import prepare, size_kv
from hotstart.errors import DeviceError, ProblemsFound, raise_all
from running_server import free_port


@pytest.fixture(scope="session")
def tokenizer_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_models.write_tokenizer(folder)
    return folder


@pytest.fixture
def model(tmp_path: Path, tokenizer_files: Path) -> Path:
    """A whole model in two shards."""
    directory = write_model(tmp_path / "model", vocab_size=tiny_models.VOCAB)
    shutil.copytree(tokenizer_files, directory, dirs_exist_ok=True)
    return directory


def checked(model: Path, *, load: dict[str, Any] | None = None, **settings: Any) -> Report:
    config = Config(model=ModelConfig(model=str(model), **settings), load=LoadConfig(**(load or {})))
    return run_checks(config)


def by_name(report: Report, status: str) -> dict[str, str]:
    return {finding.name: finding.text for finding in report.findings if finding.status == status}


def test_whole_model_passes_and_the_report_carries_what_was_learnt(model: Path) -> None:
    report = checked(model)
    assert report.problems == []
    assert report.path == str(model)
    assert report.geometry is not None
    assert report.geometry.num_layers == 2
    assert report.matched is not None
    assert report.checkpoint is not None
    assert report.matched.nbytes == report.checkpoint.nbytes
    assert report.text is not None
    assert report.mount is not None
    assert report.resident is not None
    assert 0 <= report.resident <= 1


def test_command_prints_one_line_for_each_check_and_returns_zero(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config(model=ModelConfig(model=str(model)), http=HttpConfig(host="127.0.0.1", port=free_port()))
    assert check.main(config) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"hotstart check {model}"
    assert lines[-1].startswith("ready to be served")
    names = [line.split()[1] for line in lines[2:-2]]
    assert names[:2] == ["model", "storage"]
    assert names[-1] == "cache"
    assert {"config", "weights", "tensors", "dtype", "text", "device", "port"} <= set(names)


def test_cache_that_cannot_be_written_is_a_warning(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    config = Config(
        model=ModelConfig(model=str(model)),
        http=HttpConfig(host="127.0.0.1", port=free_port()),
        cache_root=str(tmp_path / "file" / "cache"),
    )
    assert check.main(config) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.split()[1:2] == ["cache"]]
    assert line.startswith("  warn")
    assert "cannot be written (Not a directory)" in line


def test_a_library_that_is_not_there_is_told_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true, hidden = importlib.util.find_spec, "fastsafetensors"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == hidden else true(name))
    report = checked(model, load={"load_format": hidden})
    assert report.matched is not None
    assert [found.status for found in report.findings if found.name == "loader"] == ["fail"]


def test_what_a_library_cannot_be_told_is_found_beside_that_it_is_not_there(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true, hidden = importlib.util.find_spec, "fastsafetensors"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == hidden else true(name))
    load = {"load_format": hidden, "model_loader_extra_config": {"memory_limit": 1}}
    report = checked(model, load=load)
    assert [found.status for found in report.findings if found.name == "loader"] == ["fail", "fail"]


@pytest.mark.parametrize(("kind", "name"), [("docker", "restart"), ("", "reboot")])
def test_what_a_mount_must_outlast_is_named_for_the_place(
    kind: str, name: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_place, "container", lambda: kind)
    names = {finding.name for finding in checked(model).findings}
    assert names & {"restart", "reboot"} == {name}


def test_on_a_terminal_a_long_text_goes_on_below_its_beginning() -> None:
    report = Report()
    report.ok("device", "fits: " + "figure, " * 30)
    [first, *others] = check.render(report, "tiny", columns=80).splitlines()[2:-2]
    assert first.startswith("  ok    device  fits: figure")
    assert others
    assert all(line.startswith(" " * 16 + "figure") for line in others)
    assert max(map(len, [first, *others])) <= 80


def test_all_problems_are_found_at_once(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.truncate(model / shard_name(1, 2), 7)
    os.truncate(model / shard_name(2, 2), 0)
    (model / "tokenizer.json").write_text("{")
    (model / "chat_template.jinja").write_text("{% for %}")
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        http = HttpConfig(host="127.0.0.1", port=holder.getsockname()[1])
        config = Config(
            model=ModelConfig(model=str(model)), load=LoadConfig(expect_mount=str(model)), http=http
        )
        assert check.main(config) == 2  # the port's, the lowest
    out = capsys.readouterr().out
    failed = [line.split()[1] for line in out.splitlines() if line.startswith("  fail")]
    assert failed == ["mount", "weights", "weights", "text", "text", "port"]
    assert "6 problems found: it would not start" in out


def test_problems_are_raised_together_for_serve(model: Path) -> None:
    os.truncate(model / shard_name(1, 2), 7)
    os.truncate(model / shard_name(2, 2), 0)
    with pytest.raises(ProblemsFound) as caught:
        raise_all(checked(model).problems)
    assert (len(caught.value.problems), caught.value.exit_code) == (2, 3)


def test_checks_that_a_failure_leaves_without_ground_are_skipped(model: Path) -> None:
    (model / "config.json").unlink()
    report = checked(model)
    assert list(by_name(report, "fail")) == ["config"]
    assert set(by_name(report, "skip")) == {"tensors", "text"}
    assert "weights" in by_name(report, "ok")


def test_unsupported_architecture_is_named(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["MambaForCausalLM"]}))
    assert "MambaForCausalLM" in by_name(checked(model), "fail")["config"]


def test_path_with_a_typo_ends_the_checks(model: Path) -> None:
    report = checked(model.parent / "modle")
    assert [finding.name for finding in report.findings] == ["model"]
    assert "Did you mean" in report.findings[0].advice


def test_shard_given_as_the_model(model: Path) -> None:
    report = checked(model / shard_name(1, 2))
    assert "is a weight file" in by_name(report, "fail")["model"]


def test_missing_template_is_a_warning_that_says_what_to_do(model: Path) -> None:
    (model / "tokenizer_config.json").write_text("{}")
    warning = by_name(checked(model), "warn")["text"]
    assert "no chat template" in warning
    assert "--chat-template" in warning


@pytest.mark.parametrize("written", [{}, {"dtype": None}, {"dtype": "float32"}, {"torch_dtype": "float32"}])
def test_stored_dtype_decides_and_all_three_are_shown(written: dict[str, Any], model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    del config["dtype"]
    (model / "config.json").write_text(json.dumps({**config, **written}))
    report = checked(model)
    says = "float32" if any(written.values()) else "nothing"
    assert (
        by_name(report, "ok")["dtype"]
        == f"stored bfloat16; config.json says {says}; used bfloat16 (as stored)"
    )


def test_wanted_dtype_is_used(model: Path) -> None:
    assert "used float32 (--dtype)" in by_name(checked(model, dtype="float32"), "ok")["dtype"]


def test_overrides_reach_the_geometry(model: Path) -> None:
    report = checked(model, hf_overrides={"max_position_embeddings": 77})
    assert report.geometry is not None
    assert report.geometry.max_position_embeddings == 77


def test_missing_head_is_mended_by_the_flag_that_the_message_offers(tmp_path: Path) -> None:
    model = write_model(tmp_path, shards=1)
    tensors = weights()
    del tensors["lm_head.weight"]
    write_shard(model / "model.safetensors", tensors)
    report = checked(model)
    assert "tie_word_embeddings" in by_name(report, "fail")["tensors"]
    assert "tensors" in by_name(checked(model, hf_overrides={"tie_word_embeddings": True}), "ok")
    assert "tensors" in by_name(checked(model, tie_word_embeddings=True), "ok")


def test_dummy_weights_need_no_files(model: Path) -> None:
    for path in model.glob("*.safetensors*"):
        path.unlink()
    report = checked(model, load={"load_format": "dummy"})
    assert report.problems == []


def test_dummy_weights_need_the_memory_of_real_ones(model: Path) -> None:
    config = Config(
        model=ModelConfig(model=str(model), path=str(model)),
        load=LoadConfig(load_format="dummy"),
        cache=CacheConfig(num_gpu_blocks_override=1 << 40),
        device=DeviceConfig(device="cpu"),
    )
    [problem] = run_checks(config, device=fits_here).problems
    assert problem.exit_code == 5
    assert f"--num-gpu-blocks-override={1 << 40} " in str(problem)
    with pytest.raises(DeviceError) as of_serve:
        size_kv(prepare(config))
    assert of_serve.value.found.partition(":")[0] == problem.found.partition(":")[0]


def test_block_size_that_the_cpu_does_not_take_is_said(model: Path) -> None:
    def warned(size: int) -> list[str]:
        config = Config(
            model=ModelConfig(model=str(model)),
            cache=CacheConfig(block_size=size),
            device=DeviceConfig(device="cpu"),
        )
        return [warning for warning in run_checks(config, device=fits_here).warnings if "block" in warning]

    assert warned(16) == []
    [warning] = warned(32)
    assert "--block-size 32 has no effect on the CPU" in warning
    assert "steps of 16 tokens" in warning


def test_more_threads_than_cores_are_a_warning(model: Path) -> None:
    def warned(threads: int) -> list[str]:
        config = Config(
            model=ModelConfig(model=str(model)), device=DeviceConfig(device="cpu", threads=threads)
        )
        return [warning for warning in run_checks(config, device=fits_here).warnings if "threads" in warning]

    assert warned(1) == []
    assert "--threads 4096 on " in warned(4096)[0]


def test_device_is_asked_once_the_model_is_known(model: Path) -> None:
    def too_small(_: Config, report: Report) -> str:
        assert report.matched is not None
        raise DeviceError(f"{report.matched.nbytes} bytes do not fit")

    report = run_checks(Config(model=ModelConfig(model=str(model))), device=too_small)
    assert "do not fit" in by_name(report, "fail")["device"]
    assert report.problems[0].exit_code == 5


def test_unix_socket_is_tried_and_leaves_nothing_behind(model: Path) -> None:
    config = Config(model=ModelConfig(model=str(model)), http=HttpConfig(uds=str(model / "server.sock")))
    report = run_checks(config, port=True)
    assert report.problems == []
    assert not (model / "server.sock").exists()


def test_unix_socket_that_another_server_put_there_meanwhile_stays(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model / "server.sock"
    url = bind.url
    with socket.socket(socket.AF_UNIX) as other:

        def overtaken(http: HttpConfig, listening: socket.socket) -> str:
            path.unlink()
            other.bind(str(path))
            return url(http, listening)

        monkeypatch.setattr(bind, "url", overtaken)
        run_checks(Config(model=ModelConfig(model=str(model)), http=HttpConfig(uds=str(path))), port=True)
        assert path.exists()


UNPRIVILEGED = """
import json, os, sys
from hotstart.cli.check import run_checks
from hotstart.config.settings import Config, ModelConfig
model, path, mode = sys.argv[1], sys.argv[2], int(sys.argv[3], 8)
config = Config(model=ModelConfig(model=model))
assert not run_checks(config).problems  # also imports everything while this user still may
os.chmod(path, mode)
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
print(json.dumps([(p.kind, p.exit_code, str(p)) for p in run_checks(config).problems]))
"""


@pytest.fixture
def open_model(model: Path) -> Iterator[Path]:
    """The model where another user may reach it, which pytest's own folders do not allow."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        copy = Path(folder) / "parent" / "model"
        shutil.copytree(model, copy)
        for path in (copy.parent, copy):
            path.chmod(0o755)
        yield copy
        for path in (copy.parent, copy):
            path.chmod(0o755)


@pytest.mark.parametrize(
    ("where", "mode", "messages"),
    [
        (shard_name(1, 2), "000", ["has no permission", "mode ----------"]),
        ("config.json", "000", ["config.json", "has no permission", "chmod o+r"]),
        (".", "311", ["Cannot list", "mode d-wx--x--x"]),
        (".", "644", ["may not search the directory", "mode drw-r--r--"]),
        ("..", "600", ["may not search the directory", "mode drw-------"]),
    ],
)
def test_rights_are_those_of_the_serving_user(
    where: str, mode: str, messages: list[str], open_model: Path
) -> None:
    path = os.path.normpath(open_model / where)
    result = subprocess.run(
        [sys.executable, "-c", UNPRIVILEGED, str(open_model), path, mode],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    [(kind, code, text)] = json.loads(result.stdout)
    assert (kind, code) == ("storage error", 4)
    uid = os.geteuid() or 65534
    for message in (f"uid {uid}", f"owner {os.geteuid()}:", path, *messages):
        assert message in text
