"""Measure the candidate and the champion on the same frozen test split, and decide whether to
promote the candidate.

Both systems are measured as they are served.
"""
