"""How much the long tests do: little in CI, the full counts in `make proof`."""

import os

REQUESTS = int(os.environ.get("SLOW_REQUESTS", "1000"))
IS_PROOF = REQUESTS >= 20_000
