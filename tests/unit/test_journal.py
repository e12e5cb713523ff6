"""Journals: torn and damaged lines, other releases, several writers, and files that refuse a write."""

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path
from zlib import crc32

import pytest
from msgspec import Struct

from nereid.base.errors import OperationFailed
from nereid.base.files import LockTimeout
from nereid.base.journal import Journal
from tests.tables import cases


class Note(Struct, frozen=True, omit_defaults=True):
    text: str
    number: int = 0


WATCHDOG_S = 60
NOTES = Note("a", 1), Note("b€"), Note("c" * 500, 3)


@pytest.fixture
def journal(tmp_path) -> Journal[Note]:
    return Journal(tmp_path / "notes.jsonl", Note, "nereid note")


@pytest.fixture
def written(journal) -> Journal[Note]:
    append(journal, *NOTES)
    return journal


def append(journal: Journal[Note], *notes: Note) -> None:
    with journal.locked() as add:
        for note in notes:
            add(note)


def flipped(line: bytes, position: int, bit: int) -> bytes:
    return line[:position] + bytes([line[position] ^ 1 << bit]) + line[position + 1 :]


def test_each_line_ends_with_the_checksum_of_its_object(journal):
    assert (journal.read(), journal.read_intact(), journal.note_on_damage()) == ((), (), "")

    append(journal, Note("a", 1))
    append(journal, Note("b€"))

    objects = b'{"text":"a","number":1}', '{"text":"b€"}'.encode()
    lines = [each[:-1] + f',"crc32":"{crc32(each):08x}"}}\n'.encode() for each in objects]
    assert journal.path.read_bytes() == b"".join(lines)
    assert journal.read() == (Note("a", 1), Note("b€"))


def test_earlier_releases_wrote_no_checksum(journal):
    journal.path.write_bytes(b'{"text":"a","added":[]}\n\n{"text":"b","number":2}\n')

    assert (journal.read(), journal.note_on_damage()) == ((Note("a"), Note("b", 2)), "")


@cases("torn", begin=b"{", string=b'{"text":"d', object=b'{"text":"d","of":{}', text=b'{"text":"\xe2')
def test_torn_last_line_is_left_out_and_ended_by_the_next_entry(written, torn):
    """A killed writer leaves the beginning of its line; it is no damage."""
    written.path.write_bytes(written.path.read_bytes() + torn)
    assert (written.read(), written.note_on_damage()) == (NOTES, "")

    append(written, Note("e"))

    assert written.read() == (*NOTES, Note("e"))
    assert written.path.read_bytes().splitlines()[3] == torn


@cases(
    "damage",
    bit=lambda line: flipped(line, 10, 0),
    bytes=lambda line: b"\xff\x00\n",
    cut=lambda line: line[5:],
    brace=lambda line: b'{"text":"b","of":{}\n',
    no_object=lambda line: b"[7]\n",
    deep=lambda line: b'{"text":' + b"[" * 100_000 + b"\n",
)
def test_damaged_line_is_named_and_costs_no_other(written, damage):
    lines = written.path.read_bytes().splitlines(keepends=True)
    written.path.write_bytes(b"".join([lines[0], damage(lines[1]), lines[2]]))

    assert written.read() == written.read_intact() == (NOTES[0], NOTES[2])
    note = f"note: damaged lines of '{written.path}' are ignored: 2; fix: remove them"
    assert written.note_on_damage() == note


def test_each_damaged_bit_of_the_last_line_is_found_or_harmless(written):
    """The last line decides what is unfinished: it is read as it was written, or an error names it."""
    *before, last = written.path.read_bytes().splitlines(keepends=True)
    message, refused = f"line 3 of '{written.path}' is damaged, and with it the end of the last change", 0
    for position in range(len(last)):
        written.path.write_bytes(b"".join([*before, flipped(last, position, position % 8)]))
        try:
            assert written.note_on_damage() == ""
            assert written.read() == NOTES
        except OperationFailed as error:
            refused += str(error).startswith(message)

    # Only in the newline and around the checksum can a bit change without a loss.
    assert refused > len(last) * 0.9


@cases("line", value=b'{"text":7}\n', key=b'{"words":"a"}\n')
def test_line_of_another_release_is_an_error_with_its_number(written, line):
    written.path.write_bytes(written.path.read_bytes() + line)
    append(written, Note("e"))

    with pytest.raises(
        OperationFailed, match=r"^cannot read line 4 of '.*': another release of nereid wrote it"
    ):
        written.read()
    assert (written.read_intact(), written.note_on_damage()) == ((*NOTES, Note("e")), "")


def test_entry_is_on_the_disk_before_the_next(journal, monkeypatch):
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(journal.path.read_bytes().count(b"\n")))

    append(journal, *NOTES)

    assert synced == [1, 1, 2, 3]  # the folder, too, once the file is new


def test_one_writer_at_a_time(journal):
    message = r"notes.jsonl' is locked by another `nereid note`; fix: try again"
    with journal.locked(), pytest.raises(LockTimeout, match=message), journal.locked(0.05):
        pass


def test_entries_of_one_lock_are_not_mixed_with_others(journal):
    program = (
        "import sys; from tests.unit.test_journal import *\n"
        f"with Journal(Path({str(journal.path)!r}), Note, 'x').locked({WATCHDOG_S}) as add:\n"
        "    for number in range(40): add(Note(sys.argv[1] * 2000, number))"
    )
    words = [sys.executable, "-c", program]
    with subprocess.Popen([*words, "a"]) as first, subprocess.Popen([*words, "b"]) as second:
        assert (first.wait(WATCHDOG_S), second.wait(WATCHDOG_S)) == (0, 0)

    entries = journal.read()

    assert [entry.number for entry in entries] == [*range(40)] * 2
    assert len({entry.text for entry in entries[:40]}) == 1


def test_full_disk_loses_only_the_entry_that_does_not_fit(written):
    """A limit of the file's size stands for the disk: a part of the line is written, and then no more."""
    before, limits = written.path.stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
    with written.locked() as add:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before + 10, limits[1]))
        try:
            with pytest.raises(OSError, match="File too large") as failed:
                add(Note("does not fit"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert (failed.value.filename, written.read()) == (str(written.path), NOTES)
        add(Note("fits"))

    assert written.read() == (*NOTES, Note("fits"))


@cases(
    ("make", "code"),
    link=(lambda path: path.symlink_to("/dev/null"), errno.ELOOP),
    folder=(Path.mkdir, errno.EISDIR),
    no_folder=(lambda path: path.parent.rmdir(), errno.ENOENT),
)
def test_file_that_cannot_be_written_is_named(journal, make, code):
    """A link would let others choose the file that is written."""
    make(journal.path)

    with pytest.raises(OSError, match=r"notes.jsonl") as failed:
        append(journal, Note("a"))

    assert failed.value.errno == code
