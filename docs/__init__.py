"""The documentation, and the module that builds it as a site."""
