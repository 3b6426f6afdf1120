"""Loads and engines of bench_serving.py and bench_serving_peers.py."""
