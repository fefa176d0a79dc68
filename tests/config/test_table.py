"""The flag table: complete, consistent, and true about what it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from hotstart.config.flags import IMPLEMENTED, NO_EFFECT, REFUSED, Flag
from hotstart.config.parse import parse_serve
from hotstart.config.settings import SECTIONS
from hotstart.config.table import SERVE
from hotstart.config.values import Choice, Json, Many, Number, Size, Switch, Whole
from hotstart.errors import HotstartError

ROOT = Path(__file__).parents[2]

# The flags whose behaviour a drop-in for vLLM must have, each with a value of its documentation.
MUST = (
    """
--tokenizer /t | --served-model-name a b | --revision main | --tokenizer-revision main | --hf-token t
--dtype auto | --dtype half | --dtype float16 | --dtype bfloat16 | --dtype float
--dtype float32 | --seed 1 | --max-model-len auto | --max-model-len -1 | --max-model-len 8k
--hf-overrides {"a":1} | --generation-config vllm | --override-generation-config {"temperature":0.5}
--download-dir /d | --load-format auto | --load-format safetensors | --load-format dummy
--load-format runai_streamer | --load-format fastsafetensors | --load-format instanttensor
--model-loader-extra-config {"concurrency":16,"memory_limit":5368709120}
--safetensors-load-strategy lazy | --safetensors-load-strategy eager | --safetensors-load-strategy prefetch
--safetensors-prefetch-num-threads 4 | --safetensors-prefetch-block-size 8388608 | --use-tqdm-on-load
--gpu-memory-utilization 0.9 | --kv-cache-memory-bytes 5368709120 | --block-size 16
--num-gpu-blocks-override 100 | --max-num-seqs 64 | --max-num-batched-tokens 2048
--enable-prefix-caching | --enable-chunked-prefill | --kv-cache-dtype auto
--tensor-parallel-size 1 | -tp 1 | --pipeline-parallel-size 1 | -pp 1
--enforce-eager | --optimization-level 2 | -O2 | --compilation-config {"mode":3} | -cc.mode 3
-cc.cudagraph_mode FULL_AND_PIECEWISE | --cudagraph-capture-sizes 1 2 4 | --max-cudagraph-capture-size 8
--host 0.0.0.0 | --port 8000 | --uds /tmp/s | --api-key a b | --root-path /v
--ssl-keyfile k --ssl-certfile c | --allowed-origins ["*"] | --allowed-methods ["GET"]
--allowed-headers ["*"] | --allow-credentials | --uvicorn-log-level info | --disable-uvicorn-access-log
--enable-request-id-headers | --disable-fastapi-docs | --chat-template t.jinja
--chat-template-content-format string | --default-chat-template-kwargs {"a":1} | --response-role assistant
--max-log-len 100 | --enable-log-requests | --disable-log-stats | --shutdown-timeout 10
""".replace("\n", " | ")
    .strip(" |")
    .split(" | ")
)

# Flags that a drop-in should know, with values that ask for nothing that hotstart lacks.
SHOULD = (
    """
--max-logprobs 5 | --scheduling-policy fcfs | --async-scheduling | --stream-interval 4
--enable-prompt-tokens-details | --enable-force-include-usage | --return-tokens-as-token-ids
--long-prefill-token-threshold 512 | --api-server-count 1 | --data-parallel-size 1
--distributed-executor-backend mp | --disable-custom-all-reduce | --model-impl auto | --runner generate
--max-num-queued-reqs 9 | --enable-server-load-tracking | --logprobs-mode raw_logprobs
--attention-backend auto | --no-enable-sleep-mode | --no-enable-expert-parallel
""".replace("\n", " | ")
    .strip(" |")
    .split(" | ")
)

REFUSED_BY_NAME = (
    """
