"""Readers of Markdown pages: their texts, headings and links."""

import re
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

# Folders at the root of a checkout that hold no page of this project.
FOREIGN = {"site", "dist", "build", "photos", "node_modules"}


def pages(root: Path) -> list[Path]:
    folders = [folder for folder in root.iterdir() if folder.is_dir() and not folder.name.startswith(".")]
    paths = [page for folder in folders if folder.name not in FOREIGN for page in folder.rglob("*.md")]
    return sorted([*root.glob("*.md"), *paths])


def page_text(path: Path) -> str:
    """Return the text of a page; of the changelog only the part that is not released yet."""
    text = path.read_text()
    if path.name == "CHANGELOG.md":
        return re.split(r"^## \[\d", text, maxsplit=1, flags=re.MULTILINE)[0]
    return text


def headings(markdown: str) -> set[str]:
    counts: dict[str, int] = {}
    anchors = set()
    tokens = parse(markdown)
    for opening, inline in pairwise(tokens):
        if opening.type == "heading_open":
            plain = "".join(
                child.content for child in inline.children or [] if child.type in ("text", "code_inline")
            )
            slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
            seen = counts[slug] = counts.get(slug, -1) + 1
            anchors.add(f"{slug}-{seen}" if seen else slug)
    return anchors


def links(markdown: str) -> list[str]:
    inline = [child for token in parse(markdown) for child in token.children or []]
    targets = [child.attrGet("href") or child.attrGet("src") for child in inline]
    return [str(target) for target in targets if target]


def parse(markdown: str) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(markdown)
