"""Converters between datasets and the files of other projects, both ways: streaming, resumable, verified."""
