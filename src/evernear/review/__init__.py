"""Label live queries that the release was unsure about: a queue, the answers,
and a local page."""
