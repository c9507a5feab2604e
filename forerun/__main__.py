"""`python -m forerun`."""

from forerun.cli import main

main()
