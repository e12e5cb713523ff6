"""A session as Triton's backends use one: set up by the server's flags, measured, announced in the log."""

import time

from nereid.config.model_config import ModelConfig
from nereid.config.server_flags import server_command_line
from nereid.inference.session import Session
from nereid.inference.session_options import BackendSettings
from nereid.triton.tensors import SessionMetrics, log_info


def backend_settings() -> BackendSettings:
    """Read what the server's command line says about ONNX Runtime."""
    return BackendSettings.from_command_line(server_command_line())


def open_session(config: ModelConfig, network: ModelConfig) -> tuple[Session, SessionMetrics]:
    """Open `network` for an instance of the model `config`, and say so in the log, once per model.

    Raises:
        InvalidConfig: the network cannot be served as its config says.
    """
    metrics = SessionMetrics(config.name, config.version)
    start = time.perf_counter()
    instances = None if network is config else config.cpu_instances
    session = Session.from_config(network, backend_settings(), instances, metrics.ran)
    metrics.opened(session.provider, time.perf_counter() - start)
    if config.is_first:
        log_info(f"'{config.name}' version {config.version}: {session}")
    return session, metrics
