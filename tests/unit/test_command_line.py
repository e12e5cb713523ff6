"""The command line and the environment of `tritonserver`, and the options that are rejected before."""

from dataclasses import replace
from pathlib import Path

import pytest

from nereid.assets import REPOSITORY
from nereid.server import command_line, preflight
from nereid.server.command_line import LOOPBACK, ServerOptions
from nereid.server.ports import Ports
from nereid.server.serve import check_options
from nereid.server.wheel import Wheel

WHEEL = Wheel(Path("/w/tritonserver"), Path("/w/python"), Path("/w/stub"), Path("/w/libs"))
OPTIONS = ServerOptions(Path("/r"), ports=Ports(1, 2, 3))


def flags(options: ServerOptions) -> dict[str, str]:
    """Return the command line's flags as a dict."""
    words = command_line.command(options, WHEEL, Path("/b"), "me")[1:]
    return dict(word.removeprefix("--").split("=", 1) for word in words)


def test_command_listens_on_loopback_with_everything_loaded():
    """The defaults expose nothing and load every model."""
    assert flags(OPTIONS) == {
        "id": "me",
        "model-repository": "/r",
        "backend-directory": "/b",
        "model-control-mode": "explicit",
        "load-model": "*",
        "http-address": "127.0.0.1",
        "grpc-address": "127.0.0.1",
        "metrics-address": "127.0.0.1",
        "http-port": "1",
        "grpc-port": "2",
        "metrics-port": "3",
        "http-header-forward-pattern": "(?i)^x-(variant|model-version|route-[a-z0-9-]+)$",
        "grpc-header-forward-pattern": "(?i)^x-(variant|model-version|route-[a-z0-9-]+)$",
        "backend-config": "python,thread-pool-size=144",
    }


def test_profile_names_the_config_to_use():
    """A named profile picks configs/NAME.pbtxt; `ensemble` is the plain config.pbtxt."""
    assert flags(replace(OPTIONS, profile="cpu"))["model-config-name"] == "cpu"
    assert "model-config-name" not in flags(replace(OPTIONS, profile="ensemble"))


def test_gpu_profile_has_room_for_tensors_between_models():
    """Triton's own pool of 64 MB holds less than two batches, and then copies through the host."""
    assert flags(replace(OPTIONS, profile="gpu"))["cuda-memory-pool-byte-size"] == "0:536870912"


def test_models_are_named_in_explicit_mode_only():
    """Triton refuses --load-model in the other modes."""
    assert "load-model" not in flags(replace(OPTIONS, model_control_mode="poll"))


@pytest.mark.parametrize(
    ("host", "apis"),
    [
        ("127.0.0.1", "model-repository,shared-memory,trace,logging"),
        ("0.0.0.0", "model-repository,shared-memory,trace,logging,model-config,statistics"),
    ],
    ids=["loopback", "exposed"],
)
def test_token_guards_the_administrative_apis(host, apis):
    """Beyond loopback reading configs and statistics needs the token as well."""
    given = flags(replace(OPTIONS, host=host, token="t"))

    assert given["http-restricted-api"] == given["grpc-restricted-protocol"] == f"{apis}:nereid-token=t"


def test_shared_memory_is_open_where_it_is_allowed():
    """Everything else keeps its guard."""
    given = flags(replace(OPTIONS, token="t", allow_shm=True))

    assert given["http-restricted-api"] == "model-repository,trace,logging:nereid-token=t"


@pytest.mark.parametrize(
    "words",
    [
        ("--http-address=0.0.0.0",),
        ("--grpc-address", "0.0.0.0"),
        ("--http-a=::",),
        ("--log-verbose=1", "--allow-vertex-ai=true"),
        ("--allow-sagemaker=1",),
    ],
    ids=" ".join,
)
def test_shared_memory_is_for_loopback_only(words):
    """Flags that open other addresses are refused, also as getopt's abbreviations."""
    options = ServerOptions(REPOSITORY, flags=words, allow_shm=True)
    with pytest.raises(ValueError, match=f"--allow-shm is for {LOOPBACK[0]} only, .*: --[a-z]"):
        check_options(options)

    check_options(replace(options, allow_shm=False))
    check_options(replace(options, flags=("--log-verbose=1", "--http-thread-count=2", "--id", "h")))


def test_own_environment_wins_over_the_defaults():
    """An operator's malloc setting is kept; the stub's Python comes first in PATH."""
    libpython = preflight.find_libpython(preflight.PYTHON, preflight.library_folders())

    environment = command_line.environment(
        WHEEL, {"MALLOC_TRIM_THRESHOLD_": "1", "PATH": "/bin", "OTHER": "x"}
    )

    assert (environment["MALLOC_TRIM_THRESHOLD_"], environment["OTHER"]) == ("1", "x")
    assert environment["PATH"].endswith(":/bin")
    assert environment["LD_LIBRARY_PATH"] == f"/w/libs:{libpython}"
