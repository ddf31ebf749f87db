"""`make gpu-check`: what kernels and the model are worth on the GPU that is here, and whether that meets the bars.

Each section runs in a process of its own with a limit, so that one that crashes or hangs fails its bars alone.
"""
