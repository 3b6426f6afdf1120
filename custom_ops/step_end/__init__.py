"""The end of a step: tokens are drawn, and the next step's metadata made of them. The ops: schema.py."""
