"""Measure candidate and champion, as they are served, on the same frozen test split, and decide
whether to promote the candidate."""
