"""What `nereid serve` prints when it is ready: JSON for programs, a line for persons."""

import json
import shlex
from collections.abc import Collection, Mapping

from nereid.repository.layout import output_names, readable_configs
from nereid.server.command_line import LOOPBACK, ServerOptions
from nereid.server.embedded_server import image_models
from nereid.server.run_dir import ServerRecord
from nereid.tasks import TASKS


def ready_line(record: ServerRecord, failed: Mapping[str, str]) -> str:
    """Return the ports as JSON, for programs; `not_served` has models that could not be loaded, and why."""
    return json.dumps(record.all_ports | ({"not_served": dict(failed)} if failed else {}))


def announcement(options: ServerOptions, record: ServerRecord, failed: Collection[str] = ()) -> str:
    """Return the addresses, a request to try and the models that are not served, for a person."""
    host = "127.0.0.1" if record.host == "0.0.0.0" else record.host
    addresses = ", ".join(f"{name} {host}:{port}" for name, port in record.all_ports.items())
    needs_key = options.requires_keys or (options.is_guarded and options.host not in LOOPBACK)
    key = "NEREID_KEY=KEY " if needs_key else ""
    command = _command(options, [name for name in image_models(options) if name not in failed])
    attempt = f"{key}{command}" if command else f"curl -i http://{host}:{record.ports.http}/v2/health/ready"
    missing = f"; not served: {', '.join(failed)}" if failed else ""
    return f"ready: {addresses}{missing}; try: {attempt}; stop: Ctrl-C"


def _command(options: ServerOptions, models: Collection[str]) -> str:
    """Return the command that sends an image to one of the models, "" without one."""
    configs = readable_configs(options.repository, options.profile)
    for task in TASKS:
        # A config may leave its outputs to the file.
        fitting = [name for name in models if {*task.outputs} <= {*output_names(configs[name])}]
        if task.command and not task.extends and fitting:
            words = ["nereid", task.name, "IMAGE"]
            words += ["--model", fitting[0]] * (task.model not in fitting)
            is_own = options.repository.resolve() == task.default_repository.resolve()
            return shlex.join(words if is_own else [*words, "--repository", str(options.repository)])
    return ""
