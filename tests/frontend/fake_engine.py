"""The engine's end of the socket pair, played by a script: it steps when a test, or a message, says so."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from array import array
from collections.abc import Iterable

import msgspec

from hotstart.errors import HotstartError
from hotstart.messages import (
    AbortRequests,
    AddRequests,
    Control,
    ControlDone,
    EngineStats,
    Failed,
    FinishReason,
    Frames,
    FromEngine,
    NewRequest,
    PromptLogprobs,
    Ready,
    Scheduled,
    StepOutput,
    ToEngine,
    TokenLogprobs,
    decode_to_engine,
    frame,
    unpack_ids,
)

PATIENCE = 20.0
"""Seconds after which a message that never comes fails the test."""

Entry = tuple[int, int, FinishReason]
READY = Ready(
    max_model_len=64,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    dtype="float32",
    device="cpu",
    kv_cache_bytes=1 << 20,
    kv_cache_tokens=512,
    block_size=16,
    weights_bytes=1 << 20,
    first_step="probe",
)


class FakeEngine:
    """Reads on a thread. By default requests wait for :meth:`step`; see :meth:`answer_with`."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._messages: queue.Queue[ToEngine] = queue.Queue()
        self._answer: list[int] | None = None
        self._eos: int | None = None
        self.requests: list[NewRequest] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def ready(self, *, max_model_len: int = 64) -> None:
        self.send(msgspec.structs.replace(READY, max_model_len=max_model_len))

    def answer_with(self, tokens: list[int], *, eos: int | None = None) -> None:
        """From now on every request gets these tokens, one a step, and ``eos`` if room is left."""
        self._answer, self._eos = tokens, eos

    def next(self, kind: type) -> ToEngine:
        """The next message of one kind; others before it are dropped."""
        while True:
            message = self._messages.get(timeout=PATIENCE)
            if isinstance(message, kind):
                return message

    def next_request(self) -> NewRequest:
        message = self.next(AddRequests)
        assert isinstance(message, AddRequests)
        assert len(message.requests) == 1
        return message.requests[0]

    def next_abort(self) -> list[int]:
        message = self.next(AbortRequests)
        assert isinstance(message, AbortRequests)
        return message.ids

    def step(self, entries: Iterable[Entry], **extra: object) -> None:
        entries = list(entries)
        self.send(
            StepOutput(
                ids=array("q", [i for i, _, _ in entries]).tobytes(),
                tokens=array("i", [t for _, t, _ in entries]).tobytes(),
                finish=bytes(f for _, _, f in entries),
                **extra,  # type: ignore[arg-type]
            )
        )

    def answer_control(self, *, ok: bool) -> str:
        """Wait for an operation and answer it; its name."""
        message = self.next(Control)
        assert isinstance(message, Control)
        self.send(ControlDone(message.op, ok))
        return message.op

    def fail(self, *problems: HotstartError) -> None:
        self.send(Failed([(p.exit_code, p.found, p.expected, p.advice) for p in problems]))

    def send(self, message: FromEngine) -> None:
        self._socket.sendall(frame(message))

    def die(self) -> None:
        """What a kill looks like from the other end."""
        self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(PATIENCE)
        self._socket.close()

    def _read(self) -> None:
        frames = Frames()
        while True:
            try:
                data = self._socket.recv(1 << 16)
            except OSError:
                return
            if not data:
                return
            for body in frames.feed(data):
                message = decode_to_engine(body)
                self._messages.put(message)
                if isinstance(message, AddRequests):
                    self.requests += message.requests
                    if self._answer is not None:
                        self._play(message.requests, self._answer)
                elif isinstance(message, Control) and self._answer is not None:
                    self.send(ControlDone(message.op, True))

    def _play(self, requests: list[NewRequest], answer: list[int]) -> None:
        scripts = {request.id: self._script(request, answer) for request in requests}
        scheduled = [Scheduled(r.id, time.monotonic(), 0) for r in requests]
        positions = [
            PromptLogprobs(r.id, prompt_logprobs(unpack_ids(r.prompt), r.params.prompt_logprobs))
            for r in requests
            if r.params.prompt_logprobs is not None
        ]
        for n in range(max(map(len, scripts.values()))):
            entries = [(i, *script[n]) for i, script in scripts.items() if n < len(script)]
            logprobs = {
                r.id: token_logprobs(scripts[r.id][n][0], r.params.logprobs)
                for r in requests
                if r.params.logprobs is not None and n < len(scripts[r.id])
            }
            self.step(
                entries,
                logprobs=logprobs,
                scheduled=scheduled if n == 0 else [],
                prompt_logprobs=positions if n == 0 else [],
                stats=EngineStats(running=len(entries), step_tokens=len(entries)),
            )

    def _script(self, request: NewRequest, answer: list[int]) -> list[tuple[int, FinishReason]]:
        limit = request.params.max_tokens or 1
        tokens = [*answer, self._eos] if self._eos is not None else answer
        cut = [(token, FinishReason.RUNNING) for token in tokens[:limit] if token is not None]
        ends = FinishReason.STOP if self._eos is not None and len(tokens) <= limit else FinishReason.LENGTH
        cut[-1] = (cut[-1][0], ends)
        return cut


def token_logprobs(token: int, top: int | None) -> TokenLogprobs:
    """Invented: the chosen token has -0.5, the top ones are ``token + 1``, … with -1, -2, …"""
    others = range(1, (top or 0) + 1)
    return TokenLogprobs(
        [token, *(token + i for i in others)],
        [-0.5, *(-1.0 * i for i in others)],
        [1, *(1 + i for i in others)],
    )


def prompt_logprobs(ids: list[int], top: int | None) -> list[TokenLogprobs | None]:
    return [None, *(token_logprobs(token, top) for token in ids[1:])]
