"""Triton's folders in /tmp, which other programs may remove."""

from nereid.server.embedded_server import EnvironmentFolders


def test_removed_folder_is_there_while_the_server_ends(tmp_path):
    of_another, own, kept = (tmp_path / f"python_env_{name}" for name in ("another", "own", "kept"))
    of_another.mkdir()
    folders = EnvironmentFolders(tmp_path)
    own.mkdir()
    kept.mkdir()
    folders.note()
    own.rmdir()
    of_another.rmdir()

    with folders.kept():
        assert {*tmp_path.iterdir()} == {own, kept}
    assert {*tmp_path.iterdir()} == {kept}
