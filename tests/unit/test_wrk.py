"""The output of `wrk`."""

import pytest

from loadtest import wrk
from nereid.tune.load_generator import Load

PRINTED = """Running 1s test @ http://127.0.0.1:1/v2/models/classify_v1/infer
  1 threads and 8 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency    41.07ms   12.07ms  96.63ms   80.51%
    Req/Sec   195.10     22.99   230.00     70.00%
  Latency Distribution
     50%  900.00us
     75%   44.41ms
     90%   57.63ms
     99%    1.20s
  195 requests in 1.00s, 0.97MB read
Requests/sec:    194.66
"""


def test_report_is_read():
    assert wrk.parse(PRINTED) == Load(194.66, 0.9, 57.63, 1200.0, answered=195)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (PRINTED.replace("194.66", "0.00"), "no request was answered"),
        (PRINTED + "  Non-2xx or 3xx responses: 195\n", "the rate is invalid"),
        (PRINTED + "  Socket errors: connect 0, read 1\n", "the rate is invalid"),
    ],
)
def test_invalid_reports_end_the_measurement(text, message):
    with pytest.raises(SystemExit, match=message):
        wrk.parse(text)
