"""Whether a library reads straight into a GPU, and the true reason that the log gives."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hotstart.errors import ConfigError, StorageError
from hotstart.loading.streams import fast_safetensors, instant_tensor
from hotstart.loading.streams.fast_safetensors import direct
from loaded_weights import loaded

fastsafetensors = pytest.importorskip("fastsafetensors")


class Machine:
    """The library's native part as it answers elsewhere: it knows nothing before it has looked."""

    def __init__(self, *, cuda: bool = True, cufile: bool = True, supported: int = 1) -> None:
        self._there = (cuda, cufile)
        self._found = (False, False)
        self._supported = supported

    def load_library_functions(self, runtime: str) -> None:
        assert runtime == "libcudart.so"
        self._found = self._there

    def is_cuda_found(self) -> bool:
        return self._found[0]

    def is_cufile_found(self) -> bool:
        return self._found[1]

    def is_gds_supported(self, index: int) -> int:
        return self._supported


@pytest.fixture
def nvidia_fs(tmp_path: Path) -> tuple[str, str]:
    """Where the driver would show itself, and its device."""
    for name in ("driver", "node"):
        (tmp_path / name).touch()
    return str(tmp_path / "driver"), str(tmp_path / "node")


def test_a_machine_with_everything_reads_directly(disk: Path, nvidia_fs: tuple[str, str]) -> None:
    """Also right after the start, when the library has not looked for CUDA yet."""
    assert direct(Machine(), "cuda:0", [str(disk)], *nvidia_fs) == (
        True,
        "libcufile and nvidia-fs are there, and the GPU supports GPUDirect Storage",
    )


@pytest.mark.parametrize(
    ("machine", "device", "absent", "because"),
    [
        (Machine(), "cpu", "", "the weights go into memory"),
        (Machine(cufile=False), "cuda:0", "", "libcufile.so.0 is not on the library path"),
        (Machine(), "cuda:0", "driver", "the driver nvidia-fs is not loaded"),
        (Machine(), "cuda:0", "node", "node is not here (a container must be given it)"),
        (Machine(supported=0), "cuda:1", "", "GPU 1 does not support"),
        (Machine(supported=-1), "cuda:0", "", "GPU 0 does not support"),
    ],
)
def test_what_is_missing_is_named(
    machine: Machine, device: str, absent: str, because: str, disk: Path, nvidia_fs: tuple[str, str]
) -> None:
    places = [place for place in nvidia_fs if Path(place).name == absent]
    for place in places:
        Path(place).unlink()
    yes, why = direct(machine, device, [str(disk)], *nvidia_fs)
    assert not yes
    assert because in why


def test_a_file_system_without_it_is_named(nvidia_fs: tuple[str, str]) -> None:
    yes, why = direct(Machine(), "cuda:0", ["/dev/shm"], *nvidia_fs)
    assert not yes
    assert why == "/dev/shm lies on tmpfs, a file system without GPUDirect Storage"


def test_a_runtime_that_sees_no_gpu_is_told_from_none(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("ctypes.CDLL", opened.append)
    with pytest.raises(ConfigError, match=r"opened libcudart\.so, which finds no GPU") as caught:
        direct(Machine(cuda=False), "cuda:0", [])
    assert opened == ["libcudart.so"]
    assert "Update the driver" in caught.value.advice


@pytest.mark.skipif(fastsafetensors.cpp.is_cuda_found(), reason="it has CUDA")
def test_the_library_itself_without_a_gpu_is_told_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"finds no libcudart\.so|opened libcudart\.so") as caught:
        direct(fastsafetensors.cpp, "cuda:0", [])
    assert "leave --load-format out" in caught.value.advice


def test_the_log_of_a_load_into_memory_says_so(tiny_model: Callable[..., Path]) -> None:
    said = loaded(tiny_model("llama"), "fastsafetensors").weights.describe()
    assert "direct: no, because the weights go into memory, not into a GPU" in said


def test_a_file_that_the_library_could_not_read_directly_is_told_of_every_load(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As its copier does when libcufile refuses a file: it warns once a process and goes on."""
    gds = pytest.importorskip("fastsafetensors.copier.gds")
    true = fastsafetensors.ParallelLoader.iterate_weights

    def refused(self: Any) -> Any:
        if not gds._warned_gds_fallback:
            gds._warned_gds_fallback = True
            gds.logger.warning("GDS file-handle setup failed (%s); falling back to the nogds copier", "5027")
        yield from true(self)

    monkeypatch.setattr(fastsafetensors.ParallelLoader, "iterate_weights", refused)
    monkeypatch.setattr("hotstart.loading.streams.fast_safetensors.direct", lambda *given: (True, "it can"))
    make = fastsafetensors.ParallelLoader.__init__
    monkeypatch.setattr(
        fastsafetensors.ParallelLoader,
        "__init__",
        lambda self, *given, **named: make(self, *given, **{**named, "nogds": True}),
    )
    for _ in range(2):
        said = loaded(tiny_model("llama"), "fastsafetensors").weights.describe()
        assert "direct: no, because GDS file-handle setup failed (5027); falling back" in said


@pytest.mark.parametrize(
    ("backend", "says"),
    [
        ("URING", "direct: no, because its back end URING reads into memory first"),
        ("MMAP", "direct: no, because its back end MMAP maps the files"),
        ("CUFILE", "direct: up to libcufile, because its back end is CUFILE, but the driver nvidia-fs"),
    ],
)
def test_instanttensor_is_described_by_the_back_end_that_it_chose(backend: str, says: str) -> None:
    assert instant_tensor.direct(backend, []).startswith(says)


def test_a_file_that_the_library_could_not_read_directly_is_in_the_log_line(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library is refused a file by libcufile, warns and goes on: what was promised is taken back."""
    from fastsafetensors.copier import gds

    true = fastsafetensors.SafeTensorsFileLoader.copy_files_to_device

    def refused(loader: Any, *given: Any, **named: Any) -> Any:
        gds.logger.warning("GDS file-handle setup failed (%s); falling back to the nogds copier", "5027")
        return true(loader, *given, **named)

    monkeypatch.setattr(fast_safetensors, "direct", lambda *given: (True, "all is there"))
    monkeypatch.setattr(fastsafetensors.SafeTensorsFileLoader, "copy_files_to_device", refused)
    with pytest.warns(UserWarning, match="falling back to nogds"):  # there is no GPU here
        weights = loaded(tiny_model("llama"), "fastsafetensors").weights
    assert "direct: no, because GDS file-handle setup failed (5027)" in weights.describe()


def test_a_library_that_does_not_open_leaves_nothing_that_listens(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: object, **named: object) -> None:
        raise RuntimeError("no threads")

    before = list(logging.getLogger("fastsafetensors").handlers)
    monkeypatch.setattr(fastsafetensors, "ParallelLoader", fails)
    with pytest.raises(StorageError, match="no threads"):
        loaded(tiny_model("llama"), "fastsafetensors")
    assert logging.getLogger("fastsafetensors").handlers == before
