"""Warn of long sentences on the pages: `python -m tools.long_sentences`."""

import re
from collections.abc import Iterator
from itertools import pairwise

from markdown_it.token import Token

from tests import prose
from tests.conftest import ROOT

MAX_WORDS = 25
# Stands for a code span, which counts as one word.
CODE = "\N{PLACE OF INTEREST SIGN}"
SENTENCE_END = re.compile(r"(?<=[.!?])[)\"'”’]*\s+(?=[\"'(“]*[A-Z0-9⌘])")


def paragraphs(markdown: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each paragraph."""
    for opening, inline in pairwise(prose.parse(markdown)):
        if opening.type == "paragraph_open" and opening.map:
            yield opening.map[0] + 1, "".join(map(_plain, inline.children or []))


def sentences(text: str) -> list[str]:
    """Return the sentences of a text."""
    return [sentence for sentence in SENTENCE_END.split(text.strip()) if sentence]


def words(sentence: str) -> int:
    """Return the number of words."""
    return sum(any(letter.isalnum() or letter == CODE for letter in word) for word in sentence.split())


def _plain(token: Token) -> str:
    if token.type == "code_inline":
        return CODE
    return " " if token.type in ("softbreak", "hardbreak") else token.content if token.type == "text" else ""


def main() -> None:
    """Print the place of each long sentence."""
    for path in prose.pages(ROOT):
        for line, text in paragraphs(prose.page_text(path)):
            for sentence in sentences(text):
                if (count := words(sentence)) > MAX_WORDS:
                    print(f"warning: {path.relative_to(ROOT)}:{line}: {count} words: {sentence}")


if __name__ == "__main__":
    main()
