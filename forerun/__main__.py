"""Run the command line, as `python -m forerun`."""

from forerun.cli import main

main()
