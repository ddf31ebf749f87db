"""Runs side by side: tables, plots, and why one was slow or fast."""
