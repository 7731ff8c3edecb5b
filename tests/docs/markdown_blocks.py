"""The documentation as data: fenced code blocks with what their fence says, tables, links, headings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])

_FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One fenced block. `marks`: the words behind the language, e.g. `run` in ```` ```python run ````."""

    page: Path
    line: int
    language: str
    marks: tuple[str, ...]
    body: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found = []
    for match in _FENCE.finditer(text):
        language, *marks = match["info"].split() or [""]
        cut = len(match["indent"])
        body = "\n".join(line[cut:] for line in match["body"].splitlines())
        found.append(Block(page, text.count("\n", 0, match.start()) + 1, language, tuple(marks), body))
    return found


ALL = [block for page in PAGES for block in blocks(page)]


def of(language: str, *marks: str) -> list[Block]:
    """All blocks of a language whose marks begin with these."""
    return [block for block in ALL if block.language == language and block.marks[: len(marks)] == marks]


def prose(page: Path) -> str:
    """The page without its code blocks."""
    return _FENCE.sub("", page.read_text())


def links(page: Path) -> list[str]:
    """Targets of links that stay in the repository."""
    return [target for target in _LINK.findall(prose(page)) if "://" not in target]


def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a page."""
    made = set()
    for heading in _HEADING.findall(prose(page)):
        plain = re.sub(r"[^\w\- ]", "", heading.strip().lower())
        made.add(plain.replace(" ", "-"))
    return made


def rows(page: Path, heading: str) -> list[list[str]]:
    """Cells of all tables under a heading, heads and rulers left out, down to the next heading of any level."""
    _, _, rest = f"\n{page.read_text()}".partition(f"\n{heading}\n")
    assert rest, f"{page.name} has no heading {heading!r}"
    section = re.split(r"^#+ ", rest, maxsplit=1, flags=re.MULTILINE)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    bodies = [line for place, line in enumerate(lines) if not _is_head(lines, place)]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in bodies]


def _is_head(lines: list[str], place: int) -> bool:
    ruler = re.compile(r"[|\- :]+")
    return bool(ruler.fullmatch(lines[place])) or (place + 1 < len(lines) and bool(ruler.fullmatch(lines[place + 1])))


def names(cell: str) -> list[str]:
    """What stands in backticks in a cell."""
    return re.findall(r"`([^`]+)`", cell)
