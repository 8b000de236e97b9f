"""What runs at request time: the prediction core, its TorchServe adapter, the server and its clients."""
