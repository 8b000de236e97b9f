"""The preprocessing server: images in as JSON, prepared here, recognised by TorchServe behind it.

`service` does the work, `app` is its HTTP, `releases` knows what each release prescribes. No torch in it.
"""
