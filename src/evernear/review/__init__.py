"""Label live queries about which the release was uncertain."""
