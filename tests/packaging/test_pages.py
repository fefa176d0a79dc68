"""The pages of the documentation: links lead somewhere, and both languages tell to type the same."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from hotstart.config.parse import parse_serve

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
TRANSLATED = [page for page in PAGES if page.replace(".md", ".zh-CN.md") in PAGES]

_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
_HEADING = re.compile(r"^(#+) (.+)$", re.M)
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_STARTS = re.compile(r"""hotstart (?:serve|check) ((?:'[^'\n]*'|[^#|&"'\n])+)""")
_COMMENT = re.compile(r"(?:^|\s+)#.*")
_QUOTED = re.compile(r'"[^"]*"')


def prose(page: str) -> str:
    """The page without what is to be copied."""
    return _FENCED.sub("", (ROOT / page).read_text(encoding="utf-8"))


def anchors(page: str) -> set[str]:
    """What can stand behind ``#`` in a link to the page, as GitHub makes it of the headings."""
    found: dict[str, int] = {}
    for _, heading in _HEADING.findall(prose(page)):
        words = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found[words] = found.get(words, 0) + 1
    return {f"{words}-{n}" if n else words for words, times in found.items() for n in range(times)}


def commands(page: str) -> list[tuple[str, list[str]]]:
    """Language and lines of each block, without comments, which are translated."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [(kind, _COMMENT.sub("", block).splitlines()) for kind, block in _FENCED.findall(text)]


def same(english: str, chinese: str) -> bool:
    """What a model is asked may be translated; everything else is the same."""
    return english == chinese or (
        not chinese.isascii() and _QUOTED.sub('""', english) == _QUOTED.sub('""', chinese)
    )


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings_that_exist(page: str) -> None:
    for target in _LINK.findall(prose(page)):
        if re.match("[a-z]+:", target):
            continue  # not of this repository
        name, _, anchor = target.partition("#")
        file = (ROOT / page).parent / name if name else ROOT / page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file.resolve().relative_to(ROOT).as_posix()), target


@pytest.mark.parametrize("page", PAGES)
def test_starts_and_checks_that_are_told_to_type_are_accepted(page: str) -> None:
    """Flags exist and take such values; what only a command's own help answers is left out."""
    for kind, block in _FENCED.findall((ROOT / page).read_text(encoding="utf-8")):
        for words in _STARTS.findall(block.replace("\\\n", " ")) if kind == "console" else []:
            flags = [word for word in shlex.split(words) if word != "--explain"]
            if not any(flag.startswith("--help") for flag in flags):
                assert parse_serve(flags, {}).model


@pytest.mark.parametrize("page", TRANSLATED)
def test_both_languages_have_the_same_headings_and_tell_to_type_the_same(page: str) -> None:
    other = page.replace(".md", ".zh-CN.md")
    levels = [[len(marks) for marks, _ in _HEADING.findall(prose(each))] for each in (page, other)]
    assert levels[0] == levels[1]
    english, chinese = commands(page), commands(other)
    assert [kind for kind, _ in english] == [kind for kind, _ in chinese]
    for (_, lines), (_, translated) in zip(english, chinese, strict=True):
        assert len(lines) == len(translated)
        assert [pair for pair in zip(lines, translated, strict=True) if not same(*pair)] == []


@pytest.mark.parametrize("page", TRANSLATED)
def test_each_language_leads_to_the_other_at_the_top(page: str) -> None:
    other = page.replace(".md", ".zh-CN.md")
    names = Path(page).name, Path(other).name
    for own, label, target in ((page, "中文", names[1]), (other, "English", names[0])):
        head = (ROOT / own).read_text(encoding="utf-8").split("\n\n")[1]
        assert head == f"[{label}]({target})"


def test_a_translated_page_links_to_translated_pages() -> None:
    """Where there are some: who reads one language is not sent to the other."""
    for page in TRANSLATED:
        other = page.replace(".md", ".zh-CN.md")
        names = {Path(each).name for each in TRANSLATED} - {Path(page).name}
        linked = {Path(target.partition("#")[0]).name for target in _LINK.findall(prose(other))}
        assert not linked & names, other
