"""`python -m asyncmoe` runs the `asyncmoe` command."""

from asyncmoe.cli import main

main()
