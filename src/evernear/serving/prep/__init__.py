"""The preprocessing server: it accepts images as JSON, prepares them,
and forwards them to TorchServe.

The server does not need torch. `service` does the work, `app` is the HTTP API, and
`releases` provides the preprocessing of each release.
"""
