"""Readers of prose: the sentences of Markdown pages, and the texts inside source files."""

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt
from markdown_it.token import Token

# Folders at the root of a checkout that hold no page of this project.
FOREIGN = {"site", "dist", "build", "photos", "node_modules"}
# Stands for a code span, which counts as one word.
CODE = "\N{PLACE OF INTEREST SIGN}"
SENTENCE_END = re.compile(r"(?<=[.!?])[)\"'”’]*\s+(?=[\"'(“]*[A-Z0-9⌘])")

# The phrases that docs/style forbids, and what to write instead. Matched without regard to case.
BANNED = {
    r"mend(?:s|ed|ing)?": "fix",
    r"(?<!there )(?:is|are|was|were) no (?!longer|more|less|fewer|later|matter)\w+": "is not a, has no",
    r"cannot be meant": "is invalid",
    r"(?:is|are|was|were) meant": "is intended",
    r"at once": "immediately, atomically, at the same time",
    r"beside": "next to",
    r"so (?:many|long|much)": "a number, a duration",
    r"tells?|told": "report, return, show",
    r"asks|asked": "send, request",
    r"whoever": "the client, the user",
    r"whatever (?:is|are|was|were)": "any",
    r"for ever": "permanently",
}
RULES = {re.compile(rf"\b(?:{phrase})\b", re.IGNORECASE): better for phrase, better in BANNED.items()}
# A clause in the place of a subject. A question may begin with these words.
CLAUSE_START = re.compile(r"^(?:what|who|whoever|whatever)\b(?!.*\?$)", re.IGNORECASE | re.DOTALL)


class Text(NamedTuple):
    line: int
    text: str


def pages(root: Path) -> list[Path]:
    folders = [each for each in root.iterdir() if each.is_dir() and not each.name.startswith(".")]
    found = [page for folder in folders if folder.name not in FOREIGN for page in folder.rglob("*.md")]
    return sorted([*root.glob("*.md"), *found])


def page_text(path: Path) -> str:
    """Return the text of a page; of the changelog only the part that is not released yet."""
    text = path.read_text()
    if path.name == "CHANGELOG.md":
        return re.split(r"^## \[\d", text, maxsplit=1, flags=re.MULTILINE)[0]
    return text


def paragraphs(markdown: str) -> Iterator[Text]:
    yield from _blocks(markdown, {"paragraph_open"})


def passages(markdown: str) -> Iterator[Text]:
    """Yield every text of a page that a reader sees as prose: headings and table cells too, but no code."""
    yield from _blocks(markdown, {"paragraph_open", "heading_open", "th_open", "td_open"})


def sentences(text: str) -> list[str]:
    return [sentence for sentence in SENTENCE_END.split(text.strip()) if sentence]


def words(sentence: str) -> int:
    """Count the words of a sentence; punctuation that stands alone is not a word."""
    return sum(any(letter.isalnum() or letter == CODE for letter in word) for word in sentence.split())


def banned(text: str) -> list[str]:
    found = [(match, better) for rule, better in RULES.items() for match in rule.finditer(text)]
    return [f"{match[0]!r} (say: {better})" for match, better in found]


def clauses(text: str) -> list[str]:
    starts = [sentence for sentence in sentences(text) if CLAUSE_START.match(sentence)]
    return [f"begins with a clause: {' '.join(start.split()[:6])} …" for start in starts]


def headings(markdown: str) -> set[str]:
    found: dict[str, int] = {}
    anchors = set()
    tokens = _parse(markdown)
    for opening, inline in pairwise(tokens):
        if opening.type == "heading_open":
            plain = "".join(
                child.content for child in inline.children or [] if child.type in ("text", "code_inline")
            )
            slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
            seen = found[slug] = found.get(slug, -1) + 1
            anchors.add(f"{slug}-{seen}" if seen else slug)
    return anchors


def links(markdown: str) -> list[str]:
    inline = [child for token in _parse(markdown) for child in token.children or []]
    targets = [child.attrGet("href") or child.attrGet("src") for child in inline]
    return [str(target) for target in targets if target]


def source_texts(path: Path) -> Iterator[Text]:
    """Yield the docstrings and messages of a Python file; of any other source, the comments and strings.

    In other sources a text is a quoted string, the content of an element, or a comment. Code between them is
    yielded, too: it cannot contain a phrase by chance.
    """
    if path.suffix != ".py":
        yield from _quoted_texts(path.read_text())
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
            yield Text(node.lineno, re.sub(r"``?[^`]*``?", CODE, node.value))


def _quoted_texts(source: str) -> Iterator[Text]:
    line = 1
    # A line that continues a comment begins with an asterisk or slashes, which are not part of its sentence.
    for piece in re.split(r"([\"`<>]|/\*+|\*/|(?<![:\S])//(?!.*\n\s*//))", source):
        yield Text(line, re.sub(r"\s*\n\s*(?:\*|//)?\s*", " ", piece).strip())
        line += piece.count("\n")


def _parse(markdown: str) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(markdown)


def _blocks(markdown: str, kinds: set[str]) -> Iterator[Text]:
    line = 0
    tokens = _parse(markdown)
    for opening, inline in pairwise(tokens):
        line = opening.map[0] + 1 if opening.map else line
        if opening.type in kinds and inline.type == "inline":
            yield Text(line, "".join(map(_plain, inline.children or [])))


def _plain(token: Token) -> str:
    if token.type == "code_inline":
        return CODE
    return " " if token.type in ("softbreak", "hardbreak") else token.content if token.type == "text" else ""
