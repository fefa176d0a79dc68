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
        ("config: other.yaml\n", "further file"),
        ("- port\n", "no mapping"),
        ("port: [1\n", "no valid YAML"),
        ("port: !!python/object/apply:os.system [true]\n", "no valid YAML"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, text: str, reason: str) -> None:
    assert reason in refusal(tmp_path, text)


def test_an_absent_file_is_named() -> None:
    with pytest.raises(HotstartError, match=r"/no/such\.yaml cannot be read: No such file"):
        parse_serve(["/m", "--config", "/no/such.yaml"], {})


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(HotstartError, match="cannot be read"):
        parse_serve(["/m", "--config", str(tmp_path / "x.yaml")], {})
