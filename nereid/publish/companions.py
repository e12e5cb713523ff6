"""Default models that a reader uses, too: those of the repository, or else of the package."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from nereid.assets import TEXT_REPOSITORY, copy_models
from nereid.config.model_config import ModelConfig, read_pbtxt
from nereid.errors import WrongUsage
from nereid.publish.intake.tasks.reader_models import DETECT, DIRECTION
from nereid.repository.layout import served_versions
from nereid.serving_errors import InvalidConfig
from nereid.text.reading_settings import tensor_problems

PARTS = {DETECT: "detect", DIRECTION: "direction"}


def copy_companions(names: Sequence[str], public: str, repository: Path, target: Path) -> dict[str, int]:
    """Copy models that the pinned model uses, too, and return their newest versions.

    Those of the repository are copied only for the examination.

    Args:
        names: of the models.
        public: the name that is added.
        repository: the model repository.
        target: the folder of all staged models.

    Raises:
        WrongUsage: the public name is one of theirs, or the repository has another model of that name.
    """
    if public in names:
        raise WrongUsage(
            f"invalid name: '{public}' is a model that finds text for readers; fix: another --name"
        )
    found = {}
    for name in names:
        is_shared = (repository / name).exists()
        source = (repository if is_shared else TEXT_REPOSITORY) / name
        if is_shared and (problem := next(_problems(source), "")):
            raise WrongUsage(
                f"'{repository}' has a model '{name}' that does not find text: {problem}; "
                "fix: nereid add that model under another name, or use another repository"
            )
        copy_models(source, target / name)
        found[name] = _newest(source)
    return found


def _newest(folder: Path) -> int:
    return max(served_versions(folder, read_pbtxt(folder / "config.pbtxt")), default=1)


def _problems(folder: Path) -> Iterator[str]:
    try:
        yield from tensor_problems(PARTS[folder.name], ModelConfig.from_file(folder, _newest(folder)))
    except InvalidConfig as error:
        yield str(error)
