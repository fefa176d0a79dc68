"""What the model wants against what the checkpoint holds, decided before a byte of weights is read.

A weight that is absent, too many or of another shape makes a server that answers nonsense, so
every disagreement is an error, and all of them are found at once.
"""

from __future__ import annotations

import os
import re
import threading
from collections import Counter
from collections.abc import Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from hotstart.checkpoint.base import Checkpoint, TensorRef
from hotstart.checkpoint.wording import count, few
from hotstart.errors import HotstartError, ModelError, raise_all
from hotstart.models.spec import WeightSpec

FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Stored dtypes that a model can be served from, and torch's names."""

_BUFFERS = re.compile(
    r"(^|\.)(rotary_emb\.(original_)?inv_freq|rotary_emb\.(cos|sin)_cached|rotary_emb\.cos_sin_cache|attn\.(masked_)?bias|position_ids)$"
)
"""What older programs stored although it follows from the configuration."""
_LAYER = re.compile(r"^(.*?)(\d+)\.")
_STEP = 8 << 20


class Matched(Struct, frozen=True):
    """The weights to load, and what was found on the way."""

    loads: tuple[tuple[WeightSpec, TensorRef], ...]
    """``finish`` is ``cast`` where the stored dtype is not the model's."""
    tied: tuple[WeightSpec, ...]
    """Specs with ``alias_of``: nothing is loaded for them."""
    dtype: str
    """torch's name of the dtype that the model computes in."""
    stored: dict[str, int]
    """Bytes to load by stored dtype (safetensors' names)."""
    ignored: tuple[str, ...] = ()
    """Stored tensors that are not read: buffers, and copies of tied weights."""
    notes: tuple[str, ...] = ()
    """Log lines."""
    warnings: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes to read."""
        return sum(self.stored.values())


def match(specs: Sequence[WeightSpec], checkpoint: Checkpoint, dtype_out: str = "auto") -> Matched:
    """Find a stored tensor for every spec, and a reason for every stored tensor.

    ``dtype_out`` is torch's name of the wanted dtype; ``auto``: what most bytes are stored in.
    Raises ModelError, or ProblemsFound with all of them; StorageError when a copy of a tied weight
    cannot be read for comparison.
    """
    wanted = [spec for spec in specs if spec.alias_of is None]
    tied = [spec for spec in specs if spec.alias_of is not None]
    copies = {spec.alias_of: ref for spec in tied if (ref := _find(spec, checkpoint)) is not None}
    # Writers that store one of two tied tensors may keep the head and drop the embedding.
    found = [(spec, _find(spec, checkpoint) or copies.get(spec.slot)) for spec in wanted]
    loads = [(spec, ref) for spec, ref in found if ref is not None]
    missing = [spec for spec, ref in found if ref is None]
    loaded = {ref.name: spec.slot for spec, ref in loads}
    originals = {spec.slot: ref for spec, ref in loads} if copies else {}
    pairs = [(originals[s], copy) for s, copy in copies.items() if s in originals and copy.name not in loaded]
    different = [pair for pair in pairs if not _equal(*pair, checkpoint)]
    known = {*loaded, *(copy.name for copy in copies.values())}
    inside, beside = _unknown(known, checkpoint)
    raise_all(
        [
            *_missing(missing, checkpoint),
            *_wrong_shapes(loads, checkpoint),
            *_wrong_dtypes(loads),
            *(_different(*pair, checkpoint) for pair in different),
            *_no_place(inside, checkpoint),
        ]
    )
    stored: Counter[str] = Counter()
    for _, ref in loads:
        stored[ref.dtype] += ref.nbytes
    dtype = _auto_dtype(stored) if dtype_out == "auto" else dtype_out
    return Matched(
        loads=tuple((_finished(spec, ref, dtype), ref) for spec, ref in loads),
        tied=tuple(tied),
        dtype=dtype,
        stored=dict(stored.most_common()),
        ignored=tuple(name for name in checkpoint.tensors if name not in loaded),
        notes=tuple(f"{copy.name} equals {one.name}, to which it is tied: not read" for one, copy in pairs),
        warnings=_not_used(beside),
    )


def _find(spec: WeightSpec, checkpoint: Checkpoint) -> TensorRef | None:
    for name in spec.stored:
        if (ref := checkpoint.tensors.get(name)) is not None:
            return ref
    return None


def _finished(spec: WeightSpec, ref: TensorRef, dtype: str) -> WeightSpec:
    return spec if FLOATS[ref.dtype] == dtype else replace(spec, finish="cast")


def _missing(missing: list[WeightSpec], checkpoint: Checkpoint) -> list[HotstartError]:
    heads = [spec for spec in missing if any(name.endswith("lm_head.weight") for name in spec.stored)]
    others = [spec.stored[0] for spec in missing if spec not in heads]
    problems: list[HotstartError] = [
        ModelError(
            f"tie_word_embeddings is false in {_config(checkpoint)}, "
            f"but {_where(checkpoint)} has no {head.stored[0]}",
            expected="the output head to be stored, or tied to the embedding",
            advice="If the model was trained with a tied head, pass "
            "--hf-overrides '{\"tie_word_embeddings\": true}'; otherwise copy the weights again",
        )
        for head in heads
    ]
    if others:
        problems.append(
            ModelError(
                f"{count(len(others), 'tensor')} missing from {_where(checkpoint)}: {few(others)}",
                expected=f"every weight that {_config(checkpoint)} calls for",
                advice="A weight file is missing, or config.json belongs to another model: copy both again",
            )
        )
    return problems


def _wrong_shapes(
    loads: Iterable[tuple[WeightSpec, TensorRef]], checkpoint: Checkpoint
) -> list[HotstartError]:
    wrong = [(spec, ref) for spec, ref in loads if spec.shape != ref.shape]
    if not wrong:
        return []
    spec, ref = wrong[0]
    return [
        ModelError(
            f"{count(len(wrong), 'tensor')} of another shape: "
            f"{ref.name} in {_file(ref, checkpoint)} is {list(ref.shape)}",
            expected=f"{list(spec.shape)}, by {_config(checkpoint)}",
            advice="config.json and the weights belong to different models: copy both from the same place",
        )
    ]


def _wrong_dtypes(loads: Iterable[tuple[WeightSpec, TensorRef]]) -> list[HotstartError]:
    wrong = [ref for _, ref in loads if ref.dtype not in FLOATS]
    kinds = sorted({ref.dtype for ref in wrong})
    if not wrong:
        return []
    return [
        ModelError(
            f"{count(len(wrong), 'tensor')} stored as {', '.join(kinds)}: {wrong[0].name}",
            expected=f"one of {', '.join(FLOATS)}",
            advice="Quantised weights are not supported: serve the unquantised checkpoint of the same model",
        )
    ]


def _different(original: TensorRef, copy: TensorRef, checkpoint: Checkpoint) -> HotstartError:
    return ModelError(
        f"tie_word_embeddings is true in {_config(checkpoint)}, "
        f"but {copy.name} in {_file(copy, checkpoint)} differs from {original.name}",
        expected="no output head, or one that equals the embedding",
        advice="If the model was trained with a head of its own, pass "
        "--hf-overrides '{\"tie_word_embeddings\": false}'; otherwise remove the tensor",
    )


def _equal(one: TensorRef, other: TensorRef, checkpoint: Checkpoint) -> bool:
    """Compares the stored bytes, in steps: a head may be larger than memory allows twice."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    assert checkpoint.folder is not None
    left = checkpoint.folder.source(checkpoint.files[one.file])
    right = checkpoint.folder.source(checkpoint.files[other.file])
    stop = threading.Event()
    try:
        for done in range(0, one.nbytes, _STEP):
            length = min(_STEP, one.nbytes - done)
            pair = bytearray(length), bytearray(length)
            left.read_into(memoryview(pair[0]), one.offset + done, stop)
            right.read_into(memoryview(pair[1]), other.offset + done, stop)
            if pair[0] != pair[1]:
                return False
        return True
    finally:
        left.close()
        right.close()


