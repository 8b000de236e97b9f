"""The FAISS index of the gallery, whose nearest neighbors label an image or call it unknown."""
