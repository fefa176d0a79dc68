"""What a start does so that the first request costs what the second does."""

from __future__ import annotations

from hotstart.checkpoint.base import ModelFiles
from hotstart.frontend import parsing
from hotstart.frontend.protocol.chat import ChatRequest
from hotstart.frontend.protocol.completions import CompletionRequest
from hotstart.frontend.rehearsal import rehearse
from hotstart.frontend.tokenizer import load_tokenizer


def test_after_a_rehearsal_no_request_has_a_decoder_to_build(files: ModelFiles) -> None:
    parsing._decoder.cache_clear()

    rehearse(load_tokenizer(files))

    before = parsing._decoder.cache_info().misses
    parsing.parse(b'{"prompt": "a"}', CompletionRequest)
    parsing.parse(b'{"messages": [{"role": "user", "content": "a"}]}', ChatRequest)
    assert parsing._decoder.cache_info().misses == before == 2
