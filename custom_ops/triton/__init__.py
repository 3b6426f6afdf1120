"""What the Triton kernels of all families share; the kernels lie with their families."""
