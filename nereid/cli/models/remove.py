"""`nereid remove` and `nereid reload`: models that go, and models that were edited."""

import sys
from typing import Annotated

import typer

from nereid.application.chosen_models import own_repository
from nereid.base.assets import REPOSITORY
from nereid.base.errors import OperationFailed, WrongUsage
from nereid.cli.options import Model, Repository, show_progress
from nereid.cli.server_options import find_server


def remove(
    context: typer.Context,
    model: Model,
    yes: Annotated[bool, typer.Option("--yes", help="Remove the models without a question.")] = False,
    repository: Repository = REPOSITORY,
) -> None:
    """Remove a model from server and repository; with a route, also the models behind it."""
    from nereid.models.publish import remove as removal

    record = find_server(context, own_repository(repository))
    names = removal.find_parts(repository, model).models or (model,)
    if not yes:
        if not sys.stdin.isatty():
            raise WrongUsage(f"cannot ask without a terminal; fix: --yes to remove {', '.join(names)}")
        if not typer.confirm(f"Remove {', '.join(names)} with all versions?"):
            print("nothing has changed", file=sys.stderr)
            return
    for name in removal.remove(repository, model, record, show_progress):
        print(f"{name}: removed")


def reload(context: typer.Context, model: Model, repository: Repository = REPOSITORY) -> None:
    """Load a model again whose config or files you edited, without interrupting its requests."""
    from nereid.models.publish import remove as removal

    record = find_server(context, own_repository(repository))
    if record is None:
        raise OperationFailed(f"no server runs for '{repository}'; fix: nereid serve")
    removal.reload(repository, model, record)
    print(f"{model}: loaded again")
