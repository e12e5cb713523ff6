"""Print what pyproject.toml requires, with the extras that the command line names.

python3 deploy/requirements.py embedded,cpu
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
print(*project["dependencies"], *(line for name in sys.argv[1].split(",") for line in extras[name]), sep="\n")
