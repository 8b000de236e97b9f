"""Candidate and champion, both as served, measured on the same frozen test split; and who may serve next."""
