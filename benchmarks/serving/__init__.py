"""Serving, measured: the product beside what its users have or would write; see `__main__`."""
