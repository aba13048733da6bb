"""One file per question: each prints a table with the limit it is measured against, and --json for scripts."""
