"""Pre-sharded checkpoints, read by hotstart's own readers: the right bytes, and only a rank's own files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import tiny_models
from checkpoint_files import write_index
from fault_proxy import FaultServer
from hotstart.checkpoint.base import ShardFile
from hotstart.checkpoint.folder import LocalFolder
from hotstart.checkpoint.layout import open_checkpoint
from hotstart.checkpoint.remote import ObjectFolder, open_store
from hotstart.checkpoint.safetensors import Header
from hotstart.checkpoint.sharded_names import Rank
from hotstart.errors import HotstartError, ModelError
from hotstart.loading.image import Image
from hotstart.loading.image_store import ImageStore
from hotstart.loading.rank import RankPlan, plan_rank
from hotstart.models.registry import family_for
from hotstart.models.spec import WeightSpec
from hotstart.storage.source import Source
from object_servers import S3Server
from sharded_files import TP, parameters, write_sharded

VOCAB = 70
RECORDED = Path(__file__).parents[1] / "recorded"
STATES = [
    pytest.param("qwen2", 2, 1, id="qwen2, 2 ranks"),
    pytest.param("qwen2", 4, 1, id="qwen2, more ranks than heads of keys"),
    pytest.param("llama-tied", 1, 2, id="a tied Llama, 2 stages"),
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose vocabulary is no multiple of 64."""
    directory = tmp_path_factory.mktemp("plain")
    config = tiny_models.CONFIGS["llama"] | {"vocab_size": VOCAB, "dtype": "float32"}
    (directory / "config.json").write_text(json.dumps(config))
    tiny_models.write_weights(directory, config)
    return directory


