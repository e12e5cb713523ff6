"""What the check on a GPU makes of other programs' reports; the rest of it needs a GPU."""

import pytest

from loadtest import gpu_check

REPORT = '<testsuites><testsuite name="pytest" errors="1" failures="2" skipped="3" tests="10"/></testsuites>'
TO_DEVICE, TO_HOST = "[CUDA memcpy Host-to-Device]", "[CUDA memcpy Device-to-Host]"
STATS = f"""
Processing trace.sqlite with cuda_gpu_mem_size_sum.py...

Total (MB),Count,Avg (MB),Med (MB),Min (MB),Max (MB),StdDev (MB),Operation
65.536,640,0.102,0.102,0.000,0.105,0.001,{TO_DEVICE}
0.004,20,0.000,0.000,0.000,0.000,0.000,{TO_HOST}

"""
PASSED = {"passed": 5, "failed": 0, "skipped": 1}


def test_outcomes_are_counted():
    """A test that ended in an error has failed; what is left has passed."""
    assert gpu_check.count_tests(REPORT) == {"passed": 4, "failed": 3, "skipped": 3}


def test_copies_are_read_from_the_trace():
    """Bytes by direction; nsys says some words first."""
    assert gpu_check.copied_bytes(STATS) == {TO_DEVICE: 65_536_000, TO_HOST: 4000}


@pytest.mark.parametrize(
    ("tests", "copies", "expected"),
    [
        (PASSED, None, 0),
        (PASSED, {TO_DEVICE: 10**8, TO_HOST: 4000}, 0),
        ({**PASSED, "failed": 1}, None, 1),
        ({**PASSED, "passed": 0}, None, 1),
        (gpu_check.count_tests("<testsuites/>"), None, 1),
        (PASSED, {}, 1),
        (PASSED, {TO_DEVICE: 10**8, TO_HOST: gpu_check.ROW_BYTES}, 1),
    ],
    ids=[
        "no trace",
        "status only",
        "failed",
        "all skipped",
        "no report",
        "empty trace",
        "tensor on the host",
    ],
)
def test_check_fails_for_what_it_has_not_seen(tests, copies, expected):
    """It passes only if GPU tests ran and passed, and if no trace shows a tensor come back."""
    assert len(gpu_check.problems(tests, copies)) == expected
