"""The servers of evernear in Python: one ASGI application, and gRPC beside it.

`app` is the application, with the routes of `json_routes` and `kserve_routes`, and `grpc_service`
has the same methods. A `service.Backend` recognizes the images: `local` with a release in this
process, or `remote` with one of the predictors in `pods`, without torch. `prep` is the
preprocessing server in front of TorchServe. `kserve` starts the containers of an InferenceService.
`limits` and `protocol` bound what clients may send to any server, `decoder` and `batching` what
decoding takes.
"""
