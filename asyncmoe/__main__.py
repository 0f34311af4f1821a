"""`python -m asyncmoe` is the `asyncmoe` command."""

from asyncmoe.cli import main

main()
