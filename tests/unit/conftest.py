"""What unit tests share."""

import subprocess

import pytest
from typer.testing import CliRunner

from nereid.cli.main import app
from tests.publishing import store_published


@pytest.fixture
def repository(tmp_path):
    """A published network `net` with its route `r`, unless a module has a repository of its own."""
    store_published(tmp_path / "models")
    return tmp_path / "models"


@pytest.fixture
def nereid(repository):
    """Run a command of `nereid` on the repository, without a server."""
    environment = {"NEREID_REPOSITORY": str(repository), "XDG_RUNTIME_DIR": str(repository.parent)}

    def run(*words: object, stdin: str | bytes = ""):
        done = CliRunner().invoke(app, [*map(str, words)], env=environment, input=stdin)
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done

    return run


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    """A file with a private key and its certificate, for localhost."""
    folder = tmp_path_factory.mktemp("tls")
    pem, public = folder / "both.pem", folder / "cert"
    words = f"req -x509 -newkey rsa:2048 -nodes -subj /CN=localhost -keyout {pem} -out {public}"
    names = ["-addext", "subjectAltName=DNS:localhost"]
    subprocess.run(["openssl", *words.split(), *names], check=True, capture_output=True)
    pem.write_bytes(pem.read_bytes() + public.read_bytes())
    return pem
