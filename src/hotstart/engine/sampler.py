"""From logits to tokens.

Order, as in vLLM: logit bias and minimum length, penalties, temperature, min_p, top_k, top_p.
Random choices use the exponential race, argmax(p / e) with e ~ Exp(1) drawn over the whole
vocabulary, in logarithms: a seeded request consumes the same numbers whatever it is batched with,
and a token's score depends on nothing but its logit and its number, so the same seed gives the same
text alone and in a batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hotstart.device.generator import new_generator
from hotstart.engine.request import Request
from hotstart.engine.sampling_numbers import Draw, Edits, Numbers
from hotstart.engine.step_memory import CUT_BYTES, FLOAT
from hotstart.messages import TokenLogprobs

# Almost always holds the whole nucleus; rows where it does not get the full vocabulary sorted.
_NUCLEUS = 1024
_NEGATIVE_INFINITY = float("-inf")


@dataclass
class TopLogprobs:
    """Of some rows, a token and the likeliest ones; on its way to the host."""

    ids: Tensor
    """int64 [rows, 1 + likeliest]."""
    values: Tensor
    """float32, of the same shape."""
    ranks: Tensor
    """int64 [rows]: the token's own."""

    def message(self, row: int, count: int) -> TokenLogprobs:
        """The token and the ``count`` likeliest; call it when the step is done."""
        return TokenLogprobs(
            self.ids[row, : count + 1].tolist(),
            self.values[row, : count + 1].tolist(),
            [int(self.ranks[row]), *range(1, count + 1)],
        )


@dataclass
class Sampled:
    """What a step sampled."""

    tokens: Tensor
    """int64 [requests], still on the device."""
    wanted: list[tuple[int, int]]
    """(row, likeliest) of requests that asked for log probabilities, in the order of ``logprobs``."""
    logprobs: TopLogprobs | None


