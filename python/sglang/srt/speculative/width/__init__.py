"""How many slots of a drafted block to verify: `--speculative-adaptive`."""
