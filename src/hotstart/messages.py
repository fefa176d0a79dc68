"""What frontend and engine say to each other.

A frame is a 4-byte little-endian length and a msgpack body; both directions share one socket pair.
A socket pair has no name, so nothing is left behind however either side dies, and the peer's end
of file is the news of its death. One :class:`StepOutput` carries all tokens of a step as packed
arrays; no message is per request.
"""

from __future__ import annotations

import struct
from array import array
from enum import IntEnum

import msgspec

from hotstart.timeline import Phase

_LENGTH = struct.Struct("<I")
MAX_FRAME = 1 << 30


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How to choose tokens; names and meanings as in vLLM. Validated where a request enters."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 and -1: off."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: list[str] = []
    """Stop strings: found by the side that detokenises, never by the engine."""
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    """None: as many as the context holds."""
    logprobs: int | None = None
    """Top log probabilities beside the sampled token's own; None: none at all."""
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] = {}
    skip_special_tokens: bool = True


class FinishReason(IntEnum):
    """Why a request ended; 0 while it runs."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3

    @property
    def text(self) -> str | None:
        """OpenAI's word for it."""
        return {0: None, 1: "stop", 2: "length", 3: "abort"}[self.value]


class NewRequest(msgspec.Struct, array_like=True):
    """A request for the engine. ``max_tokens`` is already bounded by the context."""

    id: int
    prompt: bytes
    """int32 token ids, little-endian: see :func:`pack_ids`."""
    params: SamplingParams


class Go(msgspec.Struct, tag="go"):
    """The checks passed: weight bytes may be read."""


class WeightFiles(msgspec.Struct, tag="files"):
    """Which files hold which weights, as the checks have found, in time before :class:`Go`."""

    checkpoint: bytes
    """See :mod:`hotstart.checkpoint.passing`."""


class AddRequests(msgspec.Struct, tag="add"):
    """Requests in order of arrival."""

    requests: list[NewRequest]


class AbortRequests(msgspec.Struct, tag="abort"):
    """Free these; unknown ids are ignored (they just finished). No output follows for them."""

    ids: list[int]


class Control(msgspec.Struct, tag="control"):
    """An operation between steps: ``reset_prefix_cache``. Answered by :class:`ControlDone`, in order."""

    op: str


ToEngine = Go | WeightFiles | AddRequests | AbortRequests | Control


class PhaseEvent(msgspec.Struct, tag="phase"):
    """A phase of the engine's timeline began, advanced or ended."""

    phase: Phase


class LogEvent(msgspec.Struct, tag="log"):
    """A log record of the engine, printed by the frontend so that output has one writer."""

    level: int
    text: str
    logger: str = "hotstart.engine"


class Ready(msgspec.Struct, tag="ready", kw_only=True):
    """One step went through the ordinary path. Logged, and shown whole by ``/startup.json``."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    dtype: str
    device: str
    kv_cache_bytes: int
    kv_cache_tokens: int
    kv_cache_reason: str = ""
    """Where the size comes from: the arithmetic, or the flag."""
    block_size: int
    weights_bytes: int
    first_step: str
    """``held request`` or ``probe``."""


class BytesRead(msgspec.Struct, array_like=True, frozen=True):
    """Bytes of weights that came from one kind of place in one way."""

    source: str
    """The type of a file system, the scheme of a store, or ``disk_copy``."""
    strategy: str
    bytes: int


class LoadStats(msgspec.Struct, tag="load", kw_only=True, frozen=True, omit_defaults=True):
    """What the load did, for the metrics: sent before :class:`Ready`, and again when more is copied."""

    read: list[BytesRead] = []
    longest_stall: float = 0.0
    """Seconds of the longest single read."""
    resident: float | None = None
    """Share of the files that the page cache had, 0 to 1; None: not known, or there are no files."""
    retried: int = 0
    """Ranges of a store asked for again after a failure."""
    replaced: int = 0
    """Ranges that were given up for being slow, and reads of files that hung, and were made anew."""
    copied: int = 0
    """Bytes written to the disk copy by this server."""


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Log probabilities at one position: the chosen token first, then the top ones in order.

    Natural logarithms of the distribution before temperature, penalties and truncation.
    """

    ids: list[int]
    logprobs: list[float]
    ranks: list[int]
    """1-based rank of each id in the vocabulary."""


