"""Starting the processes of a run: everything on this machine (`local`)."""
