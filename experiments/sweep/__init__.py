"""Sweeps: cells in worker processes, each with a status, finished once."""
