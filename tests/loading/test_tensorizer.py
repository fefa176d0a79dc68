"""Tensorizer's files through its own library: the same weights, and what is wrong with a file by name."""

from __future__ import annotations

import gc
import gzip
import json
import os
import re
import shutil
import ssl
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensorizer import EncryptionParams, TensorDeserializer, TensorSerializer

from fault_proxy import Fault, FaultServer
from hotstart.checkpoint.tensorizer import open_tensorizer
from hotstart.config.settings import Config, DeviceConfig, LoadConfig, ModelConfig
from hotstart.engine.assemble import prepare
from hotstart.errors import HotstartError, ModelError
from hotstart.loading.loader_check import check_loader
from hotstart.loading.rank import match_named
from hotstart.loading.streams.base import request_for
from hotstart.loading.streams.tensorizer import open_stream, plan
from hotstart.models.registry import family_for
from hotstart.models.spec import WeightSpec
from loaded_weights import Loaded, checksums, filled, loaded, start_with
from object_servers import KEY, SECRET, GcsServer, NanioServer, OpenS3Server, S3Server
from tensorizer_files import write_tensorizer

Model = Callable[..., Path]
Files = dict[str, bytes]
RECORDED = Path(__file__).parents[1] / "recorded"


@pytest.fixture(scope="module")
def plain(tiny_model: Model) -> Path:
    return tiny_model("llama-tied", dtype="bfloat16")


@pytest.fixture(scope="module")
def model(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tensorizer(plain, tmp_path_factory.mktemp("tensorizer") / "models" / "m")


@pytest.fixture(scope="module")
def files(model: Path) -> Files:
    """The model as a web server has it, below ``m``."""
    return {f"m/{file.name}": file.read_bytes() for file in model.iterdir()}


def read(path: Path, location: str = "", **extra: Any) -> Loaded:
    return loaded(path, "tensorizer", location=location, **extra)


def assert_plain(found: Loaded, plain: Path) -> None:
    """It brought what hotstart's own reader finds in the plain checkpoint."""
    assert checksums(found.slots) == checksums(loaded(plain).slots)


def specs_of(path: Path) -> list[WeightSpec]:
    config = json.loads((path / "config.json").read_text())
    family = family_for(config)
    return family.specs(family.geometry(config))


def start(path: Path, location: str = "", **extra: Any) -> Config:
    return Config(
        model=ModelConfig(model=location or str(path), path=str(path), location=location),
        load=LoadConfig(load_format="tensorizer", model_loader_extra_config=extra),
        device=DeviceConfig(device="cpu"),
    )


def refusal(path: Path, location: str = "", **extra: Any) -> str:
    with pytest.raises(HotstartError) as caught:
        read(path, location, **extra)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "fused"),
    [("llama", False), ("llama-tied", False), ("opt", False), ("llama", True), ("llama-tied", True)],
)
def test_the_weights_are_those_of_the_plain_checkpoint(
    name: str, fused: bool, tiny_model: Model, tmp_path: Path
) -> None:
    """Under its own names, and under vLLM's, who marks its files."""
    plain = tiny_model(name)
    assert_plain(read(write_tensorizer(plain, tmp_path / "m", fused=fused)), plain)


@pytest.mark.parametrize(
    "extra",
    [
        {"memory_limit": 0},
        {"memory_limit": 200_000, "num_readers": 3},
        {"tensorizer_config": {"num_readers": 2, "verify_hash": True}},
        {"deserialization_kwargs": {"num_readers": 1}, "stream_kwargs": {"buffer_size": 4096}},
    ],
    ids=str,
)
def test_limits_and_readers_change_nothing_in_the_weights(
    plain: Path, model: Path, extra: dict[str, Any]
) -> None:
    assert_plain(read(model, **extra), plain)


def test_a_file_that_vllm_wrote_gives_the_plain_weights(tmp_path: Path) -> None:
    """See recorded/README.md. It has buffers of vLLM's, and a padded vocabulary."""
    shutil.copy(RECORDED / "vocab-70/config.json", tmp_path)
    packed = (RECORDED / "vocab-70.tensors.gz").read_bytes()
    (tmp_path / "model.tensors").write_bytes(gzip.decompress(packed))
    assert_plain(read(tmp_path), RECORDED / "vocab-70")


