"""What the CUDA C++ kernels of all families share: compiler, cache of machine code, PTX; the kernels lie with
their families."""
