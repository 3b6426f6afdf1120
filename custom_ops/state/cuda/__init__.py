"""States of hybrid models in CUDA C++, for Hopper."""
