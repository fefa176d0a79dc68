"""Rotary position parameters, normalised from the styles found in ``config.json``; torch-free.

Old files carry ``rope_theta`` and ``rope_scaling`` (with ``type`` or ``rope_type``), newer ones one
``rope_parameters`` object. Both become one flat dict whose keys are transformers' names, complete
with defaults, so that ``layers.rope`` only computes.
"""

from __future__ import annotations

from typing import Any

from hotstart.models.fields import MAX_CONTEXT, Fields, nearest

ROPE_TYPES = ("default", "dynamic", "linear", "llama3", "yarn")
DEFAULT_THETA = 10000.0


def rope_parameters(fields: Fields, head_dim: int, max_positions: int) -> dict[str, Any]:
    """The normalised parameters; problems are noted in ``fields``.

    Always holds ``rope_type``, ``rope_theta`` and ``original_max_position_embeddings``, the length
    before scaling; the rest depends on the type.
    """
    raw = fields.values.get("rope_scaling") or fields.values.get("rope_parameters") or {}
    if not isinstance(raw, dict):
        fields.problem(f"rope parameters are a {type(raw).__name__}", expected="an object")
        return {}
    nested = sorted(key for key, value in raw.items() if isinstance(value, dict))
    if nested:
        fields.problem(
            f"rope parameters per layer type ({', '.join(nested)}) are not supported",
            expected="one set of rope parameters for all layers",
        )
        return {}
    rope_type = raw.get("rope_type", raw.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        fields.problem(
            f"rope type {rope_type!r} is not supported",
            expected=f"one of {', '.join(ROPE_TYPES)}",
            advice=nearest(rope_type, ROPE_TYPES),
        )
        return {}
    if head_dim % 2:
        fields.problem(f"head_dim is {head_dim}", expected="an even number, as rotary positions need")
    inherited = {
        key: fields.values[key]
        for key in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
        if fields.values.get(key) is not None
    }
    rope = Fields({**inherited, **raw}, f"{fields.where}, rope parameters")
    if "original_max_position_embeddings" in inherited:  # the outer value wins, as in transformers
        rope.values["original_max_position_embeddings"] = inherited["original_max_position_embeddings"]
    parameters = _read(rope, rope_type, head_dim, max_positions)
    fields.problems += rope.problems
    return parameters


def longest_context(rope: dict[str, Any], max_positions: int) -> int:
    """Tokens that the scaling allows for, given ``max_position_embeddings`` of the configuration.

    linear and dynamic stretch the stated length; yarn stretches the length it started from. Files
    for llama3 already state the stretched length.
    """
    factor = rope.get("factor", 1.0)
    match rope.get("rope_type"):
        case "linear" | "dynamic":
            return int(max_positions * factor)
        case "yarn":
            return max(max_positions, int(rope["original_max_position_embeddings"] * factor))
    return max_positions


def _read(rope: Fields, rope_type: str, head_dim: int, max_positions: int) -> dict[str, Any]:
    partial = rope.number("partial_rotary_factor", low=0.0, high=1.0, default=1.0)
    if partial != 1.0:
        rope.problem(f"partial_rotary_factor is {partial:g}", expected="1: this family rotates whole heads")
    parameters: dict[str, Any] = {
        "rope_type": rope_type,
        "rope_theta": rope.number("rope_theta", low=1.01, high=1e15, default=DEFAULT_THETA),
        "original_max_position_embeddings": max_positions,
    }
    if rope_type in ("llama3", "yarn"):
        parameters["original_max_position_embeddings"] = rope.integer(
            "original_max_position_embeddings", high=MAX_CONTEXT, default=max_positions
        )
    if rope_type == "yarn":
        return parameters | _read_yarn(rope, max_positions, parameters["original_max_position_embeddings"])
    if rope_type != "default":
        parameters["factor"] = rope.number("factor", low=1.0, high=1e6)
    if rope_type == "llama3":
        low = rope.number("low_freq_factor", low=1e-6, high=1e6)
        high = rope.number("high_freq_factor", low=1e-6, high=1e6)
        if not rope.problems and low >= high:
            rope.problem(
                f"low_freq_factor {low:g} is not below high_freq_factor {high:g}",
                expected="low_freq_factor < high_freq_factor",
            )
        parameters |= {"low_freq_factor": low, "high_freq_factor": high}
    if rope_type == "dynamic" and head_dim <= 2:
        rope.problem(f"head_dim is {head_dim}", expected="more than 2, as dynamic rope scaling needs")
    return parameters


def _read_yarn(rope: Fields, max_positions: int, original: int) -> dict[str, Any]:
    parameters: dict[str, Any] = {
        # transformers infers a factor that is null from the two lengths
        "factor": rope.number("factor", low=1.0, high=1e6, default=max(1.0, max_positions / original)),
        "beta_fast": rope.number("beta_fast", low=0.0, high=1e6, default=32.0) or 32.0,
        "beta_slow": rope.number("beta_slow", low=0.0, high=1e6, default=1.0) or 1.0,
        "truncate": rope.flag("truncate", True),
    }
    for name in ("attention_factor", "mscale", "mscale_all_dim"):
        if rope.values.get(name) is not None:
            parameters[name] = rope.number(name, low=0.0, high=1e6)
    return parameters
