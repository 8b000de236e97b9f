"""Measure candidate and champion on the same frozen test split,
and decide on promotion.

Both systems are measured as they are served.
"""
