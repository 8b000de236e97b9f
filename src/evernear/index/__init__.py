"""The FAISS index of the gallery. The nearest neighbors of an image in the index determine the
image's label, or that the image is unknown."""
