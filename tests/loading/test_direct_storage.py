"""Whether fastsafetensors reads straight into a GPU, and the reason that the log gives."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from hotstart.loading.streams.fast_safetensors import direct


def native(*, cuda: bool = True, cufile: bool = True, supported: int = 1) -> SimpleNamespace:
    """What the library's native part answers on such a machine."""
    return SimpleNamespace(
        is_cuda_found=lambda: cuda, is_cufile_found=lambda: cufile, is_gds_supported=lambda index: supported
    )


@pytest.mark.parametrize(
    ("machine", "device", "loaded", "says"),
    [
        (native(), "cpu", True, (False, "the weights go into memory")),
        (native(cuda=False), "cuda:0", True, (False, "no CUDA driver")),
        (native(cufile=False), "cuda:0", True, (False, "libcufile is not installed")),
        (native(), "cuda:0", False, (False, "nvidia-fs is not loaded")),
        (native(supported=0), "cuda:1", True, (False, "GPU 1 does not support")),
        (native(supported=-1), "cuda:0", True, (False, "GPU 0 does not support")),
        (native(), "cuda:0", True, (True, "libcufile and nvidia-fs are there")),
    ],
)
def test_direct_reads_have_a_reason_either_way(
    machine: SimpleNamespace, device: str, loaded: bool, says: tuple[bool, str], tmp_path: Path
) -> None:
    yes, because = direct(machine, device, str(tmp_path if loaded else tmp_path / "absent"))
    assert yes is says[0]
    assert says[1] in because
