"""Users that classify over HTTP and gRPC, in a closed or an open loop, and check each response.

locust -f loadtest/locustfile.py --host http://127.0.0.1:8000
"""

import sys
from pathlib import Path

# Locust puts this folder first; modules of this folder would hide packages of the same name.
HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(entry for entry in sys.path if Path(entry).resolve() != HERE)]

from loadtest.users import locust_events, locust_users  # noqa: E402  after the path

# The user classes that Locust finds; a name on the command line selects one.
HttpCaller, GrpcCaller = locust_users.HttpCaller, locust_users.GrpcCaller
locust_events.listen()
