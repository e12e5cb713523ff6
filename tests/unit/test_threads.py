"""Threads per instance: a count in the config, or a share of the cores."""

import os

import pytest

from nereid.base.processes import available_cores
from nereid.vision.inference.run_sizes import ThreadCounts, thread_counts
from tests.tables import cases

INTRA, INTER = "intra_op_thread_count", "inter_op_thread_count"


@pytest.fixture
def one_core():
    """Bind the process to one of its cores for the time of a test."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


def test_cores_are_those_of_the_affinity(one_core):
    assert available_cores() == 1


@cases(
    ("parameters", "instances", "kind", "expected"),
    {
        "explicit": ({INTRA: "3"}, 1000, "CPU", ThreadCounts(3, 0)),
        "digits and letters": ({INTRA: " 4abc"}, 1, "CPU", ThreadCounts(4, 0)),
        "more instances than cores": ({}, 1000, "CPU", ThreadCounts(1, 0)),
        "negative": ({INTRA: "-5", INTER: "-5"}, 1000, "CPU", ThreadCounts(1, 0)),
        "kind model": ({}, 1000, "MODEL", ThreadCounts(1, 0)),
        "gpu": ({}, 1, "GPU", ThreadCounts(0, 0)),
        "explicit on gpu": ({INTRA: "3", INTER: "2"}, 1, "GPU", ThreadCounts(3, 2)),
    },
)
def test_thread_counts(parameters, instances, kind, expected):
    assert thread_counts(parameters, instances, kind) == expected


@pytest.mark.parametrize("instances", [0, 1, 2, 3])
def test_instances_share_the_cores(instances):
    shares = {0: 1.0, 1: 1.0, 2: 0.5, 3: 1 / 3}
    expected = max(1, int(available_cores() * shares[instances] + 1e-9))

    assert thread_counts({}, instances) == ThreadCounts(expected, 0)
