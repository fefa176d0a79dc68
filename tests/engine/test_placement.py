"""When memory is measured and taken: nothing before the word is given, and sizes from before the weights."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from hotstart.attention.base import AttentionBackend
from hotstart.attention.sdpa_paged import SdpaPaged
from hotstart.config.settings import Config, DeviceConfig, LoadConfig, ModelConfig
from hotstart.device import host, nvml
from hotstart.device.base import Holder
from hotstart.device.choose import DeviceChoice
from hotstart.device.fake import FakeDevice
from hotstart.engine import assemble, placement
from hotstart.engine.assemble import Prepared, build, prepare, size_kv
from hotstart.engine.block_manager import BlockManager, PagedBlockManager
from hotstart.engine.kv_size import KVSize
from hotstart.engine.placement import CudaPlacement
from hotstart.errors import ConfigError, DeviceError
from hotstart.loading import choice
from hotstart.units import format_size

GB = 1 << 30


def prepared(directory: Path, **sections: Any) -> Prepared:
    return prepare(
        Config(
            model=ModelConfig(model=str(directory), path=str(directory), **sections.pop("model", {})),
            device=DeviceConfig(device="cpu", threads=1),
            **sections,
        )
    )


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """The only GPU there is."""
    made = FakeDevice(total=40 * GB)
    monkeypatch.setattr(placement, "open_device", lambda choice: made)
    return made


class FakeGpu(CudaPlacement):
    """A GPU's arena over host memory, with its cache on the CPU."""

    def __init__(self, choice: DeviceChoice, fake: FakeDevice) -> None:
        super().__init__(choice)
        self.fake = fake
        self.fails = False
        self.allocated_before_cache = 0
        self.cache_made = threading.Event()

    def device(self) -> torch.device:
        return torch.device("cpu")

    def kv_cache(self, prepared: Prepared, kv: KVSize) -> tuple[AttentionBackend, BlockManager]:
        if self.fails:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        self.allocated_before_cache = self.fake.allocated
        attention = SdpaPaged(
            prepared.geometry.attention(), 4, 16, getattr(torch, prepared.matched.dtype), self.device()
        )
        self.cache_made.set()
        return attention, PagedBlockManager(4, 16, prefix_caching=True)


def on_gpu(found: Prepared, device: FakeDevice) -> CudaPlacement:
    found.placement = gpu = CudaPlacement(DeviceChoice(device.info, "a test"))
    return gpu


def test_gpu_memory_is_taken_when_reading_begins_and_not_before(
    tiny_model: Callable[..., Path], device: FakeDevice
) -> None:
    found = prepared(tiny_model())
    weights = on_gpu(found, device).weights(found, lambda done: None)
    assert device.allocated == 0
    weights.start()
    weights.wait()
    assert device.allocated >= found.matched.nbytes
    assert device.pinned_bytes > 0
    weights.close()
    assert device.pinned_bytes == 0


def test_maps_on_a_gpu_are_refused(tiny_model: Callable[..., Path], device: FakeDevice) -> None:
    found = prepared(tiny_model(), load=LoadConfig(read_strategy="map"))
    with pytest.raises(ConfigError, match=r"--read-strategy map on a GPU.*expected auto, buffered or direct"):
        on_gpu(found, device).weights(found, lambda done: None)


@pytest.mark.parametrize("strategy", ["buffered", "direct"])
def test_way_of_reading_on_a_gpu_is_an_order(
    strategy: str, tiny_model: Callable[..., Path], device: FakeDevice
) -> None:
    found = prepared(tiny_model(), load=LoadConfig(read_strategy=strategy))
    weights = on_gpu(found, device).weights(found, lambda done: None)
    weights.start()
    weights.wait()
    assert weights.describe().startswith(f"{strategy} (as ordered by --read-strategy)")
    weights.close()


def test_what_a_gpu_reads_again_for_digests_is_read_through_the_page_cache(
    tiny_model: Callable[..., Path], device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "resident_fraction", lambda path: 0.0)
    monkeypatch.setattr(choice.Mount, "network", True)
    monkeypatch.setattr(choice.Mount, "fuse", True)
    how = {}
    for verify in ("size", "digest"):
        found = prepared(tiny_model(), load=LoadConfig(verify=verify))
        weights = on_gpu(found, device).weights(found, lambda done: None)
        weights.start()
        weights.wait()
        how[verify] = weights.describe().partition(" ")[0]
        weights.close()
    assert how == {"size": "direct", "digest": "buffered"}


