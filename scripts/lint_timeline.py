"""Is the start in the READMEs that of the last release? It names the commit that it was measured at.

That commit must be the last tag, or newer, or run the same code: a README cannot name the commit
that it becomes part of, and a release changes the version and the pages after the measurement.
Without a tag there is nothing to compare with.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "README.zh-CN.md")
BLOCK = re.compile(r"(<!-- timeline: [^>]*?(?: at ([0-9a-f]+))? -->\n).*?(<!-- /timeline -->)", re.DOTALL)
# What a start runs, without the number of the version.
CODE = ("src", ":(exclude)src/hotstart/__init__.py")
AGAIN = "measure it again: python scripts/readme_timeline.py"


def main(root: Path = ROOT) -> int:
    problem, remark = judged(root)
    print(f"timeline: {problem or remark}", file=sys.stderr if problem else sys.stdout)
    return 1 if problem else 0


def judged(root: Path) -> tuple[str, str]:
    """A problem, or empty; and what to say where there is none."""
    commits = {name: commit_of(root / name) for name in PAGES}
    named = set(commits.values())
    if None in named:
        missing = ", ".join(name for name, commit in commits.items() if commit is None)
        return f"the block of {missing} names no commit; {AGAIN}", ""
    if len(named) > 1:
        return f"{' and '.join(PAGES)} name different commits; {AGAIN}", ""
    [commit] = named
    if not git(root, "rev-parse", "--git-dir").ok:
        return "", f"measured at {commit}; there is no history here to compare with"
    if not git(root, "cat-file", "-e", f"{commit}^{{commit}}").ok:
        if git(root, "rev-parse", "--is-shallow-repository").out == "true":
            return "", f"measured at {commit}, which this shallow clone does not have"
        return f"the READMEs name commit {commit}, which is not in the history; {AGAIN}", ""
    tag = git(root, "describe", "--tags", "--abbrev=0").out
    if not tag:
        return "", f"measured at {commit}; there is no tag to compare with"
    if git(root, "merge-base", "--is-ancestor", f"{tag}^{{commit}}", str(commit)).ok:
        return "", f"measured at {commit}, not before {tag}"
    if git(root, "diff", "--quiet", str(commit), tag, "--", *CODE).ok:
        return "", f"measured at {commit}, which runs the code of {tag}"
    return f"measured at {commit}, and {tag} runs other code; {AGAIN}", ""


def commit_of(page: Path) -> str | None:
    """What the block of a page names."""
    block = BLOCK.search(page.read_text(encoding="utf-8"))
    return block[2] if block else None


class Answer(NamedTuple):
    ok: bool
    out: str


def git(root: Path, *words: str) -> Answer:
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, check=False, text=True)
    return Answer(done.returncode == 0, done.stdout.strip())


if __name__ == "__main__":
    sys.exit(main())
