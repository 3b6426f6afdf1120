"""Mixtures of experts for few tokens. The ops: schema.py."""
