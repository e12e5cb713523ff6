"""The model and the repository that a command or a program uses."""

from pathlib import Path

from nereid.base import assets
from nereid.base.contract import IMAGE
from nereid.base.errors import WrongUsage
from nereid.base.task import Task
from nereid.base.task_registry import DEFAULT_TASK, TASKS


def find_model(repository: Path, name: str, task: Task) -> str:
    """Return the model of a task: `name` if given, else the task's default, else the only one here.

    Raises:
        WrongUsage: the repository has no such model, or several; the message lists their names.
    """
    model = name or task.model
    if (repository / model).is_dir():
        return model
    from nereid.models.routes.location import check_repository, models_with

    check_repository(repository)
    matches = models_with(repository, task.outputs)
    names = ", ".join(matches)
    if not matches:
        outputs = ", ".join(f"'{output}'" for output in task.outputs)
        word = "outputs" if len(task.outputs) > 1 else "output"
        raise WrongUsage(
            f"'{repository}' has no model with input '{IMAGE}' and {word} {outputs}; fix: {task.fix}"
        )
    if name:
        raise WrongUsage(f"'{repository}' has no model '{name}'; expected one of: {names}")
    if len(matches) > 1:
        raise WrongUsage(f"'{repository}' has several models; fix: name one with --model: {names}")
    return matches[0]


def find_any_model(repository: Path, name: str) -> str:
    """Return the model `name`, else a classifier, else a model of another task, default ones first.

    Raises:
        WrongUsage: the repository has no such model, or none; the message lists the models of all tasks.
    """
    from nereid.models.routes.location import check_repository, models_with
    from nereid.repository.repository_index import is_model, model_folders

    check_repository(repository)
    pairs = [(task, model) for task in TASKS for model in models_with(repository, task.outputs)]
    pairs.sort(key=lambda pair: (pair[0] is not DEFAULT_TASK, pair[1] != pair[0].model))
    models = [*dict.fromkeys(model for _, model in pairs)]
    models = models or [folder.name for folder in model_folders(repository) if is_model(folder)]
    if name and not (repository / name).is_dir():
        raise WrongUsage(f"'{repository}' has no model '{name}'; expected one of: {', '.join(models)}")
    if not models:
        raise WrongUsage(f"'{repository}' has no model; fix: nereid add FILE --repository {repository}")
    return name or models[0]


def changeable_repository(repository: Path) -> Path:
    """Return the repository, if its models may be changed.

    Raises:
        WrongUsage: it is part of the installed package, which the next upgrade replaces.
    """
    if not assets.IS_CHECKOUT and repository.resolve() == assets.REPOSITORY:
        raise WrongUsage(
            "the models of the installed package cannot be changed, since an upgrade replaces them; "
            "fix: nereid init DIR, then --repository DIR or NEREID_REPOSITORY=DIR"
        )
    return repository
