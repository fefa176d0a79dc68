"""Token counts of an answer, whole or so far."""

from __future__ import annotations

from msgspec import UNSET

from hotstart.config.settings import HttpConfig
from hotstart.frontend.generation import Choice
from hotstart.frontend.protocol.requests import (
    GenerationRequest,
    MaybeUsage,
    PromptTokensDetails,
    StreamOptions,
    Usage,
)


class UsageReport:
    """Counts prompts once, however many choices they have.

    ``answered`` is false where nothing but the prompt is returned: the step that this takes anyway
    makes a token that nobody sees.
    """

    def __init__(
        self,
        http: HttpConfig,
        request: GenerationRequest,
        prompts: list[list[int]],
        choices: list[Choice],
        *,
        answered: bool = True,
    ) -> None:
        options = request.stream_options or StreamOptions()
        self._choices = choices
        self._answered = answered
        self._n = request.n or 1
        self._prompt_tokens = sum(map(len, prompts))
        self._details = http.enable_prompt_tokens_details
        self.at_end = bool(options.include_usage) or http.enable_force_include_usage
        self._continuous = self.at_end and bool(options.continuous_usage_stats)

    def total(self) -> Usage:
        """Counts so far."""
        generated = sum(choice.generated for choice in self._choices) if self._answered else 0
        details = None
        if self._details:
            firsts = self._choices[:: self._n]
            details = PromptTokensDetails(sum(choice.cached_tokens for choice in firsts))
        return Usage(
            prompt_tokens=self._prompt_tokens,
            total_tokens=self._prompt_tokens + generated,
            completion_tokens=generated,
            prompt_tokens_details=details,
        )

    def running(self) -> MaybeUsage:
        """What an event in the middle carries: OpenAI puts null there when the total follows."""
        if self._continuous:
            return self.total()
        return None if self.at_end else UNSET
