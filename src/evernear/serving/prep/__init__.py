"""The preprocessing server, which accepts images as JSON, prepares the images, and forwards them to
TorchServe.

The server does not need torch. `service` prepares and recognizes images, `app` is the HTTP API, and
`releases` provides each release's preprocessing.
"""
