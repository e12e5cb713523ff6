"""The report of a failed device, after which the supervisor replaces the process."""

import os

from nereid.backends.triton.tensors import log_error
from nereid.base.config.model_config import ModelConfig
from nereid.base.contract import format_failed_device


def report_failed_device(config: ModelConfig, reason: str) -> None:
    """Write to Triton's log that the device of this process has failed."""
    log_error(format_failed_device(os.getpid(), f"'{config.name}' version {config.version}", reason))
