"""What every endpoint shares."""

from __future__ import annotations

from dataclasses import dataclass

from hotstart.config.settings import Config
from hotstart.frontend.engine_client import EngineClient
from hotstart.frontend.errors import ApiError
from hotstart.frontend.gate import Gate
from hotstart.frontend.liveness import Liveness
from hotstart.frontend.metrics import Metrics
from hotstart.frontend.sampling import check_prompt_length
from hotstart.frontend.start import model_vocab_size
from hotstart.frontend.startup import Checked, Startup
from hotstart.frontend.tokenizer import Tokenizer
from hotstart.timeline import Timeline


@dataclass
class Frontend:
    """The parts of one server, wired together by :mod:`hotstart.frontend.server`."""

    config: Config
    startup: Startup
    timeline: Timeline
    liveness: Liveness
    metrics: Metrics
    client: EngineClient
    gate: Gate
    created: int
    """Unix seconds; the age of the model in listings."""

    def context_length(self) -> int:
        """Tokens of prompt and answer together; known once the gate is open."""
        length = self.startup.max_model_len
        assert length is not None
        return length

    def check_model(self, name: str | None, checked: Checked) -> str:
        """The served name for ``name``. Raises :class:`ApiError` 404 for one that is not served."""
        if name is None or name == "":
            return checked.served_names[0]
        if name not in checked.served_names:
            served = ", ".join(checked.served_names)
            raise ApiError(404, f"The model `{name}` does not exist; served here: {served}.", param="model")
        return name

    def check_length(self, text: str, tokenizer: Tokenizer, *, param: str) -> None:
        """Refuse a text that cannot fit, without encoding it. Raises :class:`ApiError` 400."""
        least = tokenizer.fewest_tokens(text)
        check_prompt_length(least, context=self.context_length(), param=param, at_least=True)

    def check_queue(self, more: int) -> None:
        """Raise :class:`ApiError` 429 when the queue has no room for ``more`` choices."""
        limit = self.config.scheduler.max_queued_requests
        waiting = self.client.waiting
        if waiting and waiting + more > limit:
            raise ApiError(429, f"{waiting} requests are waiting, and at most {limit} may.", retry_after=1)


async def encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
    """Token ids. Raises :class:`ApiError` 400 for a text that the model's tokenizer has no tokens for."""
    try:
        return await tokenizer.encode_async(text, add_special_tokens=add_special_tokens)
    except Exception as error:  # the library raises bare Exception
        raise ApiError(
            400, f"{param}: the model's tokenizer cannot encode this text: {error}.", param=param
        ) from None


def check_ids(ids: list[int], checked: Checked, *, param: str) -> None:
    """Refuse an empty prompt, and tokens that the model has no embedding for. Raises 400."""
    if not ids:
        raise ApiError(400, "The prompt is empty: it has no tokens.", param=param)
    largest, size = max(ids), vocab_size(checked)
    if largest >= size:
        raise ApiError(
            400, f"The prompt has token {largest}, but the vocabulary has {size} tokens.", param=param
        )


def vocab_size(checked: Checked) -> int:
    """Of the model's configuration, else of the tokenizer."""
    return model_vocab_size(checked.files) or checked.text.tokenizer.backend.get_vocab_size()
