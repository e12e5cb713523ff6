"""The language of pages, docstrings and messages."""

import re

import pytest

from tests import prose
from tests.conftest import ROOT

MAX_WORDS = 25
PAGES = {str(path.relative_to(ROOT)): path for path in prose.pages(ROOT)}
SOURCES = {
    str(path.relative_to(ROOT)): path
    for room in ("nereid", "python_backend", "loadtest", "clients")
    for path in sorted((ROOT / room).rglob("*"))
    if path.suffix in {".py", ".js", ".mjs", ".html", ".css", ".cu"}
}


def expect_none(offenders: list[str]) -> None:
    """Fail with the offenders alone, one per line."""
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


def test_pages_use_plain_words():
    found = []
    for page, path in PAGES.items():
        text = prose.page_text(path)
        found += [
            f"{page}:{line}: {each}" for line, part in prose.passages(text) for each in prose.banned(part)
        ]
        found += [
            f"{page}:{line}: {each}" for line, part in prose.paragraphs(text) for each in prose.clauses(part)
        ]

    expect_none(found)


def test_sources_use_plain_words():
    found = [
        f"{source}:{line}: {problem}"
        for source, path in SOURCES.items()
        for line, text in prose.source_texts(path)
        for problem in prose.banned(text) + prose.clauses(text)
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


def test_banned_phrases_are_found():
    assert prose.banned("The file is no longer used; there is no model.") == []
    assert len(prose.banned("Mend it at once.")) == 2
    assert len(prose.clauses("What it does is unclear. Who sends it?")) == 1
