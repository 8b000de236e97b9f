"""What a store needs, how it is checked and repaired, and what is deleted from it."""