@pytest.mark.parametrize("marked", [True, False], ids=["vLLM's file", "another's file"])
def test_a_tied_weight_that_is_stored_twice_is_compared_unless_vllm_wrote_it(
    marked: bool, plain: Path, tmp_path: Path
) -> None:
    """It saves what is one tensor to it under both names; of a store the comparison would read it twice."""
    write_tensorizer(plain, tmp_path / "m")
    tensors = load_file(plain / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    if marked:
        tensors[".vllm_tensorized_marker"] = torch.tensor((1,), device="meta")
    serializer = TensorSerializer(str(tmp_path / "m/model.tensors"))
    serializer.write_state_dict(tensors)
    serializer.close()
    if marked:
        assert_plain(read(tmp_path / "m"), plain)
    else:
        assert "lm_head.weight in model.tensors differs" in refusal(tmp_path / "m")


def test_a_log_line_names_library_readers_limit_and_hashes(model: Path) -> None:
    weights = read(model, concurrency=3, memory_limit=1 << 20).weights
    assert weights.describe().startswith("tensorizer 2.")
    assert "concurrency 3, memory limit 1.05 MB, hashes are compared" in weights.describe()


def test_the_file_may_have_another_name(model: Path, tmp_path: Path) -> None:
    other = shutil.copytree(model, tmp_path / "m")
    (other / "model.tensors").rename(other / "llama-000.tensors")
    assert "tensorizer_uri" in refusal(other)
    assert read(other, tensorizer_uri=f"{other}/llama-%03d.tensors").slots


def test_weights_in_another_place_than_the_model_are_refused_with_the_command(
    model: Path, tmp_path: Path
) -> None:
    message = refusal(model, tensorizer_dir=str(tmp_path))
    assert f"hotstart serve {tmp_path} --load-format tensorizer" in message


def test_an_encrypted_file_is_read_with_its_key_and_no_other(plain: Path, tmp_path: Path) -> None:
    key, other = EncryptionParams.random(), EncryptionParams.random()
    encrypted = write_tensorizer(plain, tmp_path / "m", encryption=key)
    right, wrong = tmp_path / "right.key", tmp_path / "wrong.key"
    right.write_bytes(key.key)
    wrong.write_bytes(other.key)
    assert_plain(read(encrypted, encryption_keyfile=str(right)), plain)
    message = refusal(encrypted, encryption_keyfile=str(wrong))
    assert f"model.tensors: the tensor model.embed_tokens.weight cannot be decrypted with {wrong}" in message
    assert "is encrypted, and there is no key" in refusal(encrypted)


def test_a_key_for_a_file_that_is_not_encrypted_is_refused(model: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(bytes(32))
    assert "is not encrypted, and encryption_keyfile names a key" in refusal(
        model, encryption_keyfile=str(key)
    )
    key.write_bytes(bytes(31))
    assert "has 31 bytes" in refusal(model, encryption_keyfile=str(key))
    assert "cannot be read: No such file" in refusal(model, encryption_keyfile=str(tmp_path / "none"))


def damaged(model: Path, target: Path, change: Callable[[bytearray], object]) -> Path:
    shutil.copytree(model, target)
    data = bytearray((model / "model.tensors").read_bytes())
    change(data)
    (target / "model.tensors").write_bytes(data)
    return target


def test_a_flipped_bit_is_found_by_the_hash_of_its_tensor(model: Path, tmp_path: Path) -> None:
    ref = open_tensorizer(str(model)).tensors["model.layers.1.mlp.down_proj.weight"]

    def flip(data: bytearray) -> None:
        data[ref.offset + 100] ^= 1

    path = damaged(model, tmp_path / "m", flip)
    assert "the tensor model.layers.1.mlp.down_proj.weight has not the hash" in refusal(path)
    assert read(path, verify_hash=False).slots


def test_a_damaged_header_of_a_tensor_names_it(model: Path, tmp_path: Path) -> None:
    refs = list(open_tensorizer(str(model)).tensors.values())
    before, ref = refs[3], refs[4]

    def spoil(data: bytearray) -> None:
        data[before.offset + before.nbytes + 8 : ref.offset] = b"\xff" * (
            ref.offset - before.offset - before.nbytes - 8
        )

    with pytest.raises(ModelError, match=f"is damaged: the header of the tensor {ref.name} cannot be read"):
        read(damaged(model, tmp_path / "m", spoil))


@pytest.mark.parametrize(("byte", "bit"), [(4, 3), (7, 1), (12, 0), (20, 7), (60, 5)])
def test_a_flipped_bit_in_a_header_is_a_damaged_file(
    byte: int, bit: int, model: Path, tmp_path: Path
) -> None:
    """The first bytes are the header's length, and may ask for any memory."""
    refs = list(open_tensorizer(str(model)).tensors.values())
    header = refs[3].offset + refs[3].nbytes

    def flip(data: bytearray) -> None:
        data[header + byte] ^= 1 << bit

    with pytest.raises(ModelError, match=f"{refs[4].name} "):
        read(damaged(model, tmp_path / "m", flip))


def test_an_incomplete_file_names_the_tensor_it_ends_in(model: Path, tmp_path: Path) -> None:
    last = max(open_tensorizer(str(model)).tensors.values(), key=lambda ref: ref.offset)

    def cut(data: bytearray) -> None:
        del data[last.offset + 1 :]

    assert f"ends inside the tensor '{last.name}'" in refusal(damaged(model, tmp_path / "m", cut))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.__delitem__(slice(40, None)), "is no Tensorizer file"),
        (lambda data: data.__setitem__(slice(0, 5), b"PK\3\4."), "is no Tensorizer file"),
        (lambda data: data.__setitem__(5, 99), "has version 99"),
        (lambda data: data.__delitem__(slice(1000, None)), "ends inside its index"),
        (lambda data: data.__setitem__(slice(73, 75), b"\xff\xff"), "index cannot be read"),
        (lambda data: data.__setitem__(slice(57, 65), b"\xff" * 8), "index cannot be read"),
        (lambda data: data.__setitem__(slice(65, 73), b"\xff" * 8), "its index is said to have"),
        (lambda data: data.clear(), "is no Tensorizer file"),
    ],
)
def test_a_damaged_front_is_refused_before_the_library_sees_it(
    model: Path, change: Callable[[bytearray], object], message: str, tmp_path: Path
) -> None:
    assert message in refusal(damaged(model, tmp_path / "m", change))


