"""Sample photos, CC0; `CREDITS.md` beside them names their sources."""

from pathlib import Path

COFFEE = Path(__file__).with_name("coffee.jpg")
CHELSEA = Path(__file__).with_name("chelsea.jpg")
SAMPLES = (COFFEE, CHELSEA)
