"""On a real GPU: the driver, the arena that torch shares, and the attention back end."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch

from hotstart.attention.base import BatchPlan
from hotstart.attention.sdpa_paged import SdpaPaged
from hotstart.checkpoint.base import Checkpoint, ShardFile, TensorRef
from hotstart.checkpoint.folder import LocalFolder
from hotstart.device.base import Device
from hotstart.device.choose import choose, open_device
from hotstart.errors import DeviceError
from hotstart.loading.arena import Arena, Layout
from hotstart.loading.choice import choose_for_gpu
from hotstart.loading.ring import BUFFER_BYTES, Loading
from hotstart.models.spec import AttentionSpec, WeightSpec
from hotstart.storage.residency import evict

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device() -> Device:
    return open_device(choose("cuda"))


def test_the_driver_and_torch_agree_on_the_device(device: Device) -> None:
    properties = torch.cuda.get_device_properties(0)
    assert device.info.name == properties.name
    assert device.info.uuid == f"GPU-{properties.uuid}"
    assert device.info.capability == torch.cuda.get_device_capability(0)
    assert device.info.total == properties.total_memory


def test_an_allocation_lowers_free_memory_until_it_is_freed(device: Device) -> None:
    device.attach()
    before = device.memory().free
    address = device.allocate(1 << 30)
    assert before - device.memory().free >= 1 << 30
    device.free(address)
    assert device.memory().free == before


def test_too_large_an_allocation_says_what_is_free(device: Device) -> None:
    device.attach()
    with pytest.raises(DeviceError, match=r"cannot allocate 1\d\.\d TB on cuda:0 .* are free"):
        device.allocate(10 << 40)


def test_a_2d_copy_moves_rows_between_pitches(device: Device) -> None:
    device.attach()
    buffer, stream = device.pinned(4096), device.stream()
    torch.frombuffer(buffer.view, dtype=torch.uint8).random_()
    target = torch.zeros(16, 512, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    device.copy_2d(target.data_ptr(), 512, buffer.address, 256, 100, 16, stream)
    device.synchronize(stream)
    expected = torch.zeros(16, 512, dtype=torch.uint8)
    expected[:, :100] = torch.frombuffer(buffer.view, dtype=torch.uint8).view(16, 256)[:, :100]
    assert torch.equal(target.cpu(), expected)
    device.destroy_stream(stream)
    device.unpin(buffer)


@pytest.mark.parametrize("name", ["BF16", "F16", "F32", "F8_E4M3", "U8"])
def test_weights_arrive_in_the_arena_and_torch_views_them_there(
    device: Device, tmp_path: Path, name: str
) -> None:
    size = {"BF16": 2, "F16": 2, "F32": 4}.get(name, 1)
    rows = (40 << 20) // 1024 // size
    data = os.urandom(3) + os.urandom(rows * 1024 * size)
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    ref = TensorRef("w", 0, name, (rows, 1024), 3, rows * 1024 * size)
    checkpoint = Checkpoint(
        str(tmp_path), (ShardFile(str(path), len(data), 3),), {"w": ref}, folder=LocalFolder(str(tmp_path))
    )
    arena = Arena(Layout.of([(WeightSpec(slot="w", stored=("w",), shape=ref.shape), ref)]), device)
    with closing(Loading(checkpoint, arena)) as loading:
        loading.wait()
    found = arena.tensor("w").view(torch.uint8).flatten().cpu()
    assert torch.equal(found, torch.frombuffer(bytearray(data[3:]), dtype=torch.uint8))
    arena.close()


def test_pinned_buffers_begin_at_pages(device: Device) -> None:
    device.attach()
    buffers = [device.pinned(BUFFER_BYTES) for _ in range(4)]
    assert [buffer.address % 4096 for buffer in buffers] == [0] * 4
    for buffer in buffers:
        device.unpin(buffer)


@pytest.mark.parametrize("strategy", ["direct", "buffered"])
def test_a_cold_file_arrives_whole_past_the_page_cache_and_through_it(
    device: Device, tmp_path: Path, strategy: str
) -> None:
    data = os.urandom(5 + (60 << 20))
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    evict(str(path))
    shard = ShardFile(str(path), len(data), 5)
    refs = {
        name: TensorRef(name, 0, "U8", (30 << 20,), 5 + n * (30 << 20), 30 << 20)
        for n, name in enumerate("ab")
    }
    checkpoint = Checkpoint(str(tmp_path), (shard,), refs, folder=LocalFolder(str(tmp_path)))
    specs = [(WeightSpec(slot=name, stored=(name,), shape=ref.shape), ref) for name, ref in refs.items()]
    arena = Arena(Layout.of(specs), device)
    choices = choose_for_gpu(checkpoint.files, strategy)
    with closing(Loading(checkpoint, arena, choices=choices)) as loading:
        loading.wait()
    assert loading.describe().startswith(f"{strategy} (as ordered")
    found = torch.cat([arena.tensor(name).cpu() for name in "ab"])
    assert torch.equal(found, torch.frombuffer(bytearray(data[5:]), dtype=torch.uint8))
    arena.close()


def test_a_cast_arena_gives_its_staging_back(device: Device, tmp_path: Path) -> None:
    values = torch.randn(4096, 4096)
    path = tmp_path / "model.safetensors"
    path.write_bytes(values.numpy().tobytes())
    ref = TensorRef("w", 0, "F32", (4096, 4096), 0, 4096 * 4096 * 4)
    checkpoint = Checkpoint(
        str(tmp_path), (ShardFile(str(path), ref.nbytes, 0),), {"w": ref}, folder=LocalFolder(str(tmp_path))
    )
    spec = WeightSpec(slot="w", stored=("w",), shape=ref.shape, finish="cast")
    arena = Arena(Layout.of([(spec, ref)], dtype="bfloat16"), device)
    with closing(Loading(checkpoint, arena)) as loading:
        loading.wait()
    before = device.memory().free
    arena.finish()
    assert device.memory().free - before >= ref.nbytes
    assert torch.equal(arena.tensor("w").cpu(), values.bfloat16())
    arena.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 40])
def test_attention_on_the_gpu_equals_attention_on_the_cpu(dtype: torch.dtype, window: int) -> None:
    spec = AttentionSpec(heads=32, kv_heads=8, head_dim=128, scale=128**-0.5, window=window)
    batches = [
        BatchPlan([300, 70], [0, 0], [list(range(40, 80)), list(range(5, 12))]),
        BatchPlan([1, 50, 1], [370, 70, 0], [list(range(40, 80)), list(range(5, 13)), [2]]),
    ]
    backends = {
        "cpu": SdpaPaged([spec], 100, 16, torch.float64, torch.device("cpu")),
        "cuda": SdpaPaged([spec], 100, 16, dtype, torch.device("cuda")),
    }
    generator = torch.Generator().manual_seed(0)
    # The second batch continues the first sequence at 370: fill the tokens between.
    fill = BatchPlan([70], [300], [list(range(40, 80))])
    for batch in (batches[0], fill, batches[1]):
        tokens = sum(batch.query_lens)
        q, k, v = (torch.randn(tokens, n, 128, generator=generator).to(dtype) for n in (32, 8, 8))
        expected = backends["cpu"].attend(q.double(), k.double(), v.double(), 0, backends["cpu"].plan(batch))
        found = backends["cuda"].attend(q.cuda(), k.cuda(), v.cuda(), 0, backends["cuda"].plan(batch))
        error = (found.cpu().double() - expected).norm() / expected.norm()
        assert error < (1e-5 if dtype == torch.float32 else 1e-2)


def test_a_plan_and_its_attention_never_wait_for_the_device() -> None:
    spec = AttentionSpec(heads=8, kv_heads=2, head_dim=64, scale=0.125, window=0)
    backend = SdpaPaged([spec], 64, 16, torch.bfloat16, torch.device("cuda"))
    batch = BatchPlan([1, 1, 20], [30, 5, 10], [[1, 2], [3], [4, 5]])
    q, k, v = (torch.randn(22, n, 64, dtype=torch.bfloat16, device="cuda") for n in (8, 2, 2))
    backend.attend(q, k, v, 0, backend.plan(batch))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        backend.attend(q, k, v, 0, backend.plan(batch))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("visible", ["GPU-{uuid}", " GPU-{short} ", "0"])
def test_a_gpu_named_in_the_environment_is_the_one_used(device: Device, visible: str) -> None:
    uuid = device.info.uuid[4:]
    code = (
        "from hotstart.device.choose import choose, open_device;"
        "d = open_device(choose('cuda')); d.attach(); import torch;"
        "print(d.info.uuid[4:], torch.cuda.get_device_properties(0).uuid)"
    )
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": visible.format(uuid=uuid, short=uuid[:8])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == [uuid, uuid]
