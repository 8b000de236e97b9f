"""The preprocessing server: images as JSON in, prepared here, recognized by TorchServe behind it. It needs no torch.

`service` does the work, `app` is its HTTP API, and `releases` provides the preprocessing of each release.
"""
