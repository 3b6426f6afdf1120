"""Which keys sparse attention attends to: an indexer's keys in a pool, its logits, and the best positions."""
