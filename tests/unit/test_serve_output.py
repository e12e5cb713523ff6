"""The line that `nereid serve` prints for persons when it is ready."""

import pytest

from nereid.base.assets import REPOSITORY
from nereid.server.command_line import ServerOptions
from nereid.server.ports import Ports
from nereid.server.ready_line import announcement
from nereid.server.run_dir import ServerRecord


def record(host: str = "127.0.0.1") -> ServerRecord:
    return ServerRecord(1, host, Ports(1, 2, 3), "/r", "cpu", "secret", 4)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_persons_get_addresses_and_a_request_to_try(host):
    line = announcement(ServerOptions(REPOSITORY, "cpu"), record(host))

    assert line == (
        "ready: http 127.0.0.1:1, grpc 127.0.0.1:2, metrics 127.0.0.1:3, health 127.0.0.1:4; "
        "try: nereid classify IMAGE; stop: Ctrl-C"
    )


def test_request_to_try_is_for_a_served_model(tmp_path):
    line = announcement(ServerOptions(REPOSITORY, "cpu"), record(), {"classify": "reason", "dogs": "reason"})
    assert "; not served: classify, dogs; try: nereid classify IMAGE --model classify_v1;" in line

    assert "curl -i http://127.0.0.1:1/v2/health/ready;" in announcement(ServerOptions(tmp_path), record())


def test_model_that_leaves_its_outputs_to_the_file_is_not_tried(tmp_path):
    (tmp_path / "m" / "1").mkdir(parents=True)
    text = 'backend: "onnxruntime" input { name: "image" data_type: TYPE_STRING dims: [ 1 ] }'
    (tmp_path / "m" / "config.pbtxt").write_text(text)

    assert "/v2/health/ready;" in announcement(ServerOptions(tmp_path), record())
