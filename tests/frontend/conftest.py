from __future__ import annotations

import json
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
import pytest
import tokenizers
import uvloop

from hotstart.checkpoint.base import ModelFiles
from hotstart.config.settings import Config, HttpConfig, LogConfig, ModelConfig, SchedulerConfig
from hotstart.frontend.engine_writer import EngineWriter
from hotstart.frontend.server import serve
from hotstart.frontend.start import Text, load_text
from hotstart.frontend.startup import Checked, Startup
from hotstart.timeline import Timeline

from .fake_engine import PATIENCE, FakeEngine

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CONTEXT = 64


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a byte-level BPE of 400 tokens, ``<s>`` = 0 and ``</s>`` = 1."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["the quick brown fox jumps over the lazy dog " * 20, "hello world " * 20], trainer
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    path = tmp_path_factory.mktemp("model")
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="session")
def files(model_dir: Path) -> ModelFiles:
    return ModelFiles(
        path=str(model_dir),
        config={"model_type": "llama", "vocab_size": 400, "bos_token_id": 0, "eos_token_id": 1},
        tokenizer_config={"bos_token": "<s>", "eos_token": "</s>"},
        tokenizer_json=str(model_dir / "tokenizer.json"),
        chat_template=TEMPLATE,
        chat_template_source="chat_template.jinja",
    )


@pytest.fixture(scope="session")
def tokenizer(files: ModelFiles) -> tokenizers.Tokenizer:
    assert files.tokenizer_json is not None
    return tokenizers.Tokenizer.from_file(files.tokenizer_json)


def everywhere() -> socket.socket:
    """A listener for both families, as ``serve`` has it by default."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("127.0.0.1", 0))


@dataclass
class Running:
    """A frontend on a TCP port, with the scripted engine behind it."""

    config: Config
    files: ModelFiles
    text: Text
    engine: FakeEngine
    startup: Startup
    timeline: Timeline
    url: str
    context: int | None = CONTEXT
    codes: list[int] = field(default_factory=list)
    thread: threading.Thread | None = None

    def pass_checks(self) -> None:
        self.startup.pass_checks(
            Checked(
                files=self.files,
                text=self.text,
                served_names=self.config.model.served_model_name,
                max_model_len=self.context,
            )
        )

    def make_ready(self) -> None:
        self.pass_checks()
        became = threading.Event()
        self.startup.listen(became.set)
        self.engine.ready(max_model_len=CONTEXT)
        while self.startup.ready is None:
            assert became.wait(PATIENCE)
            became.clear()

    def exit_code(self) -> int:
        """Of the server, once it has ended by itself."""
        assert self.thread is not None
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive(), "the server did not stop"
        return self.codes[0]

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=PATIENCE, trust_env=False, **options)

    def ids(self, text: str) -> list[int]:
        return self.text.tokenizer.encode(text, add_special_tokens=False)

    def ask(self, path: str, **body: Any) -> Future[httpx.Response]:
        """POST from a thread, for tests that step the engine meanwhile."""

        def post() -> httpx.Response:
            with self.client() as client:
                return client.post(path, json=body)

        return _in_thread(post)

    def stream(self, path: str, **body: Any) -> queue.Queue[str]:
        """POST with ``stream`` from a thread: the data of each event, then ``""`` at the end."""
        events: queue.Queue[str] = queue.Queue()

        def read() -> None:
            with (
                self.client() as client,
                client.stream("POST", path, json={**body, "stream": True}) as response,
            ):
                if response.status_code != 200:
                    events.put(response.read().decode())
                for line in response.iter_lines() if response.status_code == 200 else ():
                    if line:
                        events.put(line.removeprefix("data: "))
            events.put("")

        _in_thread(read)
        return events

    def leave(self, path: str, **body: Any) -> Callable[[], None]:
        """POST on a bare connection; the returned function closes it without reading an answer."""
        host, port = self.url.removeprefix("http://").split(":")
        connection = socket.create_connection((host, int(port)), PATIENCE)
        data = json.dumps(body).encode()
        head = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json"]
        head.append(f"Content-Length: {len(data)}")
        connection.sendall("\r\n".join([*head, "", ""]).encode() + data)
        return connection.close


T = TypeVar("T")


def _in_thread(work: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


Launch = Callable[..., Running]


@pytest.fixture
def launch(files: ModelFiles) -> Iterator[Launch]:
    """Start a frontend that is still loading; keyword arguments are fields of the settings."""
    with running_servers(files) as start:
        yield start


@pytest.fixture
def server(launch: Launch) -> Running:
    """A ready server whose engine answers when told to."""
    running = launch()
    running.make_ready()
    return running


class running_servers:
    """``with running_servers(files) as launch``: ends what ``launch`` started."""

    def __init__(self, files: ModelFiles) -> None:
        self._files = files
        self._running: list[Running] = []

    def __enter__(self) -> Launch:
        return self._start

    def __exit__(self, *_: object) -> None:
        for running in self._running:
            running.engine.close()
            running.startup.engine_exited("closed by the test")
            assert running.thread is not None
            running.thread.join(PATIENCE)
            assert not running.thread.is_alive()

    def _start(
        self,
        *,
        http: dict[str, Any] | None = None,
        log: dict[str, Any] | None = None,
        model: dict[str, Any] | None = None,
        max_queued_requests: int = 1024,
        context: int | None = CONTEXT,
        without_template: bool = False,
    ) -> Running:
        config = Config(
            model=ModelConfig(**{"model": "tiny", "served_model_name": ("tiny",), **(model or {})}),
            http=HttpConfig(**(http or {})),
            log=LogConfig(**(log or {})),
            scheduler=SchedulerConfig(max_queued_requests=max_queued_requests),
        )
        files = self._files
        if without_template:
            files = msgspec.structs.replace(files, chat_template=None)
        listener = everywhere()
        ours, theirs = socket.socketpair()
        running = Running(
            config=config,
            files=files,
            text=load_text(files, config),
            engine=FakeEngine(theirs),
            startup=Startup(),
            timeline=Timeline("frontend"),
            url=f"http://127.0.0.1:{listener.getsockname()[1]}",
            context=context,
        )

        def run() -> None:
            running.codes.append(
                uvloop.run(serve(config, [listener], EngineWriter(ours), running.timeline, running.startup))
            )

        running.thread = threading.Thread(target=run, daemon=True)
        running.thread.start()
        self._running.append(running)
        return running
