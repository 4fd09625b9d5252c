"""Agent side: command line, one file per command."""