-tp 2 | -pp 2 | --load-format ipc_cache | --load-format mistral | --load-format pt
--quantization fp8 | -q awq | --enable-lora | --lora-modules a=b | --kv-cache-dtype fp8
--enable-auto-tool-choice | --tool-call-parser hermes | --reasoning-parser deepseek_r1
--attention-backend FLASHINFER | -ep | --enable-expert-parallel | --scheduling-policy priority
--enable-sleep-mode | --ignore-patterns *.bin | --api-server-count 2 | --data-parallel-size 2 | -dp 2
--model-impl transformers | --runner pooling | --logprobs-mode processed_logits
--distributed-executor-backend ray | --speculative-config {"model":"m"} | --limit-mm-per-prompt.image 0
--kv-transfer-config {} | --cpu-offload-gb 4 | --decode-context-parallel-size 2 | -pcp 2 | --enable-dbo
--enable-eplb | --mamba-cache-dtype float32 | --watermark 0.1 | --pooler-config {}
--structured-outputs-config.backend xgrammar | --profiler-config {} | --weight-transfer-config {}
--middleware a.b | --kv-offloading-size 8
""".replace("\n", " | ")
    .strip(" |")
    .split(" | ")
)


@pytest.mark.parametrize("line", MUST + SHOULD)
def test_a_flag_of_vllm_is_understood(line: str) -> None:
    assert parse_serve(["/m", *line.split()], {}).config.model.model == "/m"


@pytest.mark.parametrize("line", REFUSED_BY_NAME)
def test_what_is_not_supported_is_refused_by_name(line: str) -> None:
    words = line.split()
    with pytest.raises(HotstartError) as caught:
        parse_serve(["/m", *words], {})
    assert words[0] in str(caught.value)
    assert caught.value.exit_code == 2


def sample(row: Flag) -> list[str]:
    """Words that are in order for a row's kind, but among no value that a row with ``only`` lets pass."""
    kind = row.kind.each if isinstance(row.kind, Many) else row.kind
    if isinstance(kind, Switch):
        return []
    if isinstance(kind, Json):
        return ['{"k": 1}']
    if isinstance(kind, Choice):
        return [next(word for word in kind.words if not row.only or word not in row.only)]
    if isinstance(kind, Number):
        return ["0.75"]
    if isinstance(kind, Size):
        return ["1GiB"]
    if isinstance(kind, Whole):
        return ["3" if row.only or row.to == "model.max_model_len" else "1"]
    return ["zzz"]


def by_verdict(*verdicts: str) -> list[tuple[str, Flag]]:
    return [(name, row) for row in SERVE.rows() if row.verdict in verdicts for name in row.names]


def named(value: str | Flag) -> str:
    """For a test's name, which must be the same in every process: that of the flag."""
    return value if isinstance(value, str) else "row"


@pytest.mark.parametrize(("name", "row"), by_verdict(REFUSED), ids=named)
def test_each_refused_flag_names_itself_and_the_reason(name: str, row: Flag) -> None:
    with pytest.raises(HotstartError) as caught:
        parse_serve(["/m", name, *sample(row)], {})
    assert str(caught.value).startswith(name)
    assert f"is refused: {row.because}" in str(caught.value)


@pytest.mark.parametrize(("name", "row"), by_verdict(NO_EFFECT), ids=named)
def test_each_flag_without_effect_says_so_once(name: str, row: Flag) -> None:
    notes = parse_serve(["/m", name, *sample(row)], {}).notes
    assert notes == [f"{name} has no effect: {row.because}"]


@pytest.mark.parametrize(
    ("name", "row"),
    [(name, row) for name, row in by_verdict(IMPLEMENTED) if row.to != "config" and not row.only],
    ids=named,
)
def test_each_implemented_flag_reaches_its_field(name: str, row: Flag) -> None:
    words = [f"--no-{name[2:]}"] if row.to in ON_BY_DEFAULT else [name, *sample(row)]
    if name.startswith("--ssl-"):
        own = ["--ssl-keyfile", "k", "--ssl-certfile", "c"]
        words = [*own, "--ssl-ca-certs", "a", "--ssl-cert-reqs", "2", *words]
    before, after = parse_serve(["/m"], {}).config, parse_serve(["/m", *words], {}).config
    section, dot, field = row.to.partition(".")
    changed = getattr(getattr(after, section), field) if dot else getattr(after, section)
    default = getattr(getattr(before, section), field) if dot else getattr(before, section)
    if not isinstance(row.kind, Choice):
        assert changed != default
    assert parse_serve(["/m", *words], {}).values[row.to] == changed


ON_BY_DEFAULT = {
    f"{section}.{field.name}"
    for section, struct in SECTIONS.items()
    for field in msgspec.structs.fields(struct)
    if field.default is True
}


def test_every_row_aims_at_a_field_that_exists() -> None:
    fields = {f"{s}.{f.name}" for s, struct in SECTIONS.items() for f in msgspec.structs.fields(struct)}
    for row in SERVE.rows():
        assert row.to in fields | {"cache_root", "config", ""}, row.name


def test_every_field_can_be_set() -> None:
    aimed = {row.to for row in SERVE.rows()}
    fields = {f"{s}.{f.name}" for s, struct in SECTIONS.items() for f in msgspec.structs.fields(struct)}
    assert fields - aimed == {"model.model", "model.path", "model.location"}


def test_no_name_stands_for_two_rows() -> None:
    names = [name for row in SERVE.rows() for name in row.names]
    assert sorted(names) == sorted(set(names))


def test_the_docs_page_is_what_the_table_says() -> None:
    script = ROOT / "scripts" / "generate_docs.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
