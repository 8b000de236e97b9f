"""The preprocessing server accepts images as JSON, prepares them, and forwards them to TorchServe.

It does not need torch. `service` prepares and recognizes images, and `app` is the HTTP API.
"""
