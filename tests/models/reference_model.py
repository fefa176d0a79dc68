"""The plainest store and attention back end there can be; the models' tests compare against them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from hotstart.attention.base import BatchPlan
from hotstart.models.base import Geometry, Model
from hotstart.models.registry import family_for
from hotstart.models.spec import AttentionSpec

# Matrices are tiny here: meeting at a barrier costs more than a second thread gives.
torch.set_num_threads(1)


class LoadedStore:
    """Slots from a directory; ``parts``: several stored tensors of a slot stay apart."""

    def __init__(self, directory: Path, *, dtype: torch.dtype, parts: bool, device: str = "cpu") -> None:
        config = json.loads((directory / "config.json").read_text())
        family = family_for(config)
        stored: dict[str, Tensor] = {}
        for path in directory.glob("*.safetensors"):
            stored |= load_file(path)
        rows: dict[str, list[tuple[int, Tensor]]] = {}
        self.aliases: dict[str, str] = {}
        for spec in family.specs(family.geometry(config)):
            if spec.alias_of:
                self.aliases[spec.slot] = spec.alias_of
                continue
            tensor = stored.pop(next(name for name in spec.stored if name in stored)).to(device, dtype)
            assert tuple(tensor.shape) == spec.shape
            rows.setdefault(spec.slot, []).append((spec.at, tensor))
        assert not stored, f"tensors that no spec names: {sorted(stored)}"
        self.slots: dict[str, Tensor | tuple[Tensor, ...]] = {}
        for slot, placed in rows.items():
            tensors = [tensor for _, tensor in sorted(placed, key=lambda row: row[0])]
            whole = len(tensors) == 1 or not parts
            self.slots[slot] = torch.cat(tensors) if whole else tuple(tensors)

    def tensor(self, slot: str) -> Tensor | tuple[Tensor, ...]:
        return self.slots[self.aliases.get(slot, slot)]


class DenseAttention:
    """Keeps all keys and values of each sequence, by its table's first number; masked softmax."""

    graph_safe = False
    shares_prefix = False
    block_size = 16

    def __init__(self, specs: list[AttentionSpec]) -> None:
        self.specs = specs
        self.cache: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def refuse(self, specs: list[AttentionSpec]) -> list[str]:
        return []

    def plan(self, batch: BatchPlan) -> BatchPlan:
        return batch

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, meta: Any) -> Tensor:
        spec, outputs, start = self.specs[layer], [], 0
        for new, context, table in zip(meta.query_lens, meta.context_lens, meta.tables, strict=True):
            rows = slice(start, start + new)
            start += new
            keys, values = k[rows], v[rows]
            if context:
                old_keys, old_values = self.cache[table[0], layer]
                assert len(old_keys) == context
                keys, values = torch.cat((old_keys, keys)), torch.cat((old_values, values))
            self.cache[table[0], layer] = (keys.clone(), values.clone())
            outputs.append(_attention(q[rows], keys, values, spec))
        return torch.cat(outputs)


def _attention(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    group = spec.heads // spec.kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
    position = torch.arange(len(k), device=q.device)
    distance = position[len(k) - len(q) :, None] - position
    hidden = distance < 0
    if spec.window:
        hidden |= distance >= spec.window
    weights = scores.float().masked_fill(hidden, -torch.inf).softmax(-1).to(q.dtype)
    return torch.einsum("hqk,khd->qhd", weights, v)


@dataclass
class Sequence:
    """A prompt and what greedy decoding made of it."""

    prompt: list[int]
    output: list[int] = field(default_factory=list)
    computed: int = 0

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.output


class Runner:
    """Runs a model directory: any mix of sequences in a step, prompts in chunks if asked."""

    def __init__(
        self,
        directory: Path,
        *,
        dtype: torch.dtype = torch.float32,
        parts: bool = False,
        device: str = "cpu",
    ) -> None:
        self.device = device
        config = json.loads((directory / "config.json").read_text())
        family = family_for(config)
        self.geometry: Geometry = family.geometry(config)
        self.model: Model = family.build(
            self.geometry,
            LoadedStore(directory, dtype=dtype, parts=parts, device=device),
            dtype=dtype,
            device=torch.device(device),
            max_positions=self.geometry.max_position_embeddings,
        )

    @torch.inference_mode()
    def prompt_logits(self, prompt: list[int]) -> Tensor:
        """float32 [tokens, vocab]."""
        attention = DenseAttention(self.geometry.attention())
        sequence = Sequence(prompt)
        return self.model.logits(self._step([(0, sequence, len(prompt))], attention))

    @torch.inference_mode()
    def greedy(self, prompts: list[list[int]], tokens: int, *, chunk: int = 1 << 20) -> list[list[int]]:
        """``tokens`` ids for each prompt, all sequences in one batch, at most ``chunk`` new tokens each."""
        attention = DenseAttention(self.geometry.attention())
        sequences = [Sequence(prompt) for prompt in prompts]
        while any(len(s.output) < tokens for s in sequences):
            running = [(i, s) for i, s in enumerate(sequences) if len(s.output) < tokens]
            batch = [(i, s, min(chunk, len(s.ids) - s.computed)) for i, s in running]
            hidden = self._step(batch, attention)
            end = 0
            for _, sequence, new in batch:
                end += new
                sequence.computed += new
                if sequence.computed == len(sequence.ids):
                    logits = self.model.logits(hidden[end - 1 : end])
                    sequence.output.append(int(logits.argmax()))
        return [s.output for s in sequences]

    def _step(self, batch: list[tuple[int, Sequence, int]], attention: DenseAttention) -> Tensor:
        ids: list[int] = []
        positions: list[int] = []
        lengths: list[int] = []
        for _, sequence, new in batch:
            span = range(sequence.computed, sequence.computed + new)
            ids += sequence.ids[span.start : span.stop]
            positions += span
            lengths += [max(len(sequence.prompt), position + 1) for position in span]
        meta = attention.plan(
            BatchPlan(
                query_lens=[new for _, _, new in batch],
                context_lens=[sequence.computed for _, sequence, _ in batch],
                tables=[[number] for number, _, _ in batch],
            )
        )
        inputs = [torch.tensor(values, device=self.device) for values in (ids, positions, lengths)]
        with _no_waiting(self.device):
            return self.model.forward(inputs[0], inputs[1], attention, meta, inputs[2])


@contextmanager
def _no_waiting(device: str) -> Iterator[None]:
    """On CUDA, whatever waits for the device inside is an error."""
    if device != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
