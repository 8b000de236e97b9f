"""Measure candidate and champion as served, on the same frozen test split, and decide on promotion."""