def test_memory_counts_as_free_what_our_own_engine_holds(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen(["sleep", "600"]) as engine:
        holders = [Holder(engine.pid, "engine", 3 * GB), Holder(1, "another", 5 * GB)]
        monkeypatch.setattr(nvml, "holders", lambda uuid: holders)
        free = CudaPlacement(DeviceChoice(device.info, "a test")).memory().free
        engine.kill()
    assert free == 35 * GB


def test_engine_and_check_count_the_same_memory_as_free(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeDevice(total=40 * GB, holders=[Holder(1, "another", 5 * GB)], context=GB // 2)
    monkeypatch.setattr(placement, "open_device", lambda choice: gpu)
    monkeypatch.setattr(nvml, "holders", lambda uuid: gpu.holders())
    found = prepared(tiny_model())
    of_check = CudaPlacement(DeviceChoice(gpu.info, "a test")).memory().free
    engine = on_gpu(found, gpu)
    engine.weights(found, lambda done: None)
    assert gpu.memory().free == 34.5 * GB
    assert engine.memory().free == of_check == 35 * GB


def test_the_context_is_made_while_the_headers_are_waited_for(
    tiny_model: Callable[..., Path], device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[DeviceChoice] = []

    def open_(choice: DeviceChoice) -> FakeDevice:
        opened.append(choice)
        return device

    monkeypatch.setattr(placement, "open_device", open_)
    monkeypatch.setattr(
        assemble, "place", lambda choice: FakeGpu(DeviceChoice(device.info, "a test"), device)
    )
    seen: list[int] = []

    def found() -> None:
        seen.append(len(opened))

    directory = str(tiny_model())
    made = prepare(Config(model=ModelConfig(model=directory, path=directory)), found)
    made.placement.weights(made, lambda done: None)
    assert seen == [1]
    assert len(opened) == 1


def test_memory_that_the_process_held_before_is_not_free(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeDevice(total=40 * GB, holders=[Holder(1, "another", 5 * GB)], context=GB)
    gpu.attach()
    monkeypatch.setattr(placement, "open_device", lambda choice: gpu)
    found = prepared(tiny_model())
    engine = on_gpu(found, gpu)
    engine.weights(found, lambda done: None)
    assert engine.memory().free == 34 * GB


def test_size_of_the_cache_does_not_depend_on_what_has_been_read(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = prepared(tiny_model())
    before = size_kv(found)
    nothing_left = structs.replace(host.memory(), available=0)
    monkeypatch.setattr(host, "memory", lambda: nothing_left)
    assert size_kv(found) == before


def test_weights_count_in_the_dtype_that_they_are_used_in(
    tiny_model: Callable[..., Path], device: FakeDevice
) -> None:
    found = prepared(tiny_model("llama", dtype="bfloat16"), model={"dtype": "float32"})
    stored = found.matched.nbytes
    cpu = found.placement.footprint(found)
    gpu = on_gpu(found, device).footprint(found)
    assert 2 * stored <= cpu.held < cpu.peak
    assert 2 * stored <= gpu.held < gpu.peak
    arithmetic = f"weights {format_size(gpu.held)}"
    assert arithmetic in size_kv(found).arithmetic


def test_weights_that_are_cast_leave_their_staging_before_the_cache_is_made(
    tiny_model: Callable[..., Path], device: FakeDevice
) -> None:
    found = prepared(tiny_model(), model={"dtype": "bfloat16"})
    found.placement = gpu = FakeGpu(DeviceChoice(device.info, "a test"), device)
    weights = gpu.weights(found, lambda done: None)
    weights.start()
    build(found, weights)
    footprint = gpu.footprint(found)
    assert gpu.allocated_before_cache < footprint.peak
    assert gpu.allocated_before_cache - footprint.held < 1024


def test_cache_is_made_while_weights_that_are_final_arrive(
    tiny_model: Callable[..., Path], device: FakeDevice
) -> None:
    found = prepared(tiny_model())
    found.placement = gpu = FakeGpu(DeviceChoice(device.info, "a test"), device)
    weights = gpu.weights(found, lambda done: gpu.cache_made.wait() and None)
    weights.start()
    build(found, weights)
    weights.wait()


def test_memory_that_runs_out_while_building_is_a_device_error_with_the_arithmetic(
    tiny_model: Callable[..., Path], device: FakeDevice
) -> None:
    found = prepared(tiny_model())
    found.placement = gpu = FakeGpu(DeviceChoice(device.info, "a test"), device)
    gpu.fails = True
    weights = gpu.weights(found, lambda done: None)
    weights.start()
    with pytest.raises(DeviceError, match=r"fake device ran out of memory .* x 0.92 = ") as error:
        build(found, weights)
    assert error.value.exit_code == 5
    assert "--kv-cache-memory-bytes" in error.value.advice
    weights.wait()
