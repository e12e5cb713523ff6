"""The recorded growth of all series over the last hours; bounded."""

from collections import deque
from math import inf
from pathlib import Path

import msgspec
from msgspec import Struct

from nereid.drift.series import Growth, is_of_classes

RECORDING_FILE = "drift_recording.json"
# Six hours at one slot a minute.
MAX_SLOTS = 360
# Seconds until a route counts the classes of a new reference, and has reported all others.
CLASSES_AFTER_S = 6.0


class Slot(Struct, frozen=True):
    """The growth of the `seconds` before `at`, in Unix time."""

    at: float
    seconds: float
    growth: Growth


class History:
    """The newest slots, oldest first."""

    def __init__(self, max_slots: int = MAX_SLOTS) -> None:
        self.slots: deque[Slot] = deque(maxlen=max_slots)

    def add(self, slot: Slot) -> None:
        """Append a slot; beyond the limit, the oldest one is dropped."""
        self.slots.append(slot)

    def window(self, now: float, seconds: float, since: float = -inf) -> tuple[Growth, float]:
        """Return the growth in the slots that ended in the last `seconds`, and the seconds they cover.

        Args:
            now, seconds: the end and the length of the window.
            since: Unix time before which no slot may begin.
        """
        total: Growth = {}
        covered = 0.0
        for slot in self.slots:
            if now - slot.at >= seconds or slot.at - slot.seconds < since:
                continue
            covered += slot.seconds
            for series, counts in slot.growth.items():
                summed = total.setdefault(series, {})
                for bucket, count in counts.items():
                    summed[bucket] = summed.get(bucket, 0) + count
        return total, covered

    def window_since(self, stored: float, now: float, seconds: float) -> Growth:
        """Return the growth of a window, in which classes count only after a reference was stored.

        Before, the route counted other classes.
        """
        window, _ = self.window(now, seconds)
        recent, _ = self.window(now, seconds, stored + CLASSES_AFTER_S)
        return {name: counts for name, counts in window.items() if not is_of_classes(name)} | {
            name: counts for name, counts in recent.items() if is_of_classes(name)
        }

    def last_growth(self, prefix: str) -> float | None:
        """Return when a series with this prefix grew last, in Unix time; None if it never did."""
        for slot in reversed(self.slots):
            if any(series.startswith(prefix) for series in slot.growth):
                return slot.at
        return None

    def store(self, folder: Path) -> None:
        """Write the slots to a run directory, for commands.

        Raises:
            OSError: the file cannot be written.
        """
        replace(folder / RECORDING_FILE, msgspec.json.encode(list(self.slots)))

    @classmethod
    def load(cls, folder: Path) -> "History":
        """Read the slots of a run directory; none if nothing was recorded.

        Raises:
            OSError: the file cannot be read.
        """
        history = cls()
        try:
            text = (folder / RECORDING_FILE).read_bytes()
        except FileNotFoundError:
            return history
        history.slots.extend(msgspec.json.decode(text, type=list[Slot]))
        return history


def replace(path: Path, content: bytes) -> None:
    """Replace a file of a run directory atomically; it does not outlive its server, so it is not synced."""
    new = path.with_name(f".{path.name}")
    new.touch(mode=0o600)
    new.write_bytes(content)
    new.replace(path)
