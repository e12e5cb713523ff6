"""`python -m nereid`: the `nereid` command."""

from nereid.cli.main import main

main()