def config_of(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return found


def specs(directory: Path) -> list[WeightSpec]:
    config = config_of(directory)
    family = family_for(config)
    return family.specs(family.geometry(config))


def load(plan: RankPlan) -> dict[str, Tensor]:
    """Every slot, read."""
    image = Image(plan.checkpoint)
    image.start()
    loads = list(plan.matched.loads)
    store = ImageStore(image, loads, {}, getattr(torch, plan.matched.dtype))
    image.wait()
    slots = {spec.slot: store.tensor(spec.slot) for spec, _ in loads}
    assert all(isinstance(tensor, Tensor) for tensor in slots.values())
    return slots  # type: ignore[return-value]


def expected(plain: Path, rank: Rank) -> dict[str, Tensor]:
    """By slot, what the rank's share of the plain weights is."""
    stored = load_file(plain / "model.safetensors")
    names = {
        "model.embed_tokens": "embed",
        "model.norm": "norm",
        "lm_head": "head",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "mlp_norm",
        "self_attn.qkv_proj": "qkv",
        "self_attn.o_proj": "o",
        "mlp.gate_up_proj": "gate_up",
        "mlp.down_proj": "down",
    }
    slots = {}
    for name, tensor in parameters(
        stored, config_of(plain), rank.tp_size, rank.tp_rank, rank.pp_size, rank.pp_rank
    ).items():
        layer, _, rest = name.removeprefix("model.layers.").partition(".")
        inside = layer.isdigit() and name.startswith("model.layers.")
        part = (rest if inside else name).removesuffix(".weight")
        slot = f"layers.{layer}.{names[part]}" if inside else names[part]
        if slot in ("embed", "head"):
            tensor = tensor[: max(0, VOCAB - rank.tp_rank * tensor.shape[0])]
        slots[slot] = tensor
    return slots


class CountingFolder(LocalFolder):
    """Counts which files are opened, and for how many bytes of weights."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.headers: list[str] = []
        self.opened: dict[str, int] = {}

    def header(self, name: str, file: int) -> Header | None:
        self.headers.append(name)
        return super().header(name, file)

    def source(self, file: ShardFile, *, direct: bool = False) -> Source:
        self.opened[Path(file.path).name] = file.size
        return super().source(file, direct=direct)


RANKS = [
    Rank(),
    *(Rank(2, rank) for rank in range(2)),
    *(Rank(4, rank) for rank in range(4)),
    *(Rank(2, rank, 2, stage) for rank in range(2) for stage in range(2)),
]


@pytest.mark.parametrize("rank", RANKS, ids=str)
def test_a_rank_has_its_rows_and_columns_of_the_plain_weights(
    plain: Path, rank: Rank, tmp_path: Path
) -> None:
    target = write_sharded(plain, tmp_path / "sharded", tp=rank.tp_size, pp=rank.pp_size, parts=2)
    found, wanted = load(plan_rank(str(target), specs(plain), rank)), expected(plain, rank)
    assert found.keys() == wanted.keys()
    for slot, tensor in found.items():
        assert torch.equal(tensor, wanted[slot]), slot


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_opens_its_own_files_only(plain: Path, rank: int, tmp_path: Path) -> None:
    target = write_sharded(plain, tmp_path / "sharded", tp=4, parts=3)
    folder = CountingFolder(target)
    plan = plan_rank(folder, specs(plain), Rank(4, rank))
    load(plan)
    own = {TP.format(rank=rank, part=part) for part in range(3)}
    assert sorted(folder.headers) == sorted(own)
    assert folder.opened == {name: (target / name).stat().st_size for name in own}
    assert {file.reason for file in plan.checkpoint.skipped} == {
        f"of rank {other}" for other in range(4) if other != rank
    }


def test_a_rank_asks_a_web_server_for_its_own_files_only(plain: Path, tmp_path: Path) -> None:
    target = write_sharded(plain, tmp_path / "sharded", tp=2, parts=2)
    files = {f"m/{file.name}": file.read_bytes() for file in target.iterdir()}
    with FaultServer(files) as web:
        folder = ObjectFolder(open_store(f"{web.url}/m", environ={}, patience=10), str(target))
        found = load(plan_rank(folder, specs(plain), Rank(2, 1)))
        answered = {path.lstrip("/") for path in web.gets if path.lstrip("/") in web.files}
    assert answered == {f"m/{TP.format(rank=1, part=part)}" for part in range(2)}
    own = sum(len(files[name]) for name in answered)
    assert own < web.sent < 2 * own + 10_000  # each file's header and weights; they are smaller than a head
    assert torch.equal(found["layers.1.qkv"], expected(plain, Rank(2, 1))["layers.1.qkv"])


def test_a_store_is_listed_and_only_own_files_are_read(plain: Path, tmp_path: Path) -> None:
    write_sharded(plain, tmp_path / "bucket" / "m", tp=2)
    with S3Server(tmp_path) as server:
        folder = ObjectFolder(open_store("s3://bucket/m", environ=server.environ, patience=10), str(tmp_path))
        plan = plan_rank(folder, specs(plain), Rank(2, 0))
        found = load(plan)
    assert [file.path for file in plan.checkpoint.files] == ["s3://bucket/m/model-rank-0-part-0.safetensors"]
    assert torch.equal(found["layers.0.down"], expected(plain, Rank(2, 0))["layers.0.down"])


def test_a_fused_weight_is_a_view_of_its_file(plain: Path, tmp_path: Path) -> None:
    plan = plan_rank(str(write_sharded(plain, tmp_path / "sharded")), specs(plain), Rank())
    image = Image(plan.checkpoint)
    image.start()
    store = ImageStore(image, list(plan.matched.loads), {}, torch.float32)
    image.wait()
    begin = torch.frombuffer(image.memory(0), dtype=torch.uint8).data_ptr()
    for spec, ref in plan.matched.loads:
        tensor = store.tensor(spec.slot)
        assert isinstance(tensor, Tensor)
        assert tensor.data_ptr() == begin + ref.offset


def refusal(directory: Path, plain: Path, rank: Rank, **options: Any) -> str:
    with pytest.raises(HotstartError) as caught:
        plan_rank(str(directory), specs(plain), rank, **options)
    return str(caught.value)


@pytest.mark.parametrize(("written", "asked"), [(2, 1), (4, 2), (1, 2), (2, 4)])
def test_files_for_another_number_of_ranks_are_refused_with_theirs(
    plain: Path, written: int, asked: int, tmp_path: Path
) -> None:
    target = write_sharded(plain, tmp_path / "sharded", tp=written)
    message = refusal(target, plain, Rank(asked, 0))
    assert (
        f"for --tensor-parallel-size {written}, and this start has --tensor-parallel-size {asked}" in message
    )
    assert f"hotstart convert sharded SRC DST --tensor-parallel-size {asked}" in message


def test_the_last_rank_is_missed_although_no_name_tells(plain: Path, tmp_path: Path) -> None:
    """Ranks 0 and 1 of 4 look like both of 2; shapes tell."""
    target = write_sharded(plain, tmp_path / "sharded", tp=4)
    for rank in (2, 3):
        (target / TP.format(rank=rank, part=0)).unlink()
    message = refusal(target, plain, Rank(2, 0))
    assert "for --tensor-parallel-size 4, and this start has --tensor-parallel-size 2" in message


def test_another_number_of_stages_is_refused(plain: Path, tmp_path: Path) -> None:
    target = write_sharded(plain, tmp_path / "sharded", pp=2)
    message = refusal(target, plain, Rank())
    assert "--tensor-parallel-size 1 --pipeline-parallel-size 2, and this start has" in message


def test_a_missing_rank_is_named_by_its_files(plain: Path, tmp_path: Path) -> None:
    target = write_sharded(plain, tmp_path / "sharded", tp=4)
    (target / TP.format(rank=2, part=0)).unlink()
    message = refusal(target, plain, Rank(4, 0))
    assert "no files of 1 rank" in message
    assert "model-rank-2-part-*.safetensors" in message


def test_a_missing_part_is_named(plain: Path, tmp_path: Path) -> None:
    target = write_sharded(plain, tmp_path / "sharded", tp=2, parts=3)
    (target / TP.format(rank=1, part=1)).unlink()
    assert "lacks 1 part of rank 1 of 2: model-rank-1-part-1.safetensors" in refusal(
        target, plain, Rank(2, 1)
    )


def test_a_missing_last_part_is_told_by_what_is_missing(plain: Path, tmp_path: Path) -> None:
    target = write_sharded(plain, tmp_path / "sharded", tp=2, parts=3)
    (target / TP.format(rank=1, part=2)).unlink()
    message = refusal(target, plain, Rank(2, 1))
    assert "of rank 1 of 2 missing from the 2 files" in message
    assert "if model-rank-1-part-1.safetensors is not the last part" in message.lower()


def test_a_file_of_another_conversion_is_named(plain: Path, tmp_path: Path) -> None:
    target = write_sharded(plain, tmp_path / "sharded", tp=2, parts=2)
    other = write_sharded(plain, tmp_path / "other", tp=4, parts=2)
    name = TP.format(rank=0, part=1)
    (other / name).replace(target / name)
    message = refusal(target, plain, Rank(2, 0))
    assert "for different numbers of ranks (2, 4)" in message
    assert name in message


def test_a_file_of_another_stage_is_named(plain: Path, tmp_path: Path) -> None:
    target = write_sharded(plain, tmp_path / "sharded", pp=2)
    first, second = (target / f"model-pp-{stage}-tp-0-part-0.safetensors" for stage in range(2))
    second.write_bytes(first.read_bytes())
    message = refusal(target, plain, Rank(1, 0, 2, 1))
    assert f"{second} holds model.layers.0." in message
    assert "layers 1 to 1" in message


def test_two_patterns_in_a_directory_are_told_apart_by_the_option(plain: Path, tmp_path: Path) -> None:
    target = write_sharded(plain, tmp_path / "sharded")
    other = write_sharded(plain, tmp_path / "other", pp=2)
    for file in other.glob("*.safetensors"):
        file.replace(target / file.name)
    assert "two patterns" in refusal(target, plain, Rank())
    assert plan_rank(str(target), specs(plain), Rank(), pattern=TP).matched.loads


def test_a_pattern_of_ones_own_finds_the_files(plain: Path, tmp_path: Path) -> None:
    pattern = "weights.{tp_rank:02d}.{part}.safetensors"
    target = write_sharded(plain, tmp_path / "sharded", tp=2, parts=2, pattern=pattern)
    plan = plan_rank(str(target), specs(plain), Rank(2, 1), pattern=pattern)
    assert [Path(file.path).name for file in plan.checkpoint.files] == [
        "weights.01.0.safetensors",
        "weights.01.1.safetensors",
    ]


@pytest.mark.parametrize(
    "pattern",
    ["m-{part}.safetensors", "m-{rnk}-{part}.safetensors", "m-{rank}.bin", "../m-{rank}-{part}.safetensors",
     "m-{rank", "m-{rank!r}-{part}.safetensors", "m.safetensors", "m-{rank:>9999}.safetensors"],
)  # fmt: skip
def test_a_pattern_that_cannot_name_files_is_refused(plain: Path, pattern: str, tmp_path: Path) -> None:
    target = write_sharded(plain, tmp_path / "sharded", tp=2)
    message = refusal(target, plain, Rank(2, 0), pattern=pattern)
    assert repr(pattern) in message
    assert "{part}" in message


def test_a_plain_checkpoint_is_refused_with_the_command_that_converts_it(plain: Path) -> None:
    message = refusal(plain, plain, Rank(2, 0))
    assert f"hotstart convert sharded {plain} DST --tensor-parallel-size 2" in message


@pytest.mark.parametrize("index", [False, True], ids=["without an index", "with the plain one's index"])
def test_a_sharded_directory_is_recognised_without_its_flag(plain: Path, index: bool, tmp_path: Path) -> None:
    target = write_sharded(plain, tmp_path / "sharded", tp=2)
    if index:  # vLLM's example copies it
        write_index(target, {"model.norm.weight": "model-00001-of-00001.safetensors"})
    with pytest.raises(ModelError, match="pre-sharded checkpoint for --tensor-parallel-size 2") as caught:
        open_checkpoint(str(target))
    assert "--load-format sharded_state" in caught.value.advice


def test_ranks_that_cannot_share_the_heads_are_refused(plain: Path, tmp_path: Path) -> None:
    target = write_sharded(plain, tmp_path / "sharded")
    for rank in (1, 2):
        (target / TP.format(rank=rank, part=0)).write_bytes((target / TP.format(rank=0, part=0)).read_bytes())
    assert "3 ranks cannot share" in refusal(target, plain, Rank(3, 0))


def test_an_embedding_of_other_rows_is_no_padding(plain: Path, tmp_path: Path) -> None:
    """Only whole 64s pad."""
    target = write_sharded(plain, tmp_path / "sharded")
    file = target / TP.format(rank=0, part=0)
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"] = torch.zeros(100, 64)
    save_file(tensors, file)
    message = refusal(target, plain, Rank())
    assert "model.embed_tokens.weight in model-rank-0-part-0.safetensors is [100, 64]" in message


@pytest.mark.parametrize("rank", [Rank(), Rank(2, 0), Rank(2, 1)], ids=str)
def test_files_that_vllm_wrote_hold_the_plain_weights(rank: Rank) -> None:
    """In two parts for one rank, and for two: see recorded/README.md."""
    plain = RECORDED / "vocab-70"
    files = "vocab-70-parts" if rank.tp_size == 1 else "vocab-70-tp2-pp1"
    plan = plan_rank(str(RECORDED / files), specs(plain), rank)
    found, wanted = load(plan), expected(plain, rank)
    assert found.keys() == wanted.keys()
    for slot, tensor in found.items():
        assert torch.equal(tensor, wanted[slot]), slot


@pytest.mark.parametrize(("name", "tp", "pp"), STATES)
def test_ranks_that_vllm_wrote_add_up_to_the_plain_weights(name: str, tp: int, pp: int) -> None:
    """See recorded/README.md: columns and rows of all ranks, and every layer once."""
    plain = load_file(RECORDED / name / "model.safetensors")
    found: dict[str, list[Tensor]] = {}
    for stage in range(pp):
        for rank in range(tp):
            plan = plan_rank(
                str(RECORDED / f"{name}-tp{tp}-pp{pp}"), specs(RECORDED / name), Rank(tp, rank, pp, stage)
            )
            for slot, tensor in load(plan).items():
                found.setdefault(slot, []).append(tensor)
    assert torch.equal(torch.cat(found["embed"][:tp]), plain["model.embed_tokens.weight"])
    for layer in range(config_of(RECORDED / name)["num_hidden_layers"]):
        for slot, stored in (("o", "self_attn.o_proj"), ("down", "mlp.down_proj")):
            whole = plain[f"model.layers.{layer}.{stored}.weight"]
            assert torch.equal(torch.cat(found[f"layers.{layer}.{slot}"], dim=1), whole)
        assert len(found[f"layers.{layer}.qkv"]) == tp