class Sampler:
    """Keeps the random state of each seeded request, and one for all others.

    On CUDA nothing here waits for the device: a step may be sampled while the one before it runs.
    """

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        self._shared = new_generator(device).manual_seed(seed)
        self._own: dict[int, torch.Generator] = {}

    def forget(self, request_id: int) -> None:
        """Drop a finished request's random state."""
        self._own.pop(request_id, None)

    def sample(self, logits: Tensor, requests: list[Request]) -> Sampled:
        """Choose the next token of each request.

        logits: float32 [requests, vocab], contiguous; may be overwritten.
        """
        numbers = Numbers()
        edits = Edits(numbers, requests, logits.shape[-1])
        draw = Draw(numbers, requests, logits.shape[-1])
        wanted = [(row, r.params.logprobs) for row, r in enumerate(requests) if r.params.logprobs is not None]
        asking = numbers.integers(row for row, _ in wanted) if wanted else None
        numbers.send(self.device)
        raw = None if asking is None else logits.index_select(0, numbers[asking]).log_softmax(-1)
        edits.apply(logits)
        if len(draw.requests) == len(requests):
            tokens = self._random(logits, draw, numbers)
        else:
            tokens = logits.argmax(-1)
            if draw.rows is not None:
                rows = numbers[draw.rows]
                tokens.index_copy_(0, rows, self._random(logits.index_select(0, rows), draw, numbers))
        if raw is None or asking is None:
            return Sampled(tokens, [], None)
        chosen = tokens.index_select(0, numbers[asking])
        return Sampled(tokens, wanted, top_logprobs(raw, chosen, max(count for _, count in wanted)))

    def _random(self, logits: Tensor, draw: Draw, numbers: Numbers) -> Tensor:
        """One draw for each of ``draw.requests``, whose logits these are."""
        logits = logits / numbers[draw.temperature].unsqueeze(-1)
        race = logits - self._noise(logits, draw.requests).log_()
        if draw.log_min_p is not None:
            floor = logits.amax(-1, keepdim=True) + numbers[draw.log_min_p].unsqueeze(-1)
            hidden = logits < floor
            logits = logits.masked_fill(hidden, _NEGATIVE_INFINITY)
            race.masked_fill_(hidden, _NEGATIVE_INFINITY)
        if not draw.any_cut:
            return race.argmax(-1)
        limit, top_p = numbers[draw.limit].unsqueeze(-1), numbers[draw.top_p].unsqueeze(-1)
        if draw.cut is None:
            return self._truncated(logits, race, draw.top_k, limit, top_p)
        tokens, rows = race.argmax(-1), numbers[draw.cut]
        logits, race = logits.index_select(0, rows), race.index_select(0, rows)
        return tokens.index_copy_(0, rows, self._truncated(logits, race, draw.top_k, limit, top_p))

    def _truncated(
        self, logits: Tensor, race: Tensor, top_k: list[int], limit: Tensor, top_p: Tensor
    ) -> Tensor:
        """The winner of each row's race among its top_k and top_p.

        limit: int64 [rows, 1], ``top_k`` on the device, vocab: off; top_p: float32 [rows, 1].
        """
        vocab, width = logits.shape[-1], max(top_k)
        rows = max(1, CUT_BYTES // (FLOAT * vocab))
        if len(top_k) > rows:
            parts = [slice(at, at + rows) for at in range(0, len(top_k), rows)]
            return torch.cat(
                [self._truncated(logits[p], race[p], top_k[p], limit[p], top_p[p]) for p in parts]
            )
        whole = width == vocab
        # Whether the partial sort was enough is only cheap to ask on CPU.
        if self.device.type != "cpu" or width <= _NUCLEUS:
            return _within(logits, race, limit, top_p, width, whole=whole)[0]
        tokens, complete = _within(logits, race, limit, top_p, min(_NUCLEUS, vocab), whole=whole)
        wide = (~complete).nonzero().squeeze(-1)
        if len(wide):
            again = max(top_k[row] for row in wide.tolist())
            tokens[wide] = _within(
                logits[wide], race[wide], limit[wide], top_p[wide], again, whole=again == vocab
            )[0]
        return tokens

    def _noise(self, logits: Tensor, requests: list[Request]) -> Tensor:
        noise = torch.empty_like(logits)
        if any(request.params.seed is None for request in requests):
            noise.exponential_(generator=self._shared)
        for row, request in enumerate(requests):
            seed = request.params.seed
            if seed is not None:
                generator = self._own.get(request.id)
                if generator is None:
                    generator = self._own[request.id] = new_generator(self.device).manual_seed(seed)
                noise[row].exponential_(generator=generator)
        # Exp(1) can round to zero in float32, and has no logarithm then.
        return noise.clamp_(min=torch.finfo(noise.dtype).tiny)


def _within(
    logits: Tensor, race: Tensor, limit: Tensor, top_p: Tensor, width: int, *, whole: bool
) -> tuple[Tensor, Tensor]:
    """Winners among each row's ``width`` likeliest tokens, and whether its choice ends within them.

    ``whole``: some row's limit is the vocabulary.
    """
    vocab = logits.shape[-1]
    values, ids = logits.topk(width, dim=-1)
    outside = torch.arange(width, device=logits.device) >= limit
    values = values.masked_fill(outside, _NEGATIVE_INFINITY)
    log_total = values.logsumexp(-1, keepdim=True)
    if whole:
        log_total = torch.where(limit == vocab, logits.logsumexp(-1, keepdim=True), log_total)
    probs = (values - log_total).exp()
    before = probs.cumsum(-1) - probs
    outside |= (before >= top_p) & (before > 0)
    complete = (limit <= width) | ((limit == vocab) & (before[:, -1:] >= top_p))
    winner = race.gather(-1, ids).masked_fill(outside, _NEGATIVE_INFINITY).argmax(-1, keepdim=True)
    return ids.gather(-1, winner).squeeze(-1), complete.squeeze(-1)


def top_logprobs(logprobs: Tensor, tokens: Tensor, count: int) -> TopLogprobs:
    """Each row's token and its ``count`` likeliest; logprobs float32 [rows, vocab], tokens int64 [rows]."""
    tokens = tokens.unsqueeze(-1)
    own = logprobs.gather(-1, tokens)
    values, ids = logprobs.topk(count)
    return TopLogprobs(
        torch.cat([tokens, ids], -1).to("cpu", non_blocking=True),
        torch.cat([own, values], -1).to("cpu", non_blocking=True),
        ((logprobs > own).sum(-1) + 1).to("cpu", non_blocking=True),
    )
