"""Layers that keep one state per request, however long it is: causal convolutions and linear attention."""
