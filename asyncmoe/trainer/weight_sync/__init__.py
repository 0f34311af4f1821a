"""Publishing weight versions from the trainer's ranks to the engines."""
