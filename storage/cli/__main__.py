"""`python -m storage.cli`, where the `statehouse` command is not on the path."""

from storage.cli import main

main()
