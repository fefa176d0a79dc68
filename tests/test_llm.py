"""The Python API as a user of vLLM's would use it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hotstart import LLM, SamplingParams
from hotstart.errors import ConfigError, DeviceError, HotstartError, ModelError, StorageError
from tiny_models import VOCAB

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
TEXTS = [
    "You may obtain a copy",
    "Licensed under",
    "Unless required by applicable law or agreed to in writing",
]


@pytest.fixture(scope="module")
def llm(tiny_model: Callable[..., Path]) -> LLM:
    return LLM(
        str(tiny_model("llama")), device="cpu", threads=1, max_num_seqs=8, kv_cache_memory_bytes=2 << 20
    )


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **changes})


def test_prompts_are_completed_in_order_and_as_each_alone(llm: LLM) -> None:
    outputs = llm.generate(TEXTS, GREEDY)
    assert [output.prompt for output in outputs] == TEXTS
    for text, output in zip(TEXTS, outputs, strict=True):
        (alone,) = llm.generate(text, GREEDY)
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
        assert alone.outputs[0].text == output.outputs[0].text
        assert len(output.outputs[0].token_ids) == 12
        assert output.outputs[0].finish_reason == "length"


def test_a_prompt_may_be_a_text_or_ids_bare_or_named(llm: LLM) -> None:
    (by_text,) = llm.generate(TEXTS[0], GREEDY)
    ids = by_text.prompt_token_ids
    for form in (
        [TEXTS[0]],
        {"prompt": TEXTS[0]},
        ids,
        [ids],
        {"prompt_token_ids": ids},
        [{"prompt": TEXTS[0]}],
    ):
        (output,) = llm.generate(form, GREEDY)  # type: ignore[arg-type]
        assert output.prompt_token_ids == ids
        assert output.outputs[0].text == by_text.outputs[0].text
    assert llm.generate([], GREEDY) == []


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    outputs = llm.generate(TEXTS[:2], [params(max_tokens=3), params(max_tokens=5)])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 5]
    with pytest.raises(ConfigError, match="2 prompts and 1 sampling parameters"):
        llm.generate(TEXTS[:2], [GREEDY])


def test_n_choices_are_numbered_and_seeded_apart(llm: LLM) -> None:
    asked = params(n=3, temperature=1.0, seed=7)
    (output,) = llm.generate(TEXTS[0], asked)
    assert [choice.index for choice in output.outputs] == [0, 1, 2]
    texts = [choice.token_ids for choice in output.outputs]
    assert len({tuple(text) for text in texts}) == 3
    (single,) = llm.generate(TEXTS[0], params(temperature=1.0, seed=8))
    assert single.outputs[0].token_ids == texts[1]


def test_seed_gives_the_same_text_alone_and_among_others(llm: LLM) -> None:
    seeded = params(temperature=0.9, top_p=0.9, top_k=100, seed=42, max_tokens=20)
    (alone,) = llm.generate(TEXTS[0], seeded)
    others = [params(temperature=1.5), params(min_p=0.1, temperature=1.0, seed=1), GREEDY]
    mixed = llm.generate([TEXTS[1], TEXTS[2], TEXTS[0], TEXTS[1]], [*others[:2], seeded, others[2]])
    assert mixed[2].outputs[0].token_ids == alone.outputs[0].token_ids


def test_stop_string_ends_the_text_before_it_and_frees_the_request(llm: LLM) -> None:
    whole = llm.generate(TEXTS[0], GREEDY)[0].outputs[0].text
    stop = whole[4:7]
    (cut,) = llm.generate(TEXTS[0], params(stop=[stop]))
    assert cut.outputs[0].text == whole[: whole.index(stop)]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
    (kept,) = llm.generate(TEXTS[0], params(stop=stop, include_stop_str_in_output=True))
    assert kept.outputs[0].text == whole[: whole.index(stop) + len(stop)]
    assert not llm._engine.has_work


def test_stop_id_ends_the_text_and_is_named(llm: LLM) -> None:
    whole = llm.generate(TEXTS[0], GREEDY)[0].outputs[0].token_ids
    stop = whole[5]
    expected = whole[: whole.index(stop) + 1]
    (cut,) = llm.generate(TEXTS[0], params(stop_token_ids=[stop]))
    assert cut.outputs[0].token_ids == expected
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
    (later,) = llm.generate(TEXTS[0], params(stop_token_ids=[stop], min_tokens=9))
    assert stop not in later.outputs[0].token_ids[:9]
    assert len(later.outputs[0].token_ids) > 9


def test_max_tokens_none_fills_the_context(tiny_model: Callable[..., Path]) -> None:
    short = LLM(
        str(tiny_model("llama")), device="cpu", threads=1, max_model_len=24, kv_cache_memory_bytes=1 << 20
    )
    (output,) = short.generate([1, 2, 3], params(max_tokens=None))
    assert len(output.outputs[0].token_ids) == 24 - 3
    (bounded,) = short.generate([1, 2, 3], params(max_tokens=500))
    assert bounded.outputs[0].token_ids == output.outputs[0].token_ids


def test_logprobs_belong_to_their_tokens(llm: LLM) -> None:
    (output,) = llm.generate(TEXTS[0], params(logprobs=2, prompt_logprobs=0))
    answer = output.outputs[0]
    assert answer.logprobs is not None
    assert [entry.ids[0] for entry in answer.logprobs] == answer.token_ids
    assert all(entry.ranks == [1, 1, 2] for entry in answer.logprobs), (
        "greedy: the chosen one is the likeliest"
    )
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [entry.ids[0] for entry in output.prompt_logprobs[1:] if entry] == output.prompt_token_ids[1:]
    assert llm.generate(TEXTS[0], GREEDY)[0].outputs[0].logprobs is None


def test_second_request_with_the_same_beginning_finds_it_computed(llm: LLM) -> None:
    ids = [5 + n % 100 for n in range(50)]
    (first,) = llm.generate(ids, GREEDY)
    (second,) = llm.generate(ids, GREEDY)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 48)
    assert second.outputs[0].token_ids == first.outputs[0].token_ids


def test_chat_goes_through_the_template(llm: LLM) -> None:
    talk = [{"role": "user", "content": "Who owns the copyright?"}]
    (answer,) = llm.chat(talk, GREEDY)
    rendered = "<|user|>\nWho owns the copyright?\n<|assistant|>\n"
    assert answer.prompt_token_ids == llm._text.tokenizer.encode(rendered, add_special_tokens=False)
    several = llm.chat([talk, talk], GREEDY)
    assert [output.outputs[0].text for output in several] == [answer.outputs[0].text] * 2


def test_default_parameters_are_those_of_the_model(tiny_model: Callable[..., Path]) -> None:
    settings = {"override_generation_config": {"temperature": 0.0, "max_new_tokens": 3}}
    model = LLM(str(tiny_model("llama")), device="cpu", threads=1, kv_cache_memory_bytes=1 << 20, **settings)
    assert model.get_default_sampling_params() == SamplingParams(temperature=0.0, max_tokens=3)
    assert len(model.generate(TEXTS[0])[0].outputs[0].token_ids) <= 3


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "a prompt of 0 tokens; expected 1 to 511"),
        ([], None),
        ([7] * 512, "a prompt of 512 tokens; expected 1 to 511"),
        ([7, VOCAB], f"token id {VOCAB}; expected 0 to {VOCAB - 1}"),
        ([7, -1], "token id -1"),
        ({"text": "x"}, "a prompt with text; expected prompt or prompt_token_ids"),
    ],
    ids=["empty", "none", "long", "beyond-vocabulary", "negative", "unknown-form"],
)
def test_prompt_that_cannot_be_completed_is_refused(llm: LLM, prompt: Any, message: str | None) -> None:
    if message is None:
        assert llm.generate(prompt, GREEDY) == []
        return
    with pytest.raises(ConfigError, match=message):
        llm.generate([TEXTS[0], prompt] if isinstance(prompt, dict) else prompt, GREEDY)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n": 0}, "n=0; expected `int` >= 1"),
        ({"temperature": -0.1}, "temperature=-0.1; expected `float` >= 0.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 0.0}, "top_p=0.0; expected `float` > 0.0"),
        ({"top_p": 1.1}, "top_p=1.1"),
        ({"top_k": -2}, "top_k=-2"),
        ({"min_p": 2.0}, "min_p=2.0"),
        ({"presence_penalty": 3.0}, "presence_penalty=3.0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0"),
        ({"max_tokens": 0}, "max_tokens=0; expected `int` >= 1"),
        ({"min_tokens": 13}, "min_tokens=13; expected at most 12"),
        ({"logprobs": 21}, "logprobs=21; expected at most 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs=-1"),
        ({"logit_bias": {VOCAB: 1.0}}, f"logit_bias has the token id {VOCAB}"),
        ({"stop": [""]}, r"stop=\[''\]"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_parameters_out_of_bounds_are_refused(llm: LLM, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        llm.generate(TEXTS[0], params(**changes))


def test_refused_prompt_leaves_nothing_of_its_batch_behind(llm: LLM) -> None:
    with pytest.raises(ConfigError):
        llm.generate([TEXTS[0], [7] * 600], GREEDY)
    assert not llm._engine.has_work
    assert llm.generate(TEXTS[0], GREEDY)[0].outputs[0].finish_reason == "length"


def test_interrupt_leaves_an_engine_that_can_go_on(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = llm.generate(TEXTS[0], GREEDY)[0].outputs[0].text
    real, steps = llm._engine.step, iter(range(3))

    def interrupted() -> object:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return real()

    with monkeypatch.context() as patched:
        patched.setattr(llm._engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(TEXTS, GREEDY)
    assert not llm._engine.has_work
    assert llm.generate(TEXTS[0], GREEDY)[0].outputs[0].text == expected


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"no_such_setting": 1}, ConfigError, "LLM has no setting no_such_setting"),
        ({"port": 1}, ConfigError, "LLM has no setting port"),
        ({"max_modellen": 1}, ConfigError, "Did you mean max_model_len"),
        ({"quantization": "fp8"}, ConfigError, "quantization='fp8' is refused: "),
        ({"trust_remote_code": True}, ConfigError, "trust_remote_code=True is refused: "),
        ({"dtype": "bf16"}, ConfigError, "LLM has dtype='bf16'; .* Did you mean bfloat16"),
        ({"max_num_seqs": 0}, ConfigError, "max_num_seqs=0; expected a whole number, 1 or more"),
        ({"tensor_parallel_size": 2}, ConfigError, "tensor_parallel_size=2 is refused"),
        ({"load_format": "nfs"}, ConfigError, "load_format='nfs' is refused: nfs is a medium"),
        ({"expect_mount": "/proc/1"}, StorageError, "/proc/1"),
        ({"max_model_len": 4096}, ConfigError, "longer than the model's context of 512 tokens"),
        ({"kv_cache_memory_bytes": 1000}, DeviceError, "one request of the model's whole context needs"),
        ({"kv_cache_memory_bytes": 1 << 60}, DeviceError, "is more than is free"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_settings_that_cannot_be_are_refused(
    tiny_model: Callable[..., Path], settings: dict[str, Any], error: type[HotstartError], message: str
) -> None:
    with pytest.raises(error, match=message):
        LLM(str(tiny_model("llama")), device="cpu", threads=1, **settings)


def test_settings_may_be_written_as_the_flags_are(tiny_model: Callable[..., Path]) -> None:
    written = LLM(
        tiny_model("llama"),  # a Path
        device="cpu",
        threads="1",
        dtype="float",
        kv_cache_memory_bytes="1MiB",
        max_model_len=None,
        tensor_parallel_size=1,
        max_num_seqs=4,
    )
    assert written.max_model_len == 512
    assert written.generate(TEXTS[0], GREEDY)[0].outputs[0].text


def test_tokenizer_may_lie_elsewhere(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    import shutil

    bare = tmp_path / "bare"
    shutil.copytree(tiny_model("llama"), bare, ignore=shutil.ignore_patterns("tokenizer*"))
    model = LLM(bare, tokenizer=tiny_model("llama"), device="cpu", threads=1, kv_cache_memory_bytes=1 << 20)
    assert model.generate(TEXTS[0], GREEDY)[0].outputs[0].text


WITHOUT_NUMPY = """
import sys, warnings
class NoNumpy:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy" or name.startswith("numpy."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NoNumpy())
before = list(warnings.filters)
from hotstart import LLM
LLM(sys.argv[1], device="cpu", threads=1, kv_cache_memory_bytes=1 << 20)
assert not [f for f in warnings.filters if f not in before and "NumPy" in str(f)], warnings.filters
"""


def test_a_machine_without_numpy_is_not_warned_of(tiny_model: Callable[..., Path]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_NUMPY, str(tiny_model("llama"))],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"content": "x"}], "role"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "image"),
    ],
    ids=["no-role", "image"],
)
def test_conversation_that_cannot_be_rendered_is_refused(
    llm: LLM, messages: list[dict[str, Any]], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        llm.chat(messages, GREEDY)


def test_directory_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        LLM(str(tmp_path), device="cpu", threads=1)


def test_model_without_a_template_completes_but_does_not_chat(tmp_path: Path) -> None:
    import json

    import tiny_models

    directory = tiny_models.write("llama", tmp_path / "model")
    path = directory / "tokenizer_config.json"
    path.write_text(
        json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "chat_template"})
    )
    model = LLM(str(directory), device="cpu", threads=1, kv_cache_memory_bytes=1 << 20)
    assert model.generate(TEXTS[0], GREEDY)[0].outputs[0].text
    with pytest.raises(ConfigError, match="no chat template"):
        model.chat([{"role": "user", "content": "x"}], GREEDY)
