"""The pages. Each module has a class whose methods are the endpoints of one page."""
