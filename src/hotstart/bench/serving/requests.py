"""What is asked of a server."""

from __future__ import annotations

from msgspec import Struct


class SampleRequest(Struct):
    """A prompt, and how much is to come of it."""

    prompt: str | list[int]
    prompt_len: int
    """Tokens of the prompt, as far as is known before the server says it."""
    expected_output_len: int
    """Tokens of the answer that is asked for."""
    request_id: str = ""