def test_an_ordinary_checkpoint_is_refused_with_the_command_that_converts_it(plain: Path) -> None:
    message = refusal(plain)
    assert "ordinary checkpoint" in message
    assert f"hotstart convert tensorizer {plain} DST" in message


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"readers": 3}, "has no key 'readers' for --load-format tensorizer"),
        ({"num_readers": 0}, "num_readers is 0"),
        ({"tensorizer_config": {"num_readers": "x"}}, "num_readers is 'x'"),
        ({"num_readers": 2, "concurrency": 3}, "concurrency and num_readers, which differ"),
        ({"num_readers": 2, "tensorizer_config": {"num_readers": 3}}, "tensorizer_config.num_readers, which"),
        (
            {"verify_hash": False, "deserialization_kwargs": {"verify_hash": True}},
            "verify_hash, which differ",
        ),
        ({"tensorizer_uri": "m.tensors", "tensorizer_dir": "/b"}, "has tensorizer_uri and tensorizer_dir"),
        ({"verify_hash": False, "tensorizer_config": {"verify_hash": True}}, "verify_hash, which differ"),
        (
            {"verify_hash": False, "tensorizer_config": {"deserialization_kwargs": {"verify_hash": True}}},
            "deserialization_kwargs.verify_hash, which differ",
        ),
        ({"stream_kwargs": {"s3_region_name": "x"}}, "no key 'stream_kwargs.s3_region_name'"),
        ({"stream_kwargs": {"buffer_size": 1 << 64}}, "stream_kwargs.buffer_size is 18446744073709551616"),
        ({"stream_kwargs": [1]}, "stream_kwargs is a list"),
        ({"deserialization_kwargs": {"device": "cpu"}}, "no key 'deserialization_kwargs.device'"),
        ({"deserialization_kwargs": {"plaid_mode": True}}, "deserialization_kwargs.plaid_mode is refused"),
        ({"serialization_kwargs": {}}, "serialization_kwargs is refused"),
        ({"tensorizer_config": None}, "tensorizer_config is None"),
        ({"tensorizer_config": {"tensorizer_config": {}}}, "no key 'tensorizer_config.tensorizer_config'"),
        ({"tensorizer_config": {"memory_limit": 1}}, "no key 'tensorizer_config.memory_limit'"),
        ({"num_readers": 1 << 64}, "num_readers is 18446744073709551616"),
        ({"memory_limit": 1 << 64}, "memory_limit is 18446744073709551616"),
        ({"tensorizer_uri": "%q.tensors"}, "tensorizer_uri ends in '%q.tensors'"),
        ({"tensorizer_uri": "%0999999999d"}, "tensorizer_uri ends in '%0999999999d'"),
        ({"tensorizer_uri": "%d-%d.tensors"}, "tensorizer_uri ends in '%d-%d.tensors'"),
        ({"tensorizer_uri": "\ud800"}, r"tensorizer_uri is '\ud800'"),
        ({"tensorizer_dir": "\0"}, r"tensorizer_dir is '\x00'"),
        ({"encryption_keyfile": "\0"}, r"encryption_keyfile is '\x00'"),
        ({"encryption_keyfile": "/proc/nowhere"}, "/proc/nowhere cannot be read: No such file"),
        ({"encryption_keyfile": "/proc"}, "encryption_keyfile /proc is a directory"),
        ({"encryption_keyfile": "/dev/zero"}, "encryption_keyfile /dev/zero is no regular file"),
        ({"s3_access_key_id": "k", "s3_endpoint": "http://h"}, "has s3_access_key_id and s3_endpoint, and"),
    ],
    ids=str,
)
@pytest.mark.parametrize("place", ["directory", "web server"])
def test_a_wrong_option_is_refused_before_anything_is_read(
    place: str, tmp_path: Path, files: Files, extra: dict[str, Any], message: str
) -> None:
    """There is no such directory, and the server is never asked."""
    with FaultServer(files) as web:
        given = start(tmp_path / "none", f"{web.url}/m" if place == "web server" else "", **extra)
        with pytest.raises(HotstartError, match=re.escape(message)) as caught:
            prepare(given)
        assert web.requests == []
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"s3_endpoint": "not a url"}, "s3_endpoint in --model-loader-extra-config is no address"),
        ({"s3_secret_access_key": ["hush-hush"]}, "s3_secret_access_key is a list"),
        ({"s3_secret_access_key": 77077}, "s3_secret_access_key is not a text"),
        ({"tensorizer_config": {"s3_access_key_id": "hush-hush\0"}}, "s3_access_key_id is a text that"),
    ],
)
def test_a_wrong_setting_of_s3_is_refused_and_never_shown(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(HotstartError, match=re.escape(message)) as caught:
        check_loader(start(Path("/none"), "s3://models/m", **extra))
    assert "hush" not in str(caught.value)
    assert "77077" not in str(caught.value)


def test_a_key_that_would_never_end_is_refused(model: Path, tmp_path: Path) -> None:
    """A FIFO waits for whoever writes into it."""
    os.mkfifo(tmp_path / "key")
    assert "is no regular file" in refusal(model, encryption_keyfile=str(tmp_path / "key"))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_a_tensor_that_no_model_asks_for_may_have_any_dtype(
    dtype: torch.dtype, plain: Path, tmp_path: Path
) -> None:
    path = write_tensorizer(plain, tmp_path / "m")
    serializer = TensorSerializer(str(path / "model.tensors"))
    serializer.write_state_dict(
        load_file(plain / "model.safetensors") | {"freqs": torch.zeros(3, dtype=dtype)}
    )
    serializer.close()
    assert_plain(read(path), plain)


def test_files_of_several_ranks_are_refused_with_what_fits(model: Path, tmp_path: Path) -> None:
    other = shutil.copytree(model, tmp_path / "m")
    (other / "model.tensors").rename(other / "model-rank-000.tensors")
    shutil.copy(other / "model-rank-000.tensors", other / "model-rank-001.tensors")
    message = refusal(other)
    assert "holds Tensorizer files for --tensor-parallel-size 2" in message
    assert "tensorizer_uri" not in message


@pytest.mark.parametrize(
    ("server", "scheme"), [(S3Server, "s3"), (NanioServer, "s3"), (OpenS3Server, "s3"), (GcsServer, "gs")]
)
def test_it_is_read_from_stores(
    server: Any, scheme: str, plain: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server(model.parents[1]) as store:
        for name, value in store.environ.items():
            monkeypatch.setenv(name, value)
        found = read(model, f"{scheme}://models/m")
    assert_plain(found, plain)
    assert f"endpoint {store.endpoint}" in found.weights.describe()
    assert SECRET not in found.weights.describe()


def test_keys_of_the_options_go_before_the_environment_and_are_named(
    plain: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "other")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "other")
    with S3Server(model.parents[1]) as store:
        keys = {"s3_access_key_id": KEY, "s3_secret_access_key": SECRET, "s3_endpoint": store.endpoint}
        found = read(model, "s3://models/m", **keys)
        message = refusal(model, "s3://models/m", **{**keys, "s3_secret_access_key": "wrong-one"})
    assert_plain(found, plain)
    assert "keys of s3_access_key_id in --model-loader-extra-config" in found.weights.describe()
    assert "s3_access_key_id in --model-loader-extra-config" in message
    assert "wrong-one" not in message


def test_it_is_read_from_a_web_server(plain: Path, model: Path, files: Files) -> None:
    with FaultServer(files) as web:
        found = read(model, f"{web.url}/m")
    assert_plain(found, plain)
    assert f"web server {web.url}" in found.weights.describe()


def test_the_library_is_made_to_forget_what_it_gave(model: Path) -> None:
    """With no memory to spare it holds one tensor at a time."""
    checkpoint = open_tensorizer(str(model))
    load = LoadConfig(load_format="tensorizer", model_loader_extra_config={"memory_limit": 0})
    matched = match_named(specs_of(model), checkpoint, "auto")
    stream = open_stream(request_for(checkpoint, matched, load, "cpu", 1 << 30))
    names = []
    for name, _ in stream:
        names.append(name)
        assert sum(held is not None for held in stream.held()) <= 1
    stream.close()
    assert sorted(names) == sorted(checkpoint.tensors)


def test_a_refusal_during_the_load_names_who_was_asked_and_how(model: Path, files: Files) -> None:
    refuses = Fault(path="model.tensors", status=403)
    with FaultServer(files) as web:
        given = start_with(model, "tensorizer", location=f"{web.url}/m")
        web.faults.append(refuses)
        with pytest.raises(HotstartError, match=f"model.tensors: 403.*web server {web.url}"):
            filled(given)


@pytest.mark.parametrize("readers", [1, 4])
@pytest.mark.parametrize("fault", [{"cut": 5000}, {"status": 500}, {"cut": 5000, "reset": True}], ids=str)
def test_a_download_that_breaks_is_gone_on_with(
    fault: dict[str, Any], readers: int, plain: Path, model: Path, files: Files
) -> None:
    with FaultServer(files) as web:
        given = start_with(model, "tensorizer", location=f"{web.url}/m", num_readers=readers)
        web.faults.append(Fault(path="model.tensors", nth=1, **fault))
        found = filled(given)
    assert_plain(found, plain)


def test_no_program_downloads_whose_arguments_everybody_can_read(
    plain: Path, model: Path, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's own way is curl, with an address that needs no more credentials."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(subprocess, "Popen", lambda *given, **named: pytest.fail("a program was started"))
    with FaultServer(files) as web:
        found = read(model, f"{web.url}/m?sig=hush-hush")
    assert_plain(found, plain)
    assert "hush" not in found.weights.describe()


def test_certificates_of_ones_own_are_handed_to_the_library(
    plain: Path, model: Path, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import trustme  # not on a machine that is only for tests of a GPU

    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    with FaultServer(files, tls=context) as web:
        found = read(model, f"{web.url}/m")
    assert_plain(found, plain)


def test_a_library_that_does_not_open_leaves_no_file_and_no_thread(
    model: Path, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An open file would be a warning, which is an error here."""

    def fails(*given: object, **named: object) -> None:
        raise RuntimeError("out of tea")

    monkeypatch.setattr(TensorDeserializer, "__init__", fails)
    monkeypatch.setattr(TensorDeserializer, "__del__", lambda self: None)
    assert "out of tea" in refusal(model)
    with FaultServer(files) as web:
        assert "out of tea" in refusal(model, f"{web.url}/m")
    gc.collect()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ranges")]


def test_the_log_says_why_the_limit_is_what_it_is(model: Path) -> None:
    checkpoint = open_tensorizer(str(model))
    load, matched = LoadConfig(load_format="tensorizer"), match_named(specs_of(model), checkpoint, "auto")
    told = [str(plan(request_for(checkpoint, matched, load, "cpu", free))) for free in (8 << 30, 8)]
    assert "2.15 GB (a quarter of what is free, 2.15 GB at most)" in told[0]
    assert "(its largest tensor)" in told[1]


def test_what_the_library_raises_ends_the_load_by_name(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: object, **named: object) -> None:
        raise RuntimeError("out of tea")

    monkeypatch.setattr(TensorDeserializer, "read_tensors", fails)
    message = refusal(model)
    assert message.startswith("tensorizer 2.12")
    assert "RuntimeError: out of tea" in message
