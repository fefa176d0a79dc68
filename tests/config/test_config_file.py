"""``--config file.yaml``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hotstart.config.parse import parse_serve
from hotstart.errors import HotstartError


def parse(tmp_path: Path, text: str, *words: str) -> dict[str, Any]:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    return parse_serve([*words, "--config", str(file)], {}).values


def refusal(tmp_path: Path, text: str) -> str:
    with pytest.raises(HotstartError) as caught:
        parse(tmp_path, text, "/m")
    assert caught.value.exit_code == 2
    return str(caught.value)


FILE = """\
model: /models/llama
port: 9000
max-model-len: 4k
max_num_seqs: 8
enable-prefix-caching: false
enforce-eager: true
served-model-name: [a, b]
gpu-memory-utilization: 0.5
hf-overrides:
  rope_theta: 1000000
model-loader-extra-config.concurrency: 16
api-key: secret
revision:
"""


def test_keys_are_flags_and_values_are_yaml(tmp_path: Path) -> None:
    assert parse(tmp_path, FILE) == {
        "model.model": "/models/llama",
        "http.port": 9000,
        "model.max_model_len": 4000,
        "scheduler.max_num_seqs": 8,
        "cache.enable_prefix_caching": False,
        "optimization.enforce_eager": True,
        "model.served_model_name": ("a", "b"),
        "cache.gpu_memory_utilization": 0.5,
        "model.hf_overrides": {"rope_theta": 1000000},
        "load.model_loader_extra_config": {"concurrency": 16},
        "http.api_key": ("secret",),
    }


def test_the_command_line_wins_wherever_it_stands(tmp_path: Path) -> None:
    values = parse(tmp_path, FILE, "/models/other", "--port", "1", "--hf-overrides.x", "1")
    assert values["model.model"] == "/models/other"
    assert values["http.port"] == 1
    assert values["model.hf_overrides"] == {"rope_theta": 1000000, "x": 1}


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert set(parse(tmp_path, "# nothing\n", "/m")) == {"model.model", "model.served_model_name"}


GROWING = "hf-overrides:\n" + "".join(
    f"  {name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefghij", "bcdefghijk", strict=False)
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("port: 1\nmax-modle-len: 5\n", "serve.yaml line 2: there is no flag --max-modle-len"),
        ("port: 1\nmax-modle-len: 5\n", "--max-model-len"),
        ("port: -5\n", "serve.yaml line 1: --port is -5; expected"),
        ("port: true\n", "--port is True"),
        ("port: [1]\n", "--port is [1]"),
        ("enforce-eager: 7\n", "true or false"),
        ("hf-overrides: 7\n", "JSON object"),
        ("enable-lora: true\n", "--enable-lora is refused"),
        ("port: 1\nport: 2\n", "second time"),
        ("{port: 1, port: 2}\n", "second time"),
        (
            "enforce-eager: true\nno-enforce-eager: true\n",
            "serve.yaml line 2: no-enforce-eager sets what enforce-eager in line 1 sets",
        ),
        ("max-num-seqs: 1\nmax_num_seqs: 2\n", "max_num_seqs sets what max-num-seqs in line 1 sets"),
        ("max-num-queued-reqs: 1\nmax-queued-requests: 2\n", "sets what max-num-queued-reqs in line 1"),
        ("config: other.yaml\n", "further file"),
        ("- port\n", "no mapping"),
        ("port: [1\n", "no valid YAML"),
        ("port: 1\nhost: a\0b\n", "no valid YAML: unacceptable character"),
        ('host: "\\ud800"\n', "line 1: an escape names half of a character"),
        ("\nport: 2020-13-45\n", "no valid YAML: line 2: month must be in 1..12"),
        ("hf-overrides: &a {port: 1}\n<<: *a\n", "line 2: << merges nothing at this level"),
        ("port: !!timestamp x\n", "line 1: a value does not fit its tag"),
        ("hf-overrides: {x: 2020-01-01}\n", "line 1: a date is no value of a flag"),
        ("api-key: !!binary c2VjcmV0\n", "line 1: a bytes is no value of a flag"),
        ("a: &a [x, x, x, x]\n" + GROWING, "its aliases grow too large"),
        ("port: !!python/object/apply:os.system [true]\n", "no valid YAML"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, text: str, reason: str) -> None:
    assert reason in refusal(tmp_path, text)


def test_an_absent_file_is_named() -> None:
    with pytest.raises(HotstartError, match=r"/no/such\.yaml cannot be read: No such file"):
        parse_serve(["/m", "--config", "/no/such.yaml"], {})


def test_a_key_never_reaches_an_error(tmp_path: Path) -> None:
    assert "secret" not in refusal(tmp_path, "api-key: [secret\nport: 1\n")


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(HotstartError, match="cannot be read"):
        parse_serve(["/m", "--config", str(tmp_path / "x.yaml")], {})


def test_a_second_file_is_refused(tmp_path: Path) -> None:
    for name in ("a.yaml", "b.yaml"):
        (tmp_path / name).write_text("port: 1\n")
    with pytest.raises(HotstartError, match=r"--config is given 2 times: .*a\.yaml and .*b\.yaml; expected"):
        parse_serve(["/m", "--config", str(tmp_path / "a.yaml"), "--config", str(tmp_path / "b.yaml")], {})


def test_a_merge_inside_a_value_is_a_merge(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("hf-overrides: {a: &a {x: 1}, b: {<<: *a, y: 2}}\n")
    assert parse_serve(["/m", "--config", str(path)], {}).config.model.hf_overrides["b"] == {"x": 1, "y": 2}
