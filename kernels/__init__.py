"""One folder an op: reference.py, triton.py, cpu.py where a faster CPU path exists."""
