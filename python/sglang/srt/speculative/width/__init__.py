"""Verify widths: how much of a block a cycle verifies (`--speculative-adaptive`)."""