class PromptLogprobs(msgspec.Struct, array_like=True):
    """Log probabilities of a whole prompt; ``positions[0]`` is None (nothing precedes it)."""

    id: int
    positions: list[TokenLogprobs | None]


class Scheduled(msgspec.Struct, array_like=True):
    """A request entered the batch for the first time."""

    id: int
    at: float
    """``time.monotonic()``."""
    cached_tokens: int
    """Prompt tokens found in the prefix cache."""


class EngineStats(msgspec.Struct, array_like=True, frozen=True):
    """Gauges after the step; counters since the start."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    """0 to 1."""
    preemptions: int = 0
    prefix_queries: int = 0
    """Prompt tokens looked up."""
    prefix_hits: int = 0
    """Prompt tokens found."""
    step_tokens: int = 0
    """Tokens computed in this step."""


class StepOutput(msgspec.Struct, tag="step", kw_only=True, omit_defaults=True):
    """One step: parallel arrays, one entry per token sampled (a finish without a token has token -1)."""

    ids: bytes
    """int64 request ids."""
    tokens: bytes
    """int32 token ids."""
    finish: bytes
    """uint8 :class:`FinishReason`."""
    stop_ids: dict[int, int] = {}
    """Request id → the ``stop_token_ids`` entry that ended it (the model's own eos is not listed)."""
    logprobs: dict[int, TokenLogprobs] = {}
    prompt_logprobs: list[PromptLogprobs] = []
    scheduled: list[Scheduled] = []
    stats: EngineStats = EngineStats()

    def unpack(self) -> list[tuple[int, int, FinishReason]]:
        """``(request id, token id, finish)`` for each entry."""
        ids, tokens = array("q", self.ids), array("i", self.tokens)
        return [(i, t, FinishReason(f)) for i, t, f in zip(ids, tokens, self.finish, strict=True)]


class ControlDone(msgspec.Struct, tag="controlled"):
    """Answer to a :class:`Control`; not ``ok``: not possible while requests run."""

    op: str
    ok: bool


class Failed(msgspec.Struct, tag="failed"):
    """The engine ends; each problem as (exit code, found, expected, advice)."""

    problems: list[tuple[int, str, str, str]]


FromEngine = PhaseEvent | LogEvent | LoadStats | Ready | StepOutput | ControlDone | Failed

_encode = msgspec.msgpack.Encoder().encode
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def pack_ids(ids: list[int]) -> bytes:
    """Token ids as little-endian int32."""
    return array("i", ids).tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """The inverse of :func:`pack_ids`."""
    return array("i", data).tolist()


def frame(message: ToEngine | FromEngine) -> bytes:
    """A message with its length in front, ready to send."""
    return framed(_encode(message))


def framed(body: bytes) -> bytes:
    """An encoded body with its length in front; the settings, sent first of all, are one of no message."""
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Cuts a byte stream back into message bodies."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Bodies completed by ``data``, in order. Raises ``ValueError`` on an absurd length."""
        self._buffer += data
        bodies: list[bytes] = []
        at = 0
        while len(self._buffer) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, at)
            if length > MAX_FRAME:
                raise ValueError(f"frame of {length} bytes; at most {MAX_FRAME} are sent")
            if len(self._buffer) - at - _LENGTH.size < length:
                break
            at += _LENGTH.size
            bodies.append(bytes(self._buffer[at : at + length]))
            at += length
        if at:
            del self._buffer[:at]
        return bodies


def decode_to_engine(body: bytes) -> ToEngine:
    """Decode on the engine's side."""
    return _to_engine.decode(body)


def decode_from_engine(body: bytes) -> FromEngine:
    """Decode on the frontend's side."""
    return _from_engine.decode(body)
