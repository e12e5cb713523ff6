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


@pytest.mark.parametrize("page", PAGES)
def test_sentences_are_short(page):
    found = [
        f"{page}:{line}: {prose.words(sentence)} words: {sentence}"
        for line, text in prose.paragraphs(prose.page_text(PAGES[page]))
        for sentence in prose.sentences(text)
        if prose.words(sentence) > MAX_WORDS
    ]

    expect_none(found)


@pytest.mark.parametrize("page", PAGES)
def test_pages_use_plain_words(page):
    text = prose.page_text(PAGES[page])
    found = [(line, problem) for line, each in prose.passages(text) for problem in prose.banned(each)]
    found += [(line, problem) for line, each in prose.paragraphs(text) for problem in prose.clauses(each)]

    expect_none([f"{page}:{line}: {problem}" for line, problem in found])


@pytest.mark.parametrize("source", SOURCES)
def test_source_uses_plain_words(source):
    found = [
        f"{source}:{line}: {problem}"
        for line, text in prose.source_texts(SOURCES[source])
        for problem in prose.banned(text) + prose.clauses(text)
    ]

    expect_none(found)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    broken = []
    for link in prose.links(prose.page_text(PAGES[page])):
        path, _, anchor = link.partition("#")
        target = PAGES[page].parent / path if path else PAGES[page]
        if re.match(r"[a-z]+:", link):
            continue
        if not target.exists() or (anchor and anchor not in prose.headings(target.read_text())):
            broken.append(f"{page}: {link}")

    expect_none(broken)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The server is overloaded.", 0),
        ("A file is no model.", 1),
        ("The file is no longer used; there is no model.", 0),
        ("Mend it at once.", 2),
        ("What it does is unclear. Who sends it?", 1),
        ("Callers are told.", 1),
    ],
)
def test_banned_phrases_are_found(text, found):
    assert len(prose.banned(text) + prose.clauses(text)) == found


@pytest.mark.parametrize(
    "text",
    [
        'say("Enter a key at once.");',
        "say(`${name} is\n  no model`);",
        '<p title="Ask whoever knows">x</p>',
        "<p>The key\n  is told.</p>",
        "/** One line.\n * It is\n * no model. */",
        'say("What is sent.");',
        "<p>Who sends it</p>",
        "// Files lie\n// beside it",
    ],
)
def test_banned_phrases_of_a_page_are_found(tmp_path, text):
    (source := tmp_path / "page.js").write_text(f'const a = "plain";\n{text}\n')

    found = [
        each for _, part in prose.source_texts(source) for each in prose.banned(part) + prose.clauses(part)
    ]
    assert len(found) == 1


def test_sentences_end_where_a_reader_stops():
    (paragraph,) = prose.paragraphs(
        "Run `nereid serve -- --log` (e.g. in a shell). It\nprints 2 lines.\n\n| a |\n|---|\n"
    )

    assert [prose.words(each) for each in prose.sentences(paragraph.text)] == [6, 4]
    assert list(prose.paragraphs("# Heading\n\n```\ncode\n```\n\n    code\n")) == []


def test_anchors_are_those_of_the_headings():
    assert prose.headings("# The `x` page\n## A/B: 2\n## Rules\n## Rules\n") == {
        "the-x-page",
        "ab-2",
        "rules",
        "rules-1",
    }
