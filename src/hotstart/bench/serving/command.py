"""``hotstart bench serve``: requests to a running server, and what a client sees of the answers.

Flags, printed block and JSON keys are those of ``vllm bench serve``. The names of models are asked for
first, prompts are made, then everything is sent by one process with one event loop.
"""

from __future__ import annotations

import math
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from hotstart.bench.output import check_outputs
from hotstart.bench.serving import counting, datasets, metrics, report
from hotstart.bench.serving.arrivals import Arrivals
from hotstart.bench.serving.client import Server, parse_server, run_loop
from hotstart.bench.serving.datasets_tokenizer import ServerTokenizer, tokenizer_for
from hotstart.bench.serving.delay import delays
from hotstart.bench.serving.flags import OPENAI_CHAT, SAMPLING, SERVE
from hotstart.bench.serving.model_list import Named, find_model
from hotstart.bench.serving.requests import RequestForm, SampleRequest
from hotstart.bench.serving.result_file import result_path, save
from hotstart.bench.serving.run import Load, Run, measure
from hotstart.bench.waterfall import require_pillow
from hotstart.cli.limits import raise_file_limit
from hotstart.cli.output import say
from hotstart.config.output_file import write_output
from hotstart.errors import ConfigError, HotstartError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def main(argv: Sequence[str]) -> int:
    """Run the command. Raises ``HotstartError``."""
    arguments = SERVE.parse(argv)
    values = arguments.values
    for note in arguments.notes:
        _note(note)
    _settle(values)
    server = _server(values)
    if values.get("plot"):
        require_pillow("--plot")
    make = datasets.dataset(values)
    date = datetime.now().strftime("%Y%m%d-%H%M%S")
    if warning := raise_file_limit():
        _note(warning)
    patience = values["ready_check_timeout_sec"]
    named: Named = run_loop(
        find_model(server, values.get("model"), values.get("served_model_name"), patience=patience)
    )
    path = result_path(values, named.origin, date)
    check_outputs({"--result-filename": path, "--plot": values.get("plot")})
    with ServerTokenizer(server.url, named.name, server.headers, server.tls()) as asked:
        tokenizer, origin = tokenizer_for(values.get("tokenizer"), named.origin, asked)
        requests = make(tokenizer)
        asked.close()  # or the server would close it meanwhile
        load = _load(values, named, requests)
        _announce(values, server, load)
        run: Run = run_loop(measure(server, load))
        counted = counting.count_tokens(run.answers, requests, tokenizer, origin)
    result = report.head(values, named.origin, date) | _report(values, run, requests, counted)
    _write(values, result, named.name, path)
    return 0


def _settle(values: dict[str, Any]) -> None:
    """Fill in what depends on other flags. Raises ``ConfigError`` where they contradict each other."""
    values.setdefault("seed", secrets.randbelow(2**31))
    values.setdefault("request_id_prefix", f"bench-{secrets.token_hex(4)}-")
    chat = values["backend"] == OPENAI_CHAT
    endpoint = values.setdefault("endpoint", CHAT if chat else COMPLETIONS)
    if endpoint.endswith("chat/completions") != chat or not endpoint.endswith("completions"):
        raise ConfigError(
            f"--endpoint {endpoint} does not go with --backend {values['backend']}",
            expected=f"a path that ends in {'chat/completions' if chat else 'completions'}",
            advice=f"Leave it out, or give --backend {'openai' if chat else OPENAI_CHAT}",
        )
    if chat and values.get("chat_template_kwargs"):
        raise ConfigError(
            "--chat-template-kwargs is given, but in a chat the server applies the template",
            advice="Send them along: --extra-body '{\"chat_template_kwargs\": {…}}'",
        )
    if values["dataset_name"] == datasets.RANDOM:
        values["ignore_eos"] = True
    start, end = values.get("ramp_up_start_rps"), values.get("ramp_up_end_rps")
    if values.get("ramp_up_strategy") is None:
        return
    if values["request_rate"] != float("inf"):
        raise ConfigError(
            f"--request-rate {values['request_rate']} and --ramp-up-strategy are given", expected="one"
        )
    if start is None or end is None or start > end:
        raise ConfigError(
            f"--ramp-up-start-rps is {start} and --ramp-up-end-rps is {end}",
            expected="both, and the start not above the end",
        )


