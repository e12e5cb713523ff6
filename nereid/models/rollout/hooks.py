"""Hooks of a rollout: commands or URLs that receive its state as JSON."""

import http.client
import shlex
import subprocess
import urllib.request

import msgspec

from nereid.base.errors import OperationFailed
from nereid.models.rollout.rollout_journal import Rollout

TIMEOUT_S = 60.0


def run(hook: str, event: str, state: Rollout) -> None:
    """Run a hook and wait for its end; an empty one does nothing.

    Args:
        hook: a command, without a shell, that gets the JSON on stdin; or a URL that gets it as a POST.
        event: `before_step` or `after_decision`.
        state: of the rollout.

    Raises:
        OperationFailed: the hook failed, or did not end within a minute.
    """
    if not hook:
        return
    body = msgspec.json.encode({"event": event, "rollout": state})
    try:
        if hook.startswith("http://"):
            _post(hook, body)
        else:
            subprocess.run(shlex.split(hook), input=body, check=True, timeout=TIMEOUT_S, capture_output=True)
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        raise OperationFailed(
            f"hook {event} '{hook}' ended with status {error.returncode}: {said[-1]}"
        ) from None
    except (OSError, ValueError, http.client.HTTPException, subprocess.TimeoutExpired) as error:
        raise OperationFailed(f"hook {event} '{hook}' failed: {error}") from None


def _post(url: str, body: bytes) -> None:
    # The address is this machine's or its network's, so no proxy is used.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    opener.open(request, timeout=TIMEOUT_S).close()
