"""Triton's protobuf messages without its gRPC client, which takes 10 MB of memory in every process."""

import sys
from importlib import util
from pathlib import Path
from typing import Any

MODULE = "tritonclient.grpc.model_config_pb2"


def model_config() -> Any:
    """Return an empty message of the type ModelConfig."""
    if MODULE not in sys.modules:
        # The import system would load the whole package `tritonclient.grpc` first.
        package = util.find_spec("tritonclient")
        assert package is not None, "tritonclient is a dependency"
        assert package.submodule_search_locations, "tritonclient is a package"
        path = Path(package.submodule_search_locations[0], *MODULE.split(".")[1:]).with_suffix(".py")
        spec = util.spec_from_file_location(MODULE, path)
        assert spec is not None, path
        assert spec.loader is not None, path
        sys.modules[MODULE] = module = util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[MODULE].ModelConfig()
