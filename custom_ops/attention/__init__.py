"""Attention over paged keys and values, whole or in parts that are merged. The ops: schema.py."""
