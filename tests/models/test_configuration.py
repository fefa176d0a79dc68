"""``config.json`` becomes a geometry, or an error that names the value and what would do."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotstart.errors import ModelError, ProblemsFound
from hotstart.models.base import Geometry
from hotstart.models.registry import ARCHITECTURES, family_for
from tiny_models import CONFIGS

LLAMA = CONFIGS["llama"]
YARN = {"rope_type": "yarn", "original_max_position_embeddings": 128}


def geometry(config: dict[str, Any]) -> Geometry:
    return family_for(config).geometry(config)


def test_all_missing_sizes_are_named_at_once() -> None:
    config = {key: value for key, value in LLAMA.items() if key not in ("hidden_size", "vocab_size")}
    with pytest.raises(ProblemsFound) as error:
        geometry(config)
    assert "hidden_size is missing" in str(error.value)
    assert "vocab_size is missing" in str(error.value)
    assert error.value.exit_code == 3


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"hidden_size": "64"}, "hidden_size is '64'; expected a whole number"),
        ({"hidden_size": 64.5}, "hidden_size is 64.5; expected a whole number"),
        ({"hidden_size": True}, "hidden_size is True; expected a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; expected a whole number from 1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; expected a whole number from 1"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"vocab_size": None}, "vocab_size is null"),
        ({"hidden_size": 66}, "hidden_size 66 is no multiple of num_attention_heads 4"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        ({"head_dim": 15}, "head_dim is 15; expected an even number"),
        ({"hidden_act": "sillu"}, "hidden_act is 'sillu', which is not supported; expected one of gelu"),
        ({"hidden_act": "sillu"}, "Did you mean 'silu'?"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; expected a number"),
        ({"rms_norm_eps": 10**400}, "expected a number from 0 to 1"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; expected true or false"),
        ({"layer_types": ["linear_attention"] * 2}, "layer type 'linear_attention' is not supported"),
        ({"layer_types": ["full_attention"]}, "layer_types does not fit; expected a list of 2 names"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "expected full_attention for every layer"),
        ({"rope_scaling": {"type": "longrope"}}, "rope type 'longrope' is not supported; expected one of"),
        ({"rope_scaling": {"type": "linaer", "factor": 2.0}}, "Did you mean 'linear'?"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "dynamic", "factor": 0.5}}, "factor is 0.5; expected a number from 1"),
        ({"rope_scaling": [1]}, "rope parameters are a list; expected an object"),
        ({"rope_parameters": {"full_attention": {}}}, "per layer type (full_attention) are not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; expected 1"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
            "low_freq_factor 4 is not below high_freq_factor 4",
        ),
    ],
)
def test_bad_value_is_named_with_what_was_expected(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError) as error:
        geometry(LLAMA | values)
    assert said in str(error.value)
    assert "config.json" in str(error.value)


def test_sliding_layers_need_a_window() -> None:
    config = CONFIGS["qwen2-layer-types"] | {"use_sliding_window": False}
    with pytest.raises(ModelError, match="no sliding window is in use"):
        geometry(config)


@pytest.mark.parametrize(
    ("architecture", "suggestion"),
    [
        ("LlamaForCausallm", "Did you mean 'LlamaForCausalLM'?"),
        ("BertModel", ""),
        ("MambaForCausalLM", ""),
        ("Qwen3MoeForCausalLM", ""),
    ],
)
def test_unsupported_architecture_is_named_and_ours_are_listed(architecture: str, suggestion: str) -> None:
    with pytest.raises(ModelError) as error:
        family_for({"architectures": [architecture]})
    text = str(error.value)
    assert f"architecture {architecture} is not supported" in text
    assert all(name in text for name in ARCHITECTURES)
    assert suggestion in text
    assert suggestion or "Did you mean" not in text


def test_missing_architecture_is_suggested_from_the_model_type() -> None:
    with pytest.raises(ModelError, match=r'"architectures": \["Qwen3ForCausalLM"\]'):
        family_for({"model_type": "qwen3"})


def test_quantised_checkpoint_is_refused_by_its_method() -> None:
    with pytest.raises(ModelError, match="quantised \\(gptq\\)"):
        family_for(LLAMA | {"quantization_config": {"quant_method": "gptq"}})


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({}, 512),
        ({"type": "linear", "factor": 4.0}, 2048),
        ({"rope_type": "dynamic", "factor": 2.5}, 1280),
        (YARN | {"factor": 4.0}, 512),
        (YARN | {"factor": 8.0}, 1024),
        (YARN | {"factor": None}, 512),
        ({"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}, 512),
    ],
)
def test_longest_context_includes_the_scaling(rope: dict[str, Any], longest: int) -> None:
    assert geometry(LLAMA | {"rope_scaling": rope}).max_position_embeddings == longest


def test_old_and_new_rope_styles_mean_the_same() -> None:
    old = LLAMA | {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    new["rope_parameters"] = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
    assert geometry(old) == geometry(new)


@pytest.mark.parametrize(
    ("values", "windows"),
    [
        ({}, ()),
        ({"use_sliding_window": True, "max_window_layers": 1}, (0, 4096)),
        ({"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 7}, (7, 7)),
        ({"sliding_window": 7, "max_window_layers": 0}, ()),
    ],
)
def test_windows_of_qwen_layers(values: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert geometry(CONFIGS["qwen2"] | values).windows == windows


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_of_a_slot_follow_one_another_and_can_be_cut_in_their_units(name: str) -> None:
    config = CONFIGS[name]
    family = family_for(config)
    specs = family.specs(family.geometry(config))
    assert len({spec.stored[0] for spec in specs}) == len(specs)
    slots: dict[str, list[Any]] = {}
    for spec in specs:
        slots.setdefault(spec.slot, []).append(spec)
        if spec.shard:
            assert spec.shape[spec.shard.dim] % spec.shard.units == 0
    for rows in slots.values():
        assert rows[0].at == 0
        assert all(later.at == earlier.at + earlier.shape[0] for earlier, later in pairwise(rows))


def test_tied_head_is_the_embedding() -> None:
    tied, separate = (
        family_for(config).specs(geometry(config))[-1] for config in (CONFIGS["llama-tied"], LLAMA)
    )
    assert (tied.slot, tied.alias_of) == ("head", "embed")
    assert (separate.slot, separate.alias_of) == ("head", None)


def test_opt_cannot_go_beyond_its_learned_positions() -> None:
    import torch

    family, config = family_for(CONFIGS["opt"]), CONFIGS["opt"]
    with pytest.raises(ModelError, match="513 tokens exceeds the model's learned positions"):
        family.build(
            family.geometry(config),
            None,  # type: ignore[arg-type]  # refused before the store is asked
            dtype=torch.float32,
            device=torch.device("cpu"),
            max_positions=513,
        )


WORDS = st.sampled_from(["", "silu", "yarn", "linear", "dynamic", "type", "factor", "full_attention"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=4,
)
KEYS = sorted(
    {key for config in CONFIGS.values() for key in config if key != "architectures"}
    | {"head_dim", "partial_rotary_factor", "original_max_position_embeddings"}
)


@settings(deadline=None)
@given(st.sampled_from(sorted(CONFIGS)), st.dictionaries(st.sampled_from(KEYS), JSON, max_size=4))
def test_any_value_gives_a_geometry_or_an_error_for_people(name: str, values: dict[str, Any]) -> None:
    config = CONFIGS[name] | values
    try:
        family = family_for(config)
        specs = family.specs(family.geometry(config))
    except (ModelError, ProblemsFound):
        return
    assert all(size > 0 for spec in specs for size in spec.shape)


def test_specs_never_import_torch() -> None:
    program = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from tiny_models import CONFIGS\n"
        "from hotstart.models.registry import family_for\n"
        "for config in CONFIGS.values():\n"
        "    family = family_for(config)\n"
        "    assert family.specs(family.geometry(config))\n"
    )
    tests = Path(__file__).parents[1]
    source = tests.parent / "src"
    subprocess.run(
        [sys.executable, "-c", program], check=True, env={"PYTHONPATH": f"{source}:{tests}"}, timeout=60
    )
