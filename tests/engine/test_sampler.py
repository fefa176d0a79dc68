"""Which tokens can be chosen, how often, and that a seed means the same in every company."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hotstart.engine.request import Request
from hotstart.engine.sampler import Sampler
from hotstart.messages import NewRequest, SamplingParams, TokenLogprobs, pack_ids

CPU = torch.device("cpu")
EOS = 3
_numbers = iter(range(1, 1 << 30))


def request(prompt: tuple[int, ...] = (1,), outputs: tuple[int, ...] = (), **params: object) -> Request:
    """A request whose next token is about to be sampled."""
    sampling = SamplingParams(**{"temperature": 1.0, **params})  # type: ignore[arg-type]
    found = Request(NewRequest(next(_numbers), pack_ids([*prompt, *outputs]), sampling), (EOS,))
    found.num_prompt = len(prompt)
    found.pending = 1
    return found


def choose(logits: Tensor, *requests: Request, seed: int = 0) -> list[int]:
    found: list[int] = Sampler(CPU, seed).sample(logits.clone(), list(requests)).tokens.tolist()
    return found


def draw(logits: Tensor, count: int = 4000, **params: object) -> Tensor:
    """How often each token is chosen, as shares."""
    vocab = logits.shape[-1]
    sampler = Sampler(CPU, 7)
    tokens = sampler.sample(logits.repeat(count, 1), [request(**params)] * count).tokens
    return torch.bincount(tokens, minlength=vocab) / count


def reference(logits: Tensor, *, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """The distribution, one rule after the other, in float64 and by sorting."""
    probs = (logits.double() / temperature).softmax(-1)
    probs = torch.where(probs < min_p * probs.max(), 0.0, probs)
    order = probs.argsort(descending=True)
    if top_k > 0:
        probs[order[top_k:]] = 0
    probs = probs / probs.sum()
    before = probs[order].cumsum(0) - probs[order]
    probs[order[(before >= top_p) & (before > 0)]] = 0
    return probs / probs.sum()


def assert_drawn_from(shares: Tensor, expected: Tensor, count: int = 4000) -> None:
    """Nothing impossible was drawn, and shares (rare ones as one) are within five standard deviations."""
    assert not shares[expected == 0].any()
    rare = expected < 10 / count
    shares = torch.cat((shares[~rare], shares[rare].sum().reshape(1)))
    expected = torch.cat((expected[~rare], expected[rare].sum().reshape(1)))
    deviation = (expected * (1 - expected) / count).sqrt()
    assert ((shares - expected).abs() <= 5 * deviation + 1e-9).all()


RULES: list[dict[str, float]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 5},
    {"top_k": 1},
    {"top_k": -1, "top_p": 0.7},
    {"top_p": 0.05},
    {"min_p": 0.1},
    {"top_k": 12, "top_p": 0.8, "min_p": 0.02, "temperature": 1.4},
    {"top_k": 10_000},
]


@pytest.mark.parametrize("vocab", [40, 3000], ids=["small", "beyond-the-partial-sort"])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_tokens_are_drawn_from_the_reference_distribution(rule: dict[str, float], vocab: int) -> None:
    logits = 2 * torch.randn(vocab, generator=torch.Generator().manual_seed(1))
    whole = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | rule
    expected = reference(logits, **whole)  # type: ignore[arg-type]
    assert_drawn_from(draw(logits, **rule), expected)


@pytest.mark.parametrize("rule", [{"top_p": 0.9}, {"top_p": 0.9, "top_k": 1500}, {"top_k": 1500}], ids=str)
def test_nucleus_wider_than_the_partial_sort_is_whole(rule: dict[str, float]) -> None:
    # Nearly uniform: 90 % are 1800 of 2000 tokens.
    logits = torch.linspace(0, 0.001, 2000)
    expected = reference(logits, **({"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | rule))  # type: ignore[arg-type]
    shares = draw(logits, count=3000, **rule)
    assert (expected > 0).sum() > 1024
    assert not shares[expected == 0].any()
    assert shares[torch.topk(logits, 1024).indices].sum() == pytest.approx(
        float(expected[torch.topk(logits, 1024).indices].sum()), abs=0.05
    )


def test_everything_can_be_drawn_beside_a_row_with_a_nucleus() -> None:
    logits = torch.zeros(2, 3000)
    logits[0, 0] = 20.0
    drawn = {choose(logits, request(top_p=0.5), request(), seed=seed)[1] for seed in range(40)}
    assert len(drawn) > 30


def test_greedy_takes_the_first_of_equal_tokens() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    assert choose(logits, request(temperature=0.0), request(temperature=1e-6)) == [1, 0]


def test_greedy_and_random_rows_of_a_step_do_not_disturb_each_other() -> None:
    logits = torch.zeros(4, 100)
    logits[:, 5] = 1.0
    rows = [request(temperature=0), request(seed=3), request(temperature=0), request(seed=4)]
    tokens = choose(logits, *rows)
    assert tokens[0] == tokens[2] == 5
    assert [tokens[1]] == choose(logits[:1], request(seed=3))
    assert [tokens[3]] == choose(logits[:1], request(seed=4))


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}])
def test_impossible_tokens_are_never_chosen(params: dict[str, float]) -> None:
    logits = torch.full((1, 50), -math.inf)
    logits[0, 17] = -80.0
    assert choose(logits, request(**params)) == [17]


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_k": 2, "top_p": 0.5, "min_p": 0.5}])
def test_row_without_any_possible_token_ends_in_a_token_not_in_an_error(params: dict[str, float]) -> None:
    (token,) = choose(torch.full((1, 50), -math.inf), request(**params))
    assert 0 <= token < 50


def test_logit_bias_lifts_and_bans() -> None:
    logits = torch.zeros(1, 20)
    assert choose(logits, request(temperature=0.0, logit_bias={4: 1.0, 5: 0.5})) == [4]
    shares = draw(logits[0], logit_bias={4: -100.0, 5: math.log(20)})
    assert shares[4] == 0
    assert shares[5] == pytest.approx(20 / 38, abs=0.05)


def test_repetition_penalty_counts_prompt_and_output_and_knows_signs() -> None:
    logits = torch.tensor([[1.0, 0.9, 0.5, 0.0, -1.0]])
    assert choose(logits, request(prompt=(0,), temperature=0.0, repetition_penalty=2.0)) == [1]
    assert choose(logits, request((0,), (1,), temperature=0.0, repetition_penalty=1.5)) == [0]
    negative = torch.tensor([[-1.0, -1.5]])
    assert choose(negative, request(prompt=(0,), temperature=0.0, repetition_penalty=2.0)) == [1]


def test_presence_and_frequency_penalties_count_the_output_only() -> None:
    logits = torch.tensor([[1.0, 0.8, 0.3]])
    greedy = {"temperature": 0.0}
    assert choose(logits, request((0, 0, 0), (), presence_penalty=2.0, frequency_penalty=2.0, **greedy)) == [
        0
    ]
    assert choose(logits, request((1,), (0,), presence_penalty=0.5, **greedy)) == [1]
    assert choose(logits, request((1,), (0,), frequency_penalty=0.15, **greedy)) == [0]
    assert choose(logits, request((1,), (0, 0), frequency_penalty=0.15, **greedy)) == [1]


def test_end_of_text_is_banned_until_min_tokens_came_before_it() -> None:
    logits = torch.zeros(1, 20)
    logits[0, EOS], logits[0, 8], logits[0, 9] = 9.0, 8.0, 1.0
    asks = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": [8]}
    assert choose(logits, request(outputs=(), **asks)) == [9]
    assert choose(logits, request(outputs=(1,), **asks)) == [9]
    assert choose(logits, request(outputs=(1, 1), **asks)) == [EOS]
    assert choose(logits, request(**{**asks, "ignore_eos": True})) == [EOS]


def test_stop_id_that_no_vocabulary_has_is_harmless() -> None:
    assert choose(torch.zeros(1, 20), request(temperature=0.0, min_tokens=5, stop_token_ids=[2**31 - 1])) == [
        0
    ]


def logprobs(logits: Tensor, *requests: Request) -> dict[int, TokenLogprobs]:
    """By row, what the requests that asked get."""
    sampled = Sampler(CPU, 0).sample(logits.clone(), list(requests))
    assert sampled.logprobs is not None
    return {row: sampled.logprobs.message(at, count) for at, (row, count) in enumerate(sampled.wanted)}


def test_logprobs_are_those_of_the_model_before_any_edit() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0], [0.0, 0.0, 5.0, 0.0]])
    rows = [request(temperature=0.0, logit_bias={0: 10.0}, logprobs=2), request(temperature=0.0)]
    found = logprobs(logits, *rows)
    expected = logits[0].log_softmax(-1)
    assert (list(found), found[0].ids, found[0].ranks) == ([0], [0, 1, 2], [3, 1, 2])
    assert found[0].logprobs == pytest.approx(expected[[0, 1, 2]].tolist())


def test_each_request_of_a_step_gets_as_many_logprobs_as_it_asked_for() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [0.0, 1.0, 2.0], [2.0, 0.0, 1.0]])
    rows = [request(temperature=0.0, logprobs=0), request(), request(temperature=0.0, logprobs=2)]
    found = logprobs(logits, *rows)
    assert [(row, line.ids, line.ranks) for row, line in found.items()] == [
        (0, [2], [1]),
        (2, [0, 0, 2], [1, 1, 2]),
    ]


def test_same_seed_of_the_server_gives_the_same_choices_and_another_gives_others() -> None:
    logits = torch.zeros(8, 1000)
    rows = [request() for _ in range(8)]
    assert choose(logits, *rows, seed=1) == choose(logits, *rows, seed=1) != choose(logits, *rows, seed=2)


def test_the_numbers_of_a_program_around_the_engine_are_its_own() -> None:
    rows, logits = [request(), request(seed=3), request(top_k=5)], torch.zeros(3, 1000)
    state = torch.manual_seed(12).get_state()
    tokens = choose(logits, *rows, seed=1)
    assert torch.equal(torch.default_generator.get_state(), state)
    torch.manual_seed(13)
    again = [request(), request(seed=3), request(top_k=5)]
    assert choose(logits, *again, seed=1) == tokens


def test_forgotten_request_starts_its_seed_again() -> None:
    sampler, one = Sampler(CPU, 0), request(seed=5)
    logits = torch.zeros(1, 1000)
    first, second = (sampler.sample(logits.clone(), [one]).tokens.item() for _ in range(2))
    sampler.forget(one.id)
    assert sampler.sample(logits.clone(), [one]).tokens.item() == first != second


EVERYTHING: list[dict[str, object]] = [
    {"temperature": 0.0},
    {},
    {"seed": 3, "min_p": 0.1},
    {"top_k": 5, "top_p": 0.7, "logprobs": 2},
    {"logit_bias": {4: 2.0}, "min_tokens": 5, "stop_token_ids": [8]},
    {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2, "logprobs": 0},
]


class NothingWaits(TorchDispatchMode):
    """Fails on what would make the host wait for a GPU: reading a value, or making a tensor of a list."""

    WAITS = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "bincount", "lift_fresh")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert not any(name in str(func) for name in self.WAITS), func
        indices = args[1] if "index.Tensor" in str(func) or "index_put" in str(func) else ()
        assert not any(i is not None and i.dtype is torch.bool for i in indices), "an index by mask"
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("chosen", [[row] for row in range(len(EVERYTHING))] + [list(range(len(EVERYTHING)))])
def test_sampling_never_waits_for_the_device(chosen: list[int]) -> None:
    rows = [request((1, 2), (5, 5, 6), **EVERYTHING[row]) for row in chosen]
    sampler, logits = Sampler(CPU, 0), torch.randn(len(rows), 100)
    with torch.inference_mode(), NothingWaits():
        sampler.sample(logits, rows)


@pytest.mark.gpu
def test_sampling_never_waits_for_a_real_gpu() -> None:
    device = torch.device("cuda")
    rows = [request((1, 2), (5, 5, 6), **params) for params in EVERYTHING]
    sampler, logits = Sampler(device, 0), torch.randn(len(rows), 32_000, device=device)
    with torch.inference_mode():
        sampler.sample(logits.clone(), rows)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            sampled = sampler.sample(logits.clone(), rows)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert sampled.tokens[0] == logits[0].argmax()
    assert sampled.logprobs is not None
    assert [len(sampled.logprobs.message(at, n).ids) for at, (_, n) in enumerate(sampled.wanted)] == [3, 1]


rules = st.fixed_dictionaries(
    {"seed": st.integers(-(2**63), 2**63 - 1)},
    optional={
        "temperature": st.sampled_from([0.3, 0.8, 1.5, 5.0]),
        "top_k": st.sampled_from([-1, 1, 3, 50, 1200]),
        "top_p": st.sampled_from([0.1, 0.5, 0.9, 0.999]),
        "min_p": st.sampled_from([0.01, 0.3]),
        "presence_penalty": st.sampled_from([-1.0, 1.0]),
        "logit_bias": st.just({1: 2.0}),
    },
)
others = st.one_of(rules, st.just({"temperature": 0.0}), st.just({}), st.just({"top_p": 0.95}))


@pytest.mark.parametrize("vocab", [30, 2000])
@given(mine=rules, company=st.lists(others, min_size=1, max_size=4), place=st.integers(0, 4))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_seed_gives_the_same_tokens_alone_and_in_any_batch(
    mine: dict[str, object], company: list[dict[str, object]], place: int, vocab: int
) -> None:
    place = min(place, len(company))
    generator = torch.Generator().manual_seed(11)
    steps = [torch.randn(len(company) + 1, vocab, generator=generator) * 3 for _ in range(4)]
    alone, sampler = request(**mine), Sampler(CPU, 1)
    expected = [
        sampler.sample(logits[place : place + 1].clone(), [alone]).tokens[0].item() for logits in steps
    ]
    rows = [request(**params) for params in company]
    rows.insert(place, request(**mine))
    sampler = Sampler(CPU, 2)
    assert [sampler.sample(logits.clone(), rows).tokens[place].item() for logits in steps] == expected
