"""Our part of TorchServe's frontend: its source, and the archive that `build` makes of it."""
