"""The numbers of activations in the constants of kernels, as activation.cuh has them."""

ACTIVATIONS = {"none": 0, "silu": 1, "gelu_tanh": 2, "gelu": 3}
