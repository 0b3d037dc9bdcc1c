"""Writes docs/reference/reports.md from the reports: `python docs/_site/reports_page.py`. A test holds the page to it."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "reports.md"
LONGEST = 150  # characters of a command

HEAD = """# Reports

<!-- Made by `python docs/_site/reports_page.py` from the reports; do not edit. -->

Every measurement that the repository keeps, the commit that was measured, and the command that repeats it; a long command is whole in its report.
`--vllm-lib` names a library of vLLM's wheel. What the figures mean: [performance](../performance.md). How they are measured:
[measuring](../guide/measuring.md). The quality of quantized models: [decision 0025](../decisions/0025-whole-models.md).
"""


def page() -> str:
    """The text of the page."""
    machines = defaultdict(list)
    for path in sorted((ROOT / "reports").rglob("*.md")):
        machine, *cells = _cells(path)
        machines[machine].append(f"| {' | '.join(cells)} |")
    parts = [HEAD]
    for machine in sorted(machines, reverse=True):
        parts.append(f"\n## {machine}\n\n| report | what | commit | command |\n|---|---|---|---|\n" + "\n".join(machines[machine]) + "\n")
    return "".join(parts)


def _cells(path: Path) -> tuple[str, str, str, str, str]:
    """(machine, link, title, commit, command) of a report in Markdown: from its heading, first line of code and first commit."""
    text = path.read_text(encoding="utf-8")
    title, _, machine = text.splitlines()[0].removeprefix("# ").partition(": ")
    command = re.search(r"^`([^`]+)`$", text, re.MULTILINE)
    commit = re.search(r"\bcommit\W+([0-9a-f]{7})", text, re.IGNORECASE)
    if command is None or commit is None:
        raise ValueError(f"{path}: expected a command and a commit, got none")
    shown = command[1] if len(command[1]) <= LONGEST else command[1][:LONGEST].rpartition(" ")[0] + " ..."
    of = re.sub(r"^\d+ ranks, | \(\w+\)|, \d+ cores", "", machine)
    place = path.relative_to(ROOT / "reports").as_posix()
    return of, f"[{place.removesuffix('.md')}](../../reports/{place})", title, commit[1], f"`{shown}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
