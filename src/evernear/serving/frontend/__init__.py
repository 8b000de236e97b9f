"""evernear's extension of TorchServe's frontend: Java sources, and the jar that `build` makes."""
