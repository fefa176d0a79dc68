"""What transformers says: greedy continuations, and log probabilities of given ones.

    reference.py CASES.json DEVICE

CASES is a list of ``{"model": directory, "prompts": [[id, …], …], "tokens": N, "given": [[id, …], …]}``.
Prints one JSON list with, per case, ``greedy`` (float32) and, for the given continuations,
``logprobs`` by dtype: ``float32`` and ``bfloat16``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    path, device = sys.argv[1:]
    answers = [answer(case, device) for case in json.loads(Path(path).read_text())]
    print(json.dumps(answers), flush=True)


@torch.inference_mode()
def answer(case: dict[str, Any], device: str) -> dict[str, Any]:
    found: dict[str, Any] = {"greedy": [], "logprobs": {}}
    model = load(case["model"], torch.float32, device)
    for prompt in case["prompts"] if case["tokens"] else []:
        ids = torch.tensor([prompt], device=device)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=case["tokens"]
        )
        found["greedy"].append(out[0, len(prompt) :].tolist())
    if case.get("given"):
        found["logprobs"]["float32"] = teach(model, case, device)
        model = load(case["model"], torch.bfloat16, device)
        found["logprobs"]["bfloat16"] = teach(model, case, device)
    return found


def load(directory: str, dtype: torch.dtype, device: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager")
    # As the server's ignore_eos: nothing ends a text, and no token is suppressed for it.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.to(device).eval()


def teach(model: Any, case: dict[str, Any], device: str) -> list[list[float]]:
    """Log probabilities of each given token after its prompt and the given tokens before it."""
    rows = []
    for prompt, given in zip(case["prompts"], case["given"], strict=True):
        ids = torch.tensor([prompt + given], device=device)
        logprobs = model(ids).logits[0].float().log_softmax(-1)
        at = torch.arange(len(prompt) - 1, len(prompt) + len(given) - 1, device=device)
        rows.append(logprobs[at, ids[0, len(prompt) :]].tolist())
    return rows


if __name__ == "__main__":
    main()
