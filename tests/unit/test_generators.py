"""The output of generators, and the messages about missing ones."""

import pytest

from loadtest import perf_analyzer, wrk
from nereid.tune.load_generator import Load

REPORT = (
    "Concurrency,Inferences/Second,Client Send,Network+Server Send/Recv,Server Queue,Server Compute Input,"
    "Server Compute Infer,Server Compute Output,Client Recv,p50 latency,p90 latency,p95 latency,p99 latency\n"
    "32,167.75,15,1873,99856,402,84450,1646,1,177116,251970,263158,269116\n"
)
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


def test_reports_are_read():
    assert perf_analyzer.parse(REPORT) == Load(167.75, 177.116, 251.97, 269.116)
    assert wrk.parse(PRINTED) == Load(194.66, 0.9, 57.63, 1200.0, answered=195)


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (perf_analyzer.parse, "", "report is invalid"),
        (perf_analyzer.parse, REPORT.replace("167.75", "n/a"), "n/a"),
        (wrk.parse, PRINTED.replace("194.66", "0.00"), "no request was answered"),
        (wrk.parse, PRINTED + "  Non-2xx or 3xx responses: 195\n", "the rate is invalid"),
        (wrk.parse, PRINTED + "  Socket errors: connect 0, read 1\n", "the rate is invalid"),
    ],
)
def test_invalid_reports_end_the_measurement(parse, text, message):
    with pytest.raises(SystemExit, match=message):
        parse(text)