def _server(values: Mapping[str, Any]) -> Server:
    host = values["host"]
    url = values.get("base_url") or f"http://{f'[{host}]' if ':' in host else host}:{values['port']}"
    headers = dict(values["header"])
    if (key := os.environ.get("OPENAI_API_KEY")) and "authorization" not in map(str.lower, headers):
        headers["Authorization"] = f"Bearer {key}"
    for name, value in headers.items():
        if not (name + value).isprintable() or not (name + value).isascii():
            raise ConfigError(f"--header {name} cannot be sent", expected="printable letters of ASCII")
    # Other clients want it in the address; here paths bring it along.
    if values["endpoint"].startswith("/v1/"):
        url = url.rstrip("/").removesuffix("/v1")
    return parse_server(url, headers, insecure=values["insecure"])


def _load(values: Mapping[str, Any], named: Named, requests: list[SampleRequest]) -> Load:
    sampling = {name: values[name] for name in SAMPLING if values.get(name) is not None}
    if "temperature" not in sampling:
        _note("the temperature is the server's default; --temperature 0 is greedy")
    form = RequestForm(
        named.name,
        chat=values["backend"] == OPENAI_CHAT,
        ignore_eos=values["ignore_eos"],
        logprobs=values.get("logprobs"),
        extra=sampling | values["extra_body"],
    )
    arrivals = Arrivals(
        values["request_rate"],
        values["burstiness"],
        values.get("ramp_up_strategy"),
        values.get("ramp_up_start_rps") or 0,
        values.get("ramp_up_end_rps") or 0,
    )
    return Load(
        values["endpoint"],
        form,
        requests,
        arrivals,
        values.get("max_concurrency"),
        values["num_warmups"],
        test=values["ready_check_timeout_sec"] > 0,
        progress=not values["disable_tqdm"],
        seed=values["seed"],
    )


def _announce(values: Mapping[str, Any], server: Server, load: Load) -> None:
    process = "Poisson process" if values["burstiness"] == 1 else "Gamma distribution"
    lines = [f"{len(load.requests)} requests for {load.form.model} to {server.url}{load.endpoint}"]
    if values.get("ramp_up_strategy"):
        lines.append(
            f"Traffic ramp-up strategy: {values['ramp_up_strategy']}, from {values['ramp_up_start_rps']} to "
            f"{values['ramp_up_end_rps']} RPS"
        )
    else:
        lines.append(f"Traffic request rate: {values['request_rate']}")
    lines.append(f"Burstiness factor: {values['burstiness']} ({process})")
    lines.append(f"Maximum request concurrency: {values.get('max_concurrency')}")
    say("\n".join(lines))


def _report(
    values: dict[str, Any], run: Run, requests: Sequence[SampleRequest], counted: str
) -> dict[str, Any]:
    """Print it; returns what the file is to hold of it. Raises ``HotstartError`` where all has failed."""
    if all(answer.error for answer in run.answers):
        raise HotstartError(
            "no request succeeded, so there are no figures: " + "; ".join(report.failures(run.answers)),
            advice="See what the server's log says",
        )
    limits = dict(values["goodput"])
    found = metrics.summarize(run.answers, run.duration, values["metric_percentiles"], limits)
    late = delays(run.answers, run.late)
    seed = values["seed"]
    say(report.block(found, values))
    say(report.notes(found, late, run.reuse, counted, seed))
    for warning in report.warnings(run.answers, late, run.reuse, shared=_shared(values, run, requests)):
        _note(f"warning: {warning}")
    result = report.figures(found, run.answers, values)
    return result | {"hotstart": report.ours(found, run.answers, late, run.reuse, counted, seed)}


def _shared(values: Mapping[str, Any], run: Run, requests: Sequence[SampleRequest]) -> float:
    """Tokens of prompts that are meant to be alike, so that a cache may know them after the first."""
    if values["dataset_name"] == datasets.PREFIX_REPETITION or values["random_prefix_len"]:
        return math.inf
    if values["backend"] != OPENAI_CHAT:
        return 0.0
    # What the chat template puts around a prompt.
    pairs = zip(run.answers, requests, strict=True)
    return sum(max(0, answer.prompt_tokens - request.prompt_len) for answer, request in pairs)


def _write(values: Mapping[str, Any], result: dict[str, Any], title: str, path: str | None) -> None:
    if path:
        save(result, path, detailed=values["save_detailed"], append=values["append_result"])
    if values.get("plot"):
        from hotstart.bench.serving.plot import draw

        title = f"{title}: {result['completed']} requests, {result['output_throughput']:.0f} tokens/s"
        write_output("--plot", values["plot"], draw(result | {"title": title}))


def _note(text: str) -> None:
    print(f"hotstart: {text}", file=sys.stderr)
