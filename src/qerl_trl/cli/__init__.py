"""The command line `qerl-trl`."""
