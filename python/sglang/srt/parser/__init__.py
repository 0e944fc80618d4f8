"""Parsers of answers that arrive several tokens at a time."""
