"""What the first request would otherwise be the first to do, done while the engine still loads.

Decoders are built at first use and the tokenizer fills its caches: the first request would pay some
two milliseconds that no later one pays.
"""

from __future__ import annotations

import logging

from hotstart.frontend.chat import Chat
from hotstart.frontend.completions import Completions
from hotstart.frontend.detokenizer import detokenizer
from hotstart.frontend.parsing import parse
from hotstart.frontend.tokenizer import Tokenizer

_TEXT = "Once upon a time there was a server. It answered at once (in 2 languages):\n"


log = logging.getLogger("hotstart.frontend")


def rehearse(tokenizer: Tokenizer) -> None:
    """Parse a request of each kind, then tokenize a sentence and spell it again. Sends nothing."""
    try:
        _rehearse(tokenizer)
    except Exception:  # a request that meets the same will say so to its client
        log.debug("the rehearsal of a request failed", exc_info=True)


def _rehearse(tokenizer: Tokenizer) -> None:
    parse(b'{"prompt": "Hello", "stream": true, "stream_options": {}}', Completions.request_type)
    parse(b'{"messages": [{"role": "user", "content": "Hello"}], "stream": true}', Chat.request_type)
    ids = tokenizer.encode(_TEXT)
    spelling = detokenizer(tokenizer, ids)
    for token in ids:
        spelling.push(token)
