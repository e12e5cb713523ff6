"""Publications of `nereid watch`: which are repeated, and what would reject every file."""

import re
import shutil
from pathlib import Path

import pytest

from nereid.base.errors import OperationFailed, WrongUsage
from nereid.models.publish import drop_folder, watch
from nereid.models.publish.examination import ExaminationLimits
from nereid.models.publish.staged_version import Description, write_description
from nereid.repository.checksums import digest
from tests.publishing import unchanged
from tests.tables import cases


def publish_to(repository: Path, find_server=lambda: None) -> drop_folder.Publish:
    limits = ExaminationLimits(max_slowdown=100, max_memory_ratio=100)
    return watch.publication(repository, find_server, limits, 0, lambda line: None)


@pytest.mark.parametrize("path", ["net@x.onnx", "net@x/net.onnx", "net@x/model.onnx/model.onnx"])
def test_newest_version_is_not_published_again(repository, tmp_path, path):
    """After a kill before the journal was written, the file is recognized as that version."""
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(repository / "net" / "1" / "model.onnx", tmp_path / path)
    source = tmp_path / Path(path).parts[0]
    if source.is_dir():
        (source / "README").write_text("about it")

    with unchanged(repository):
        assert publish_to(repository)("net", source) == ("net", 1)


def test_newest_version_that_was_adapted_is_not_published_again(repository, tmp_path):
    """The dropped file is the one before the changes."""
    version, dropped = repository / "net" / "1", tmp_path / "net.onnx"
    shutil.copyfile(version / "model.onnx", dropped)
    write_description(version, Description("net.onnx", digest(dropped)))
    (version / "model.onnx").write_bytes(b"adapted")

    assert publish_to(repository)("net", dropped) == ("net", 1)


def test_server_is_looked_up_for_each_publication(repository):
    """The server may have restarted on other ports since the last publication."""
    looks: list[None] = []
    publish = publish_to(repository, lambda: looks.append(None))
    assert looks == []

    for _ in range(3):
        publish("net", repository / "net" / "1" / "model.onnx")

    assert len(looks) == 3


def test_folder_with_the_newest_version_as_a_side_file_is_another(repository, tmp_path):
    """The network decides, not a copy of the predecessor in the same folder."""
    source = tmp_path / "net"
    (source / "before").mkdir(parents=True)
    shutil.copyfile(repository / "net" / "1" / "model.onnx", source / "before" / "net.onnx")
    (source / "net.onnx").write_text("bad")

    with pytest.raises(OperationFailed, match="expected an ONNX network"):
        publish_to(repository)("net", source)


def test_failed_recovery_is_a_temporary_failure(repository, tmp_path):
    (tmp_path / ".models.nereid").mkdir()
    (tmp_path / ".models.nereid" / "journal.jsonl").write_text('{"event":"commit","operation":7}\n')

    with pytest.raises(drop_folder.TemporaryFailure, match="another release of nereid wrote it"):
        publish_to(repository)("net", repository / "net" / "1" / "model.onnx")


OVERLAP = ": it contains the repository '{0}/models', or is inside"


@cases(
    absent=("absent", "models", "", "cannot watch '{0}/absent': it is not a folder; fix: mkdir "),
    file=("file", "models", "", "cannot watch '{0}/file': it is not a folder"),
    in_repository=("link", "models", "", "cannot watch '{0}/link'" + OVERLAP),
    around_repository=(".", "models", "", "cannot watch '{0}'" + OVERLAP),
    repository=("drop", "absent", "", "'{0}/absent' is not a folder; fix: "),
    model=("drop", "models", "other", "'{0}/models' has no network 'other', it has: net"),
    share=("drop", "models", "", "invalid share: expected 0 to 99% of the traffic, got 100%"),
)
def test_watch_that_would_reject_every_file_is_wrong_usage(folder, target, model, reason, repository):
    base = repository.parent
    (base / "drop").mkdir()
    (base / "file").touch()
    (base / "link").symlink_to(repository / "net")

    with pytest.raises(WrongUsage, match=f"^{re.escape(reason.format(base))}"):
        watch.check(base / folder, base / target, model, share=1.0 * ("share" in reason))
