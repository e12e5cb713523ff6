"""The line that `nereid serve` prints on stdout when it is ready."""

import json

import pytest

from nereid.assets import REPOSITORY
from nereid.server.command_line import ServerOptions
from nereid.server.ports import Ports
from nereid.server.run_dir import ServerRecord
from nereid.server.serve import announcement, ready_line


def record(host: str = "127.0.0.1", health_port: int = 0) -> ServerRecord:
    return ServerRecord(1, host, Ports(1, 2, 3), "/r", "cpu", "secret", health_port)


def test_programs_get_the_ports_as_json():
    ports = {"http": 1, "grpc": 2, "metrics": 3}

    assert json.loads(ready_line(record(), {})) == ports
    assert json.loads(ready_line(record(health_port=4), {})) == {**ports, "health": 4}
    failed = {"dogs": "model 'dogs': no labels"}
    assert json.loads(ready_line(record(), failed)) == {**ports, "not_served": failed}


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_persons_get_addresses_and_a_request_to_try(host):
    line = announcement(ServerOptions(REPOSITORY, "cpu"), record(host, health_port=4))

    assert line == (
        "ready: http 127.0.0.1:1, grpc 127.0.0.1:2, metrics 127.0.0.1:3, health 127.0.0.1:4; "
        "try: curl -i http://127.0.0.1:1/v2/models/classify; stop: Ctrl-C"
    )


def test_request_to_try_is_for_a_served_model(tmp_path):
    line = announcement(ServerOptions(REPOSITORY, "cpu"), record(), {"classify": "reason", "dogs": "reason"})
    assert "; not served: classify, dogs; try: curl -i http://127.0.0.1:1/v2/models/classify_v1;" in line

    assert "curl -i http://127.0.0.1:1/v2/health/ready;" in announcement(ServerOptions(tmp_path), record())
