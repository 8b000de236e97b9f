"""The servers of evernear in Python: one ASGI application, and gRPC beside it.

`app` is the application, `routes` has its routes, and `grpc_service` the same methods over gRPC. A
`service.Backend` recognizes the images: `local` with a release in this process, or `remote` with
one of the predictors in `pods`, without torch. `prep` is the preprocessing server in front of
TorchServe. `kserve` starts the containers of an InferenceService. `limits` and `protocol` limit
what clients may send. `decoder` limits the memory of decoding, and `batching` collects the images
of concurrent requests.
"""