def _unknown(known: set[str], checkpoint: Checkpoint) -> tuple[list[str], list[str]]:
    """Unknown tensors inside the model, and those beside it.

    A bias beside a known weight, or a layer beyond the last one, changes the answer; a vision
    tower or a value head stands beside the model and does not.
    """
    unknown = [name for name in checkpoint.tensors if name not in known and not _BUFFERS.search(name)]
    if not unknown:
        return [], []
    modules = {name.rpartition(".")[0] for name in known}
    stacks = {match[1] for match in map(_LAYER.match, known) if match}
    inside: list[str] = []
    beside: list[str] = []
    for name in unknown:
        layer = _LAYER.match(name)
        within = name.rpartition(".")[0] in modules or (layer is not None and layer[1] in stacks)
        (inside if within else beside).append(name)
    return inside, beside


def _no_place(names: list[str], checkpoint: Checkpoint) -> list[HotstartError]:
    if not names:
        return []
    ref = checkpoint.tensors[names[0]]
    return [
        ModelError(
            f"{count(len(names), 'tensor')} that the model has no place for in {_where(checkpoint)}: "
            f"{few(names)} ({ref.dtype} {list(ref.shape)} in {_file(ref, checkpoint)})",
            expected=f"only weights that {_config(checkpoint)} calls for",
            advice="config.json belongs to another model or counts too few layers: copy both again",
        )
    ]


def _not_used(names: list[str]) -> tuple[str, ...]:
    return (f"{count(len(names), 'tensor')} not used by this model: {few(names)}",) if names else ()


def _auto_dtype(stored: Counter[str]) -> str:
    most = stored.most_common(1)[0][0] if stored else "F32"
    return "float32" if most == "F64" else FLOATS[most]


def _config(checkpoint: Checkpoint) -> str:
    return os.path.join(checkpoint.path, "config.json")


def _file(ref: TensorRef, checkpoint: Checkpoint) -> str:
    return os.path.basename(checkpoint.files[ref.file].path)


def _where(checkpoint: Checkpoint) -> str:
    if len(checkpoint.files) == 1:
        return checkpoint.files[0].path
    return f"the {len(checkpoint.files)} weight files of {checkpoint.path}"
