"""evernear's extension of TorchServe's frontend: the Java sources, and the jar that `build` creates
from these sources."""
