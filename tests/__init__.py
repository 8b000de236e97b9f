"""The tests. CONTRIBUTING.md describes their directories."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The checkout."""
