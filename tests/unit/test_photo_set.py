"""The photos of a load test: what their folders say about their class, and what is refused."""

from loadtest.users.photo_set import own

LABELS = ["crane", "3", "crane", "cup"]


def files(folder, *names: str) -> None:
    """Write files, each with its name as the content."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def test_a_folder_is_a_label_or_an_index(tmp_path):
    """Two classes may share a label, and an index may be a label; deeper folders belong to the first one."""
    files(tmp_path, "crane/a.jpg", "3/deep/b.png", "0/c.jpg", "d.jpg", "cup/note.txt")

    photos = own(tmp_path, frozenset(), lambda photo: LABELS)

    expected = {"crane/a.jpg": {0, 2}, "3/deep/b.png": {1, 3}, "0/c.jpg": {0}, "d.jpg": set()}
    assert {each.content.decode(): each.expected for each in photos} == expected


def test_a_folder_is_a_line_of_text(tmp_path):
    files(tmp_path, "RX123/a.jpg", "b.jpg")

    photos = own(tmp_path, frozenset(["any"]))

    assert {each.content.decode(): each.expected for each in photos} == {
        "RX123/a.jpg": {"RX123"},
        "b.jpg": {"any"},
    }
