"""Write docs/flags.md from the flag table, and the tables of docs/loaders.md and docs/convert.md from theirs.

With ``--check``, fail when a page is not current.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "flags.md"
sys.path.insert(0, str(ROOT / "src"))

import convert_tables  # noqa: E402
from loader_tables import PAGES, rendered  # noqa: E402

from hotstart.config.flags import IMPLEMENTED, REFUSED, Flag, Group  # noqa: E402
from hotstart.config.help import default_text, only_text, only_values  # noqa: E402
from hotstart.config.parse import API_KEY_VARIABLES  # noqa: E402
from hotstart.config.table import MODEL, SERVE  # noqa: E402
from hotstart.config.values import Switch  # noqa: E402

INTRODUCTION = f"""\
# Flags of `hotstart serve`

<!-- Written by scripts/generate_docs.py from the flag table; `make docs` renews it. -->

`hotstart serve {MODEL.metavar} [--flag [value] …]`, where {MODEL.metavar} is {MODEL.help}.
`hotstart check` takes the same flags. The names are vLLM's where the meaning is; a flag of vLLM is
[implemented](#{{first}}), [accepted with no effect](#accepted-with-no-effect), which one log line
says, or refused with the reason. A flag that would change the answer, the bytes read, the devices,
the memory or the security is never accepted with no effect.

- `--a_b` is `--a-b`; a unique beginning is enough (`--kv-cache-memory`); `--no-x` turns a switch off.
- `4k` is 4 000 and `4K` is 4 096, also inside JSON; sizes take `5GiB`, `5g` or `5GB`.
- JSON flags take single keys too: `--hf-overrides.rope_theta 1e6`, `-cc.cudagraph_mode=NONE`; a key
  that ends in `+` appends to a list.
- `--config FILE` reads a YAML file whose keys are flag names (`max-model-len: 4k`); the command line
  wins.
- One server serves one model: two models are an error.

| variable | meaning |
| --- | --- |
| `{API_KEY_VARIABLES[0]}`, `{API_KEY_VARIABLES[1]}` | the key of `/v1`, unless `--api-key` is given |
| `HOTSTART_CACHE_ROOT`, `VLLM_CACHE_ROOT` | where caches live, see `--cache-root` |
| `HF_TOKEN`, `HF_ENDPOINT`, `HF_HUB_OFFLINE`, `HF_HUB_CACHE`, `HF_HOME` | as the hub's library defines them |
| `CUDA_VISIBLE_DEVICES` | which GPUs are visible |

Variables that a cluster sets for a service named hotstart (`HOTSTART_PORT=tcp://…`) are ignored.
"""


def main(argv: list[str]) -> int:
    pages = {PAGE: render()} | {page: rendered(page) for page in PAGES}
    pages |= {page: convert_tables.rendered(page) for page in convert_tables.PAGES}
    if "--check" in argv:
        old = [page for page, text in pages.items() if not page.exists() or page.read_text("utf-8") != text]
        for page in old:
            print(f"{page.relative_to(ROOT)} is not what the tables say: run `make docs`", file=sys.stderr)
        return 1 if old else 0
    for page, text in pages.items():
        page.write_text(text, encoding="utf-8")
    return 0


def render() -> str:
    """The page."""
    first = SERVE.groups[0].title.lower().replace(" ", "-")
    parts = [INTRODUCTION.replace("{first}", first)]
    parts += [_section(group) for group in SERVE.groups]
    return "\n".join(parts)


def _section(group: Group) -> str:
    verdict = group.rows[0].verdict
    columns = {
        IMPLEMENTED: ("flag", "default", "meaning"),
        REFUSED: ("flag", "reason", "instead"),
    }.get(verdict, ("flag", "reason"))
    lines = [f"## {group.title}", "", _line(columns), _line(["---"] * len(columns))]
    return "\n".join([*lines, *(_line(_cells(row)) for row in group.rows), ""])


def _cells(row: Flag) -> list[str]:
    if row.verdict is REFUSED:
        return [_names(row), row.because + only_text(row), row.instead]
    if row.verdict is not IMPLEMENTED:
        return [_names(row), row.because]
    refusal = f"; others than {only_values(row)} are refused: {row.because}" if row.only else ""
    if row.reasons:
        refusal = f"; refused with the reason: {', '.join(row.reasons)}"
    default = default_text(row)
    return [_names(row), f"`{default}`" if default else "", row.help + refusal]


def _names(row: Flag) -> str:
    names = list(row.names)
    if isinstance(row.kind, Switch) and default_text(row) == "on":
        names.insert(0, f"--no-{row.name[2:]}")
    if row.kind.metavar:
        names[-1] += f" {row.kind.metavar}"
    return ", ".join(f"`{name}`" for name in names)


def _line(cells: list[str] | tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
