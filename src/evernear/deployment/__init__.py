"""Bring a release up, prove that it answers, or leave the old one in place."""
