"""CUDA C++ kernels, compiled by NVRTC at first launch. Needs torch and cuda-bindings (which torch's CUDA wheels bring along)."""
