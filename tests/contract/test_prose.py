"""The sentences and links of pages."""

import re

import pytest

from tests import prose
from tests.conftest import ROOT

MAX_WORDS = 25
PAGES = {str(path.relative_to(ROOT)): path for path in prose.pages(ROOT)}


def expect_none(offenders: list[str]) -> None:
    if offenders:
        pytest.fail("\n".join(offenders), pytrace=False)


def test_sentences_are_short():
    found = [
        f"{page}:{line}: {prose.words(sentence)} words: {sentence}"
        for page, path in PAGES.items()
        for line, text in prose.paragraphs(prose.page_text(path))
        for sentence in prose.sentences(text)
        if prose.words(sentence) > MAX_WORDS
    ]

    expect_none(found)


def test_links_lead_somewhere():
    broken = []
    for page, source in PAGES.items():
        for link in prose.links(prose.page_text(source)):
            path, _, anchor = link.partition("#")
            target = source.parent / path if path else source
            if re.match(r"[a-z]+:", link):
                continue
            if not target.exists() or (anchor and anchor not in prose.headings(target.read_text())):
                broken.append(f"{page}: {link}")

    expect_none(broken)
