"""Users that classify over HTTP and gRPC, in a closed or an open loop, and check every answer.

locust -f loadtest/locustfile.py --host http://127.0.0.1:8000
"""

import sys
from pathlib import Path

# Locust puts this folder first, where clients.py would hide the package `clients`.
HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(each for each in sys.path if Path(each).resolve() != HERE)]

from loadtest.users import callers, events  # noqa: E402  after the path

# What Locust looks for in a locustfile. Name one on the command line to have only that.
HttpCaller, GrpcCaller = callers.HttpCaller, callers.GrpcCaller
events.listen()
