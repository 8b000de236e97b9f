"""The pages. Each module contains a class whose methods are the endpoints of one page."""
