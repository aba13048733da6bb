"""The commands of `python -m vocab`, one a file: `add(commands)` puts its parser in, its `run` does the work."""
