"""What is asked of a server, and the JSON in which it is."""

from __future__ import annotations

import random
from typing import Any

import msgspec
from msgspec import Struct


class SampleRequest(Struct):
    """A prompt, and how much is to come of it."""

    prompt: str | list[int]
    prompt_len: int
    """Tokens of the prompt, as far as is known before the server says it."""
    expected_output_len: int
    """Tokens of the answer that is asked for."""
    request_id: str = ""


class RequestForm(Struct, frozen=True):
    """What all requests of a run have in common; the fields are those that vLLM's client sends."""

    model: str
    chat: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    extra: dict[str, Any] = {}
    """Sampling parameters and ``--extra-body``: they come last, and win."""

    def body(self, request: SampleRequest) -> bytes:
        """The JSON of one request."""
        body: dict[str, Any] = {"model": self.model}
        if self.chat:
            body["messages"] = [{"role": "user", "content": request.prompt}]
            body["max_completion_tokens"] = request.expected_output_len
            if self.logprobs is not None:
                body |= {"logprobs": True, "top_logprobs": self.logprobs}
        else:
            body["prompt"] = request.prompt
            body["max_tokens"] = request.expected_output_len
            body["repetition_penalty"] = 1.0  # whatever the model's generation_config.json says
            if self.logprobs is not None:
                body["logprobs"] = self.logprobs
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.ignore_eos:
            body["ignore_eos"] = True
        return msgspec.json.encode(body | self.extra)


def turned(request: SampleRequest, dice: random.Random) -> SampleRequest:
    """The same prompt begun elsewhere, to warm up with: as much work, and the real one stays new."""
    prompt = request.prompt
    place = dice.randrange(1, len(prompt)) if len(prompt) > 1 else 0
    other = prompt[place:] + prompt[:place]  # type: ignore[operator]  # both parts are of one kind
    return msgspec.structs.replace(request, prompt=other, request_id="")
