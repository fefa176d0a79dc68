"""What a value on the command line means, and what is said when it means nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hotstart.checkpoint.resolve import resolve
from hotstart.errors import ConfigError, ModelError


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """models/Llama-3-8B and models/qwen below the working and home directory."""
    for name in ("Llama-3-8B", "qwen"):
        (tmp_path / "models" / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / "models"


@pytest.mark.parametrize(
    "value", ["./models/qwen", "~/models/qwen", "models/qwen", "../{here}/models/qwen", "{abs}"]
)
def test_path_of_any_form_becomes_absolute(value: str, models: Path) -> None:
    value = value.format(here=models.parent.name, abs=models / "qwen")
    assert resolve(value) == str(models / "qwen")


def test_links_in_a_path_are_kept_as_given(models: Path) -> None:
    (models / "latest").symlink_to("qwen")
    assert resolve(str(models / "latest")) == str(models / "latest")


def test_typo_names_the_first_absent_component_and_its_neighbours(models: Path) -> None:
    with pytest.raises(ModelError) as caught:
        resolve(str(models / "llama-3-8b" / "hf"))
    assert f"there is no 'llama-3-8b' in {models}" in str(caught.value)
    assert f"Did you mean {models}/Llama-3-8B?" in str(caught.value)


def test_relative_typo_is_not_looked_up_on_the_hub(models: Path) -> None:
    with pytest.raises(ModelError, match="Did you mean"):
        resolve("./models/quen")


def test_path_through_a_file(models: Path) -> None:
    (models / "qwen" / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"config\.json is a file; expected a directory"):
        resolve(str(models / "qwen" / "config.json" / "x"))


def test_dangling_link_names_its_target(models: Path) -> None:
    (models / "latest").symlink_to("/mnt/gone")
    with pytest.raises(ModelError, match="symbolic link to /mnt/gone, which is absent"):
        resolve(str(models / "latest"))


def test_absent_path_in_a_container_asks_for_the_mount(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("container", "podman")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(
        ModelError, match=r"host's directory must be mounted at the same path.*docker run -v /data"
    ):
        resolve("/data/zzz/model")


def test_absent_path_in_a_pod_asks_for_a_volume_mount(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    with pytest.raises(ModelError, match="volumeMount"):
        resolve("/data/zzz/model")


def test_empty_parent_suggests_that_a_volume_is_not_mounted(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (models / "mnt").mkdir()
    with pytest.raises(ModelError, match=r"in .*/models/mnt, which is empty.*mount"):
        resolve(str(models / "mnt" / "llama"))


@pytest.mark.parametrize("device", ["/dev/null", "/dev/nvme7n1", "/dev/disk/by-id/nvme-x"])
def test_device_node_is_to_be_mounted(device: str) -> None:
    with pytest.raises(ConfigError, match="Mount it and pass the directory"):
        resolve(device)


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("https://huggingface.co/Qwen/Qwen3-0.6B", "Pass its name on the hub: Qwen/Qwen3-0.6B."),
        ("https://huggingface.co/Qwen/Qwen3-0.6B/tree/main", "Pass its name on the hub: Qwen/Qwen3-0.6B."),
        (
            "https://hf.co/Qwen/Qwen3-0.6B/blob/v2/config.json?x=1",
            "on the hub: Qwen/Qwen3-0.6B --revision v2.",
        ),
        ("https://huggingface.co/datasets/org/name", "is a page of the hub, not a model"),
        ("hf://Qwen/Qwen3-0.6B", "Pass the name: Qwen/Qwen3-0.6B."),
        ("file:///models/qwen", "Pass the path: /models/qwen."),
        ("file://localhost/my%20models", "Pass the path: /my models."),
        ("hdfs://namenode/model", "hdfs:// is no storage that hotstart reads"),
        ("s3://bucket/tokenizer", "only the model itself is read"),
        ("http://files.example/tokenizer", "Copy these files to a directory"),
    ],
)
def test_url_is_refused_with_what_to_do(url: str, advice: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(url)
    assert advice in str(caught.value)


@pytest.mark.parametrize(
    "value", ["", "a/b/c", "models\\llama", "-x", "a b", "org/..", "org//name", "org/na\0me"]
)
def test_neither_path_nor_hub_name(value: str, models: Path) -> None:
    with pytest.raises(ConfigError, match="neither a directory here nor a name on the hub"):
        resolve(value)


def test_path_needs_no_hub_library() -> None:
    import subprocess
    import sys

    script = (
        "import sys; sys.modules['huggingface_hub'] = None; sys.modules['socket'] = None;"
        "from hotstart.checkpoint.resolve import resolve; print(resolve('/'))"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60
    )
    assert result.stdout == "/\n", result.stderr
