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

from hotstart.engine.request import Request
from hotstart.messages import TokenLogprobs

_GREEDY_BELOW = 1e-5
# Almost always holds the whole nucleus; rows where it does not get the full vocabulary sorted.
_NUCLEUS = 1024
_NEGATIVE_INFINITY = float("-inf")


@dataclass
class Sampled:
    """What a step sampled, still on the device."""

    tokens: Tensor
    """int64 [requests]."""
    logprobs: list[tuple[int, Tensor, Tensor, Tensor]]
    """(row, ids, log probabilities, ranks) of requests that asked for them, chosen token first."""


class Sampler:
    """Keeps the random state of seeded requests; others draw from torch's own."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        torch.manual_seed(seed)
        self._own: dict[int, torch.Generator] = {}

    def forget(self, request_id: int) -> None:
        """Drop a finished request's random state."""
        self._own.pop(request_id, None)

    def sample(self, logits: Tensor, requests: list[Request]) -> Sampled:
        """Choose the next token of each request; logits float32 [requests, vocab], may be overwritten."""
        wanted = [
            (row, request) for row, request in enumerate(requests) if request.params.logprobs is not None
        ]
        raw = {row: logits[row].log_softmax(-1) for row, _ in wanted}
        self._edit(logits, requests)
        random = [row for row, r in enumerate(requests) if r.params.temperature >= _GREEDY_BELOW]
        if len(random) == len(requests):
            tokens = self._random(logits, requests)
        else:
            tokens = logits.argmax(-1)
            if random:
                rows = torch.tensor(random, device=self.device)
                tokens[rows] = self._random(logits[rows], [requests[row] for row in random])
        return Sampled(
            tokens, [(row, *top_logprobs(raw[row], tokens[row], r.params.logprobs or 0)) for row, r in wanted]
        )

    def _edit(self, logits: Tensor, requests: list[Request]) -> None:
        """Bias, minimum length and penalties, in place, only for the rows that ask for them."""
        for row, request in enumerate(requests):
            params = request.params
            line = logits[row]
            if params.logit_bias:
                biased = torch.tensor(list(params.logit_bias), device=self.device)
                line[biased] += torch.tensor(list(params.logit_bias.values()), device=self.device)
            if request.num_outputs <= params.min_tokens:  # the token to be sampled is counted
                # A stop id that the model does not have can never be sampled.
                banned = sorted(t for t in request.eos_ids | request.stop_ids if t < line.shape[-1])
                if banned:
                    line[torch.tensor(banned, device=self.device)] = _NEGATIVE_INFINITY
            if request.needs_host_state:
                self._penalize(line, request)

    def _penalize(self, line: Tensor, request: Request) -> None:
        params = request.params
        tokens = torch.tensor(request.tokens, device=self.device)
        if params.repetition_penalty != 1.0:
            seen = torch.unique(tokens)
            value = line[seen]
            line[seen] = torch.where(
                value > 0, value / params.repetition_penalty, value * params.repetition_penalty
            )
        output = tokens[request.num_prompt :]
        if output.numel() and (params.presence_penalty or params.frequency_penalty):
            ids, counts = torch.unique(output, return_counts=True)
            line[ids] -= params.presence_penalty + params.frequency_penalty * counts.to(line.dtype)

    def _random(self, logits: Tensor, requests: list[Request]) -> Tensor:
        """One draw per row; all rows have a temperature."""
        params = [request.params for request in requests]
        logits = logits / self._column([p.temperature for p in params])
        race = logits - self._noise(logits, requests).log_()
        if any(p.min_p > 0 for p in params):
            floor = logits.amax(-1, keepdim=True) + self._column([p.min_p for p in params]).log()
            hidden = logits < floor
            logits = logits.masked_fill(hidden, _NEGATIVE_INFINITY)
            race.masked_fill_(hidden, _NEGATIVE_INFINITY)
        vocab = logits.shape[-1]
        cut = [row for row, p in enumerate(params) if 0 < p.top_k < vocab or p.top_p < 1.0]
        if not cut:
            return race.argmax(-1)
        top_k = [params[row].top_k if 0 < params[row].top_k < vocab else vocab for row in cut]
        top_p = [params[row].top_p for row in cut]
        if len(cut) == len(requests):
            return self._truncated(logits, race, top_k, top_p)
        tokens = race.argmax(-1)
        rows = torch.tensor(cut, device=self.device)
        tokens[rows] = self._truncated(logits[rows], race[rows], top_k, top_p)
        return tokens

    def _truncated(self, logits: Tensor, race: Tensor, top_k: list[int], top_p: list[float]) -> Tensor:
        """The winner of each row's race among its top_k and top_p; ``top_k`` = vocab: off."""
        vocab, width = logits.shape[-1], max(top_k)
        if self.device.type != "cpu" or width <= _NUCLEUS:
            return self._within(logits, race, top_k, top_p, width)[0]
        tokens, complete = self._within(logits, race, top_k, top_p, min(_NUCLEUS, vocab))
        if not bool(complete.all()):
            rows = (~complete).nonzero().squeeze(-1)
            again = rows.tolist()
            top_k, top_p = [top_k[row] for row in again], [top_p[row] for row in again]
            tokens[rows] = self._within(logits[rows], race[rows], top_k, top_p, max(top_k))[0]
        return tokens

    def _within(
        self, logits: Tensor, race: Tensor, top_k: list[int], top_p: list[float], width: int
    ) -> tuple[Tensor, Tensor]:
        """Winners among each row's ``width`` likeliest tokens, and whether its choice ends within them."""
        vocab = logits.shape[-1]
        values, ids = logits.topk(width, dim=-1)
        limit = self._column(top_k)
        outside = torch.arange(width, device=self.device) >= limit
        values = values.masked_fill(outside, _NEGATIVE_INFINITY)
        log_total = values.logsumexp(-1, keepdim=True)
        if max(top_k) == vocab:
            log_total = torch.where(limit == vocab, logits.logsumexp(-1, keepdim=True), log_total)
        probs = (values - log_total).exp()
        before = probs.cumsum(-1) - probs
        # Rounding must not end a nucleus that is everything.
        nucleus = self._column([p if p < 1.0 else float("inf") for p in top_p])
        outside |= (before >= nucleus) & (before > 0)
        complete = (limit <= width) | ((limit == vocab) & (before[:, -1:] >= nucleus))
        winner = race.gather(-1, ids).masked_fill(outside, _NEGATIVE_INFINITY).argmax(-1, keepdim=True)
        return ids.gather(-1, winner).squeeze(-1), complete.squeeze(-1)

    def _noise(self, logits: Tensor, requests: list[Request]) -> Tensor:
        noise = torch.empty_like(logits)
        if any(request.params.seed is None for request in requests):
            noise.exponential_()
        for row, request in enumerate(requests):
            seed = request.params.seed
            if seed is not None:
                generator = self._own.get(request.id)
                if generator is None:
                    generator = self._own[request.id] = new_generator(self.device)
                    generator.manual_seed(seed)
                noise[row].exponential_(generator=generator)
        # Exp(1) can round to zero in float32, and has no logarithm then.
        return noise.clamp_(min=torch.finfo(noise.dtype).tiny)

    def _column(self, values: list[float] | list[int]) -> Tensor:
        return torch.tensor(values, device=self.device).unsqueeze(-1)


def new_generator(device: torch.device) -> torch.Generator:
    """A random state of its own. The first call loads a part of torch that a start leaves out (150 ms)."""
    import torch._prims.rng_prims  # since 2.12, torch.Generator refuses to work without it

    return torch.Generator(device)


def top_logprobs(logprobs: Tensor, token: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """(ids, values, ranks) of the token and of the ``count`` likeliest; logprobs float32 [vocab]."""
    own = logprobs[token].unsqueeze(0)
    values, ids = logprobs.topk(count)
    rank = (logprobs > own).sum().unsqueeze(0) + 1
    ranks = torch.arange(1, count + 1, device=logprobs.device)
    return (
        torch.cat([token.reshape(1), ids]),
        torch.cat([own, values]),
        torch.cat([rank, ranks]),
    )


def to_message(ids: Tensor, values: Tensor, ranks: Tensor) -> TokenLogprobs:
    """The form that goes to the frontend."""
    return TokenLogprobs(ids.tolist(), values.tolist(), ranks.tolist())
