"""Weights against a model: what is missing, too many, of another shape, or tied and stored twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from checkpoint_files import CONFIG, Tensors, weights, write_model, write_shard
from hotstart.checkpoint.layout import open_checkpoint
from hotstart.errors import ModelError, ProblemsFound
from hotstart.loading.match import Matched, match
from hotstart.models.registry import family_for

TIED = {**CONFIG, "tie_word_embeddings": True}
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SHAPE = (64, 16)


def matched(
    path: Path,
    tensors: Tensors,
    config: dict[str, Any] = CONFIG,
    dtype: str = "auto",
    contents: dict[str, bytes] | None = None,
) -> Matched:
    write_model(path, shards=1, **config)
    write_shard(path / "model.safetensors", tensors, contents)
    family = family_for(config)
    return match(family.specs(family.geometry(config)), open_checkpoint(str(path)), dtype)


def test_every_weight_is_found(tmp_path: Path) -> None:
    found = matched(tmp_path, weights())
    assert {ref.name for _, ref in found.loads} == set(weights())
    assert (found.ignored, found.notes, found.warnings) == ((), (), ())
    assert found.nbytes == sum(ref.nbytes for _, ref in found.loads)


def test_names_without_the_prefix_are_found(tmp_path: Path) -> None:
    bare = {name.removeprefix("model."): value for name, value in weights().items()}
    assert {ref.name for _, ref in matched(tmp_path, bare).loads} == set(bare)


def test_missing_tensors_are_counted_and_a_few_named(tmp_path: Path) -> None:
    left = {name: value for name, value in weights().items() if "layers.1." not in name}
    with pytest.raises(ModelError, match=r"9 tensors missing from .*model\.layers\.1\..* and 6 more"):
        matched(tmp_path, left)


def test_unknown_tensors_inside_the_model_are_an_error(tmp_path: Path) -> None:
    extra: Tensors = {
        "model.layers.0.self_attn.q_proj.bias": ("BF16", (16,)),
        "model.layers.2.mlp.up_proj.weight": ("BF16", (24, 16)),
    }
    with pytest.raises(ModelError, match=r"2 tensors that the model has no place for in .*q_proj\.bias"):
        matched(tmp_path, weights() | extra)


def test_parts_beside_the_model_are_a_warning(tmp_path: Path) -> None:
    found = matched(tmp_path, weights() | {"vision_tower.conv.weight": ("BF16", (4,))})
    assert found.warnings == ("1 tensor not used by this model: vision_tower.conv.weight",)


def test_buffers_that_follow_from_the_configuration_are_ignored(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    found = matched(tmp_path, weights() | {name: ("F32", (2,))})
    assert (found.ignored, found.warnings) == ((name,), ())


def test_wrong_shape_says_found_and_expected(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"model\.norm\.weight in model\.safetensors is \[8\]; expected \[16\]"
    ):
        matched(tmp_path, weights() | {"model.norm.weight": ("BF16", (8,))})


def test_all_disagreements_are_reported_together(tmp_path: Path) -> None:
    wrong = weights() | {"model.norm.weight": ("BF16", (8,)), "model.layers.7.x.weight": ("BF16", (1,))}
    del wrong[HEAD]
    with pytest.raises(ProblemsFound) as caught:
        matched(tmp_path, wrong)
    assert len(caught.value.problems) == 3


def test_untied_model_without_a_head_is_offered_the_tie(tmp_path: Path) -> None:
    left = weights()
    del left[HEAD]
    with pytest.raises(ModelError) as caught:
        matched(tmp_path, left)
    text = str(caught.value)
    assert f"tie_word_embeddings is false in {tmp_path}/config.json" in text
    assert f"{tmp_path}/model.safetensors has no lm_head.weight" in text
    assert """--hf-overrides '{"tie_word_embeddings": true}'""" in text


def test_tied_model_needs_no_head(tmp_path: Path) -> None:
    found = matched(tmp_path, weights(TIED), TIED)
    assert HEAD not in {ref.name for _, ref in found.loads}
    assert [spec.alias_of for spec in found.tied] == ["embed"]


def test_equal_head_of_a_tied_model_is_dropped_with_a_line(tmp_path: Path) -> None:
    same = bytes(range(256)) * 8
    tensors = weights(TIED) | {HEAD: ("BF16", SHAPE)}
    found = matched(tmp_path, tensors, TIED, contents={EMBED: same, HEAD: same})
    assert found.notes == (f"{HEAD} equals {EMBED}, to which it is tied: not read",)
    assert found.ignored == (HEAD,)


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_different_head_of_a_tied_model_is_refused(dtype: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        matched(tmp_path, weights(TIED) | {HEAD: (dtype, SHAPE)}, TIED)
    assert f"{HEAD} in model.safetensors differs from {EMBED}" in str(caught.value)
    assert """--hf-overrides '{"tie_word_embeddings": false}'""" in str(caught.value)


def test_head_stands_for_the_embedding_that_a_writer_left_out(tmp_path: Path) -> None:
    tensors = weights(TIED) | {HEAD: ("BF16", SHAPE)}
    del tensors[EMBED]
    found = matched(tmp_path, tensors, TIED)
    assert {spec.slot: ref.name for spec, ref in found.loads}["embed"] == HEAD


def test_auto_dtype_is_what_most_bytes_are_stored_in(tmp_path: Path) -> None:
    found = matched(tmp_path, weights() | {"model.norm.weight": ("F32", (16,))})
    assert found.dtype == "bfloat16"
    assert list(found.stored) == ["BF16", "F32"]
    assert [ref.name for spec, ref in found.loads if spec.finish == "cast"] == ["model.norm.weight"]


def test_wanted_dtype_casts_what_is_stored_otherwise(tmp_path: Path) -> None:
    found = matched(tmp_path, weights(), dtype="float32")
    assert found.dtype == "float32"
    assert {spec.finish for spec, _ in found.loads} == {"cast"}


def test_eight_bit_weights_are_refused(tmp_path: Path) -> None:
    tensors = weights() | {"model.layers.0.mlp.up_proj.weight": ("F8_E4M3", (24, 16))}
    with pytest.raises(ModelError, match="1 tensor stored as F8_E4M3"):
        matched(tmp_path, tensors)
