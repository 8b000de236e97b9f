"""Servers that stand in for the network:
each speaks a real protocol and checks what the real one checks."""
